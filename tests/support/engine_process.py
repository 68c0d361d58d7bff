"""One process of an engine with a real client, told what to do by lines of JSON on its stdin.

`tests/support/processes.py` starts it and speaks to it. It prints one answer a line, and events
(`{"event": ...}`) in between.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.client import ClientSettings, SessionRef
from kvtier.client.values import DIRECT_SLOTS, Lease
from kvtier.errors import KVTierError, StaleSlot, Unavailable
from kvtier.types import Role
from tests.support import known_blocks, session_churn
from tests.support.known_blocks import WrongBytes, chain_hashes, spec_of
from tests.support.mixed_load import LoadPlan, MixedLoad
from tests.support.timed_client import TimedClient, measured_jitter

Answer = dict[str, Any]

SCRIBBLE = 0xEE  # What an unfinished copy writes: right for no block.
START_SECONDS_MAX = 60.0
CHAIN_BLOCKS_MAX = 8


class EngineProcess:
    """The verbs; each takes the command's fields and gives the answer's."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.socket = Path(options.socket)
        self.settings = ClientSettings(
            timeout_seconds=options.timeout_seconds, retry_seconds_max=0.2
        )
        self.client = TimedClient(
            options.socket,
            engine_id=bytes.fromhex(options.engine_id),
            role=Role[options.role],
            name=options.name,
            maps_segments=bool(options.maps_segments),
            settings=self.settings,
        )
        self.namespace = self.client.open_namespace(spec_of(options.salt, options.shard_bytes))
        self.arena = self.client.arena(self.namespace)
        self._is_copying = threading.Event()
        self._copier: threading.Thread | None = None
        self._print_lock = threading.Lock()
        self._churners: list[threading.Thread] = []
        self._churn_ends = threading.Event()
        self._leases: dict[str, Lease] = {}
        self._has_ended = False
        self.jitter_seconds: Callable[[], float] = lambda: 0.0

    def say(self, **fields: Any) -> None:
        """One line; a pipe holds it even if this process is killed right after."""
        with self._print_lock:
            os.write(1, (json.dumps(fields) + "\n").encode())

    def session(self) -> Answer:
        found = self.client.session
        ref = None if found is None else [found.generation, found.session_id]
        state = self.namespace.state
        return {
            "session": ref,
            "epoch": None if state is None else state.epoch,
            "mapped": self.arena.mapped_slot_count,
            "is_open": state is not None,
        }

    def reserve(self, count: int) -> Answer:
        given = known_blocks.reserve(self.client, self.namespace, count)
        ref = [given.session.generation, given.session.session_id]
        return {"slots": given.slots.tolist(), "session": ref, "epoch": given.epoch}

    def commit(
        self,
        hashes: list[str],
        slots: list[int],
        session: list[int],
        epoch: int,
        parent: str | None = None,
    ) -> Answer:
        outcomes = self.client.commit(
            self.namespace,
            [bytes.fromhex(one) for one in hashes],
            slots,
            parent=None if parent is None else bytes.fromhex(parent),
            session=SessionRef(*session),
            epoch=epoch,
        )
        return {"outcomes": [one.name for one in outcomes]}

    def abort(self, slots: list[int], session: list[int]) -> Answer:
        ref = SessionRef(*session)
        return {"freed": self.client.abort(self.namespace, slots, session=ref)}

    def offload(self, label: str, count: int) -> Answer:
        hashes = chain_hashes(label, count)
        return {"count": known_blocks.offload(self.client, self.namespace, hashes)}

    def fill(self, label: str, count: int) -> Answer:
        """Commit up to `count` blocks as long as there are slots at once; without their bytes."""
        hashes, done = chain_hashes(label, count), 0
        slots: list[int] = []
        while done < count:
            given = self.client.reserve(self.namespace, count - done)
            if not len(given.slots):
                break
            some = hashes[done : done + len(given.slots)]
            self.client.commit(
                self.namespace,
                some,
                given.slots,
                parent=hashes[done - 1] if done else None,
                session=given.session,
                epoch=given.epoch,
            )
            done += len(some)
            slots += given.slots.tolist()
        return {"count": done, "slots": slots}

    def onboard(self, label: str, count: int) -> Answer:
        hashes = chain_hashes(label, count)
        return {"count": known_blocks.onboard(self.client, self.namespace, hashes)}

    def onboard_all(self, chains: dict[str, int]) -> Answer:
        """How many blocks of all of them were hits."""
        hits = 0
        for label, count in chains.items():
            hits += known_blocks.onboard(self.client, self.namespace, chain_hashes(label, count))
        return {"count": hits}

    def longest(self) -> Answer:
        """The longest of all calls so far, and for how long no thread of ours may have run."""
        seconds, name = self.client.longest
        return {"seconds": seconds, "name": name, "jitter": self.jitter_seconds()}

    def acquire(self, label: str, count: int, wait_seconds: float = 0.0) -> Answer:
        """A lease that is kept until this process ends."""
        started = time.monotonic()
        lease = self.client.acquire(
            self.namespace, chain_hashes(label, count), wait_seconds=wait_seconds
        )
        seconds = time.monotonic() - started
        return {"count": lease.leased_count, "cut": lease.cut.name, "seconds": seconds}

    def begin_copy(self, slots: list[int], session: list[int]) -> Answer:
        """Write into the slots again and again until `end_copy`: a copy that is never done."""
        ref = SessionRef(*session)
        has_begun = threading.Event()
        failed: list[KVTierError] = []
        self._is_copying.set()

        def copy() -> None:
            try:
                with self.arena.hold(slots, ref) as views:
                    while self._is_copying.is_set():
                        for view in views:
                            view[: len(view) // 2] = SCRIBBLE
                            view[len(view) // 2 :] = SCRIBBLE
                        has_begun.set()
            except KVTierError as error:
                failed.append(error)
            has_begun.set()

        self._copier = threading.Thread(target=copy)
        self._copier.start()
        has_begun.wait()
        if failed:
            self._copier.join()
            raise failed[0]
        return {}

    def end_copy(self) -> Answer:
        self._is_copying.clear()
        assert self._copier is not None, "no copy was begun"
        self._copier.join()
        return {}

    def fork(self, kind: str) -> Answer:
        """A child that lives on: "python" runs the handlers of a fork, "bare" runs none."""
        if kind == "bare":
            libc = ctypes.PyDLL(None)  # The GIL stays ours: nothing else runs in the child.
            pid = int(libc.fork())
            if pid == 0:
                libc.close(1)  # The test waits for the end of our stdout.
                while True:
                    libc.pause()
            return {"pid": pid}
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            os.write(write_end, self._seen_in_child().encode())
            os.close(write_end)
            os.close(1)
            while True:
                time.sleep(60)
        os.close(write_end)
        with os.fdopen(read_end) as told:
            return {"pid": pid, "errors": told.read().split()}

    def _seen_in_child(self) -> str:
        calls: list[Callable[[], object]] = [
            lambda: self.client.match(self.namespace, chain_hashes("x", 1)),
            lambda: self.client.reserve(self.namespace, 1),
            self.client.stats,
            lambda: self.arena.view(0, SessionRef(0, 0)),
        ]
        names = []
        for call in calls:
            try:
                call()
                names.append("returned")
            except Unavailable:
                names.append("Unavailable")
        return " ".join(names)

    def end_child(self, pid: int) -> Answer:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        return {}

    def use_stale(self, slots: list[int], session: list[int]) -> Answer:
        """What the verbs of slots say to slots of an old session; each must refuse."""
        ref = SessionRef(*session)
        hashes = chain_hashes("stale", len(slots))
        calls: list[Callable[[], object]] = [
            lambda: self.arena.views(slots, ref),
            lambda: self.client.commit(self.namespace, hashes, slots, session=ref, epoch=1),
            lambda: self.client.abort(self.namespace, slots, session=ref),
        ]
        names = []
        for call in calls:
            try:
                call()
                names.append("returned")
            except KVTierError as error:
                names.append(type(error).__name__)
        return {"errors": names}

    # ------------------------------------------------------------------------------- long leases

    def lease(self, label: str, count: int) -> Answer:
        """Acquire and keep it; how many blocks, and how many of them in the CXL tier."""
        hashes = chain_hashes(label, count)
        lease = self.client.acquire(self.namespace, hashes)
        self._leases[label] = lease
        direct_count = sum(slot >= DIRECT_SLOTS for slot in lease.slots.tolist())
        return {"count": lease.leased_count, "direct": direct_count}

    def read_leased(self, label: str) -> Answer:
        """Compare what a kept lease is on; WrongBytes is an error."""
        lease = self._leases[label]
        found = known_blocks.read_leased(self.client, self.namespace, lease)
        hashes = chain_hashes(label, lease.leased_count)
        for one, data in zip(hashes, found or [], strict=False):
            known_blocks.check_payload(one, data, "under a lease")
        return {"count": len(found or [])}

    # ----------------------------------------------------------------------------------- churn

    def churn(self, seed: int, chain_count: int, pause_seconds: float, others: list[str]) -> Answer:
        """Begin to offload and onboard at random in the background, until the end.

        Events: acked (a chain's first `count` blocks are resident by the daemon's word), hits
        (right bytes) and wrong.
        """
        churner = threading.Thread(
            target=self._churn, args=(seed, chain_count, pause_seconds, others), daemon=True
        )
        self._churners.append(churner)
        churner.start()
        return {}

    def mix(self, seed: int, pause_seconds: float, others: list[int], clears: bool) -> Answer:
        """Begin a mixed load in the background (mixed_load.py), until `end_churn`."""
        plan = LoadPlan(seed, pause_seconds, others, clears)
        load = MixedLoad(self.client, self.namespace, plan, self.say)
        mixer = threading.Thread(target=load.run, args=(self._churn_ends,), daemon=True)
        self._churners.append(mixer)
        mixer.start()
        return {}

    def live(self, **plan: Any) -> Answer:
        """Begin sessions of their own beside this one (session_churn.py), until the end."""
        session_churn.begin(self.socket, plan, self.say)
        return {}

    def end_churn(self) -> Answer:
        """Returns when the last churn has ended what it was doing."""
        self._churn_ends.set()
        for churner in self._churners:
            churner.join()
        self._churners.clear()
        self._churn_ends.clear()
        return {}

    def _churn(self, seed: int, chain_count: int, pause_seconds: float, others: list[str]) -> None:
        rng = random.Random(seed)
        known: list[tuple[str, int]] = []

        def pause() -> None:
            if rng.random() < 0.5:
                time.sleep(rng.random() * pause_seconds)

        made = 0
        while made < chain_count and not self._churn_ends.is_set():
            try:
                if not known or rng.random() < 0.5:
                    made += 1
                    label, count = f"{seed}:{made}", rng.randint(1, CHAIN_BLOCKS_MAX)
                    known.append((label, count))
                    self._offload_acked(label, count, pause)
                else:
                    label, count = rng.choice(known[-32:])
                    if others and rng.random() < 0.5:
                        other = f"{rng.choice(others)}:{rng.randint(1, made + 8)}"
                        label, count = other, CHAIN_BLOCKS_MAX
                    self._onboard_counted(label, count)
            except WrongBytes as error:
                self.say(event="wrong", text=f"{label}: {error}")
            except (KVTierError, TimeoutError) as error:
                self.say(event="refused", name=type(error).__name__)
                time.sleep(0.01)
        self.say(event="churned", count=made)

    def _offload_acked(self, label: str, count: int, pause: Callable[[], None]) -> None:
        hashes = chain_hashes(label, count)

        def acknowledge(done: int) -> None:
            state = self.namespace.state
            epoch = 0 if state is None else state.epoch
            generation = 0 if state is None else state.session.generation
            self.say(event="acked", label=label, count=done, epoch=epoch, generation=generation)

        # Slots of a session that was lost in between return by themselves.
        with contextlib.suppress(StaleSlot):
            known_blocks.offload(
                self.client, self.namespace, hashes, pause=pause, acknowledge=acknowledge
            )

    def _onboard_counted(self, label: str, count: int) -> None:
        hits = known_blocks.onboard(self.client, self.namespace, chain_hashes(label, count))
        self.say(event="hits", count=hits)

    def end(self) -> Answer:
        self._has_ended = True
        return {}

    # ------------------------------------------------------------------------------------ loop

    def wait_started(self, needs_slots: bool) -> None:
        if not self.client.wait_namespace(self.namespace, START_SECONDS_MAX):
            raise TimeoutError(f"the namespace was not opened: {self.namespace.error}")
        deadline = time.monotonic() + START_SECONDS_MAX
        while needs_slots and not self.arena.mapped_slot_count:
            if time.monotonic() > deadline:
                raise TimeoutError("no slab was mapped")
            time.sleep(0.002)

    def serve(self) -> None:
        for line in sys.stdin:
            fields = json.loads(line)
            verb = getattr(self, fields.pop("do"))
            try:
                self.say(**verb(**fields))
            except (KVTierError, AssertionError, TimeoutError) as error:
                self.say(error=type(error).__name__, text=str(error))
            if self._has_ended:
                break
        self.client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("socket")
    parser.add_argument("--engine-id", required=True)
    parser.add_argument("--role", default="BOTH")
    parser.add_argument("--name", default="engine")
    parser.add_argument("--salt", default="")
    parser.add_argument("--shard-bytes", type=int, default=known_blocks.SHARD_BYTES)
    parser.add_argument("--timeout-seconds", type=float, default=5.0)
    parser.add_argument("--maps-segments", type=int, default=0)
    parser.add_argument("--watches-jitter", type=int, default=0)
    options = parser.parse_args()
    np.seterr(all="raise")
    engine = EngineProcess(options)
    engine.wait_started(options.role != "SCHEDULER")
    engine.say(event="started", pid=os.getpid())
    with contextlib.ExitStack() as watching:
        if options.watches_jitter:
            jitter = watching.enter_context(measured_jitter())
            engine.jitter_seconds = lambda: jitter.seconds_max
        engine.serve()


if __name__ == "__main__":
    main()
