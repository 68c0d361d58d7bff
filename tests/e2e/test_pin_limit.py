"""Two clients whose acquires together exceed the pin limit."""

from __future__ import annotations

from tests.support.daemon import running_daemon
from tests.support.known_blocks import chain_hashes
from tests.support.observer import observing
from tests.support.processes import engine_processes, eventually

CHAIN_BLOCKS = 48
SLOT_COUNT = 128
WAIT_SECONDS = 30.0  # What an acquire that is held back would take.


def test_acquires_beyond_the_pin_limit_are_cut_at_once() -> None:
    options = {"lease.grace_seconds": "0.1"}
    with (
        running_daemon(dram_bytes="16MiB", slab_bytes="4MiB", options=options) as daemon,
        engine_processes() as engines,
        observing(daemon.socket) as observer,
    ):
        daemon.wait_populated()
        for label in ("one", "two", "rest"):
            assert observer.offload(label, CHAIN_BLOCKS) > 0
        for label in ("one", "two"):
            assert observer.offload(label, CHAIN_BLOCKS) == CHAIN_BLOCKS
        assert observer.dram().slot_count == SLOT_COUNT
        launched = [engines.launch(daemon.socket) for _ in range(2)]
        first, second = [engine.wait_started() for engine in launched]
        asked = {"count": CHAIN_BLOCKS, "wait_seconds": WAIT_SECONDS}
        first.send("acquire", label="one", **asked)
        second.send("acquire", label="two", **asked)
        leases = [first.answer(), second.answer()]
        assert all(lease["seconds"] < WAIT_SECONDS / 3 for lease in leases), leases
        assert sorted(lease["cut"] for lease in leases) == ["NONE", "PIN_LIMIT"]
        assert sum(lease["count"] for lease in leases) == SLOT_COUNT // 2
        third = observer.client.acquire(observer.namespace, chain_hashes("one", 1), wait_seconds=30)
        assert third.leased_count <= 1  # Leased already by the first: it costs no more pins.
        observer.client.release([third])
        is_first_cut = leases[0]["cut"] == "PIN_LIMIT"
        holder, other = (second, first) if is_first_cut else (first, second)
        holder.kill()
        observer.wait_settled()
        again = other.ask("acquire", label="one" if is_first_cut else "two", **asked)
        assert (again["count"], again["cut"]) == (CHAIN_BLOCKS, "NONE")
        eventually(lambda: observer.dram().pinned_count == CHAIN_BLOCKS, "only its pins are left")
        observer.check()
