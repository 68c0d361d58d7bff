"""The connector under random interleavings, beside an engine too simple to be wrong.

The engine here overwrites device blocks the moment it may, so that every copy that comes too early
or too late shows as wrong bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.connector.jobs import StepOutcome
from kvtier.connector.settings import ConnectorSettings
from kvtier.errors import Unavailable
from tests.support.connector_rig import SHARD_BYTES, Rig, chain_of, content_of, spec_of

DEVICE_BLOCK_COUNT = 30
REQUEST_COUNT_MAX = 6
WAITING_ACQUIRES_MAX = 2
TROUBLES = [
    *("reset", "clear", "recall", "disconnect", "reconnect", "restart"),
    *("match", "acquire", "reserve", "commit"),
]
PATHS = st.lists(st.sampled_from("aab"), min_size=2, max_size=6)


@dataclass(eq=False)
class ModelRequest:
    request_id: str
    chain: list[bytes]
    phase: str = "waiting"  # Or "loading", "running".
    device_blocks: list[int] = field(default_factory=list)
    computed_count: int = 0
    load_count: int = 0


class ConnectorMachine(RuleBasedStateMachine):
    """Two workers, few slots, few device blocks, short chains that share prefixes."""

    holds_preempted_blocks = True

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(
            slot_count=20,
            worker_count=2,
            device_block_count=DEVICE_BLOCK_COUNT,
            settings=ConnectorSettings(
                worker_count=2,
                stock_blocks=4,
                stock_blocks_max=8,
                offload_blocks_max=8,
                offload_blocks_per_plan=5,
                offload_slice_blocks=2,
                acquires_in_flight_max=3,
                failed_hashes_max=2,
                resident_hashes_max=6,
                holds_preempted_blocks=self.holds_preempted_blocks,
                lingering_requests_max=2,
                lingering_blocks_max=9,
                waiting_acquires_max=WAITING_ACQUIRES_MAX,
                # Half a second a block of two shards.
                nvme_bytes_per_second=8 * SHARD_BYTES,
                nvme_wait_seconds_max=1.5,
            ),
        )
        self.weights = "v1"
        self.free = list(range(DEVICE_BLOCK_COUNT))
        self.requests: dict[str, ModelRequest] = {}
        self.kept: dict[str, list[int]] = {}
        self.count = 0
        self.is_dirty = False  # A call was lost whose effect the daemon never saw.

    # ------------------------------------------------------------------------------- the engine

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give(self, device_blocks: list[int]) -> None:
        for copier in self.rig.copiers:
            copier.blocks[device_blocks] = 0xEE
        self.free += device_blocks

    def write(self, request: ModelRequest, first: int, last: int) -> None:
        hashes, blocks = request.chain[first:last], request.device_blocks[first:last]
        self.rig.compute(hashes, blocks, weights=self.weights)

    def pick(self, data: st.DataObject, phase: str) -> ModelRequest | None:
        found = [r for r in self.requests.values() if r.phase == phase]
        return data.draw(st.sampled_from(found)) if found else None

    def let_go(self, request: ModelRequest, *, keep: bool) -> None:
        if keep:
            self.kept.setdefault(request.request_id, []).extend(request.device_blocks)
        else:
            self.give(request.device_blocks)
        request.device_blocks, request.computed_count = [], 0

    def apply(self, outcome: StepOutcome) -> None:
        for request_id in outcome.onboarded:
            request = self.requests[request_id]
            assert request.phase == "loading"
            last = request.computed_count + request.load_count
            for index in range(request.computed_count, last):
                for shard, copier in enumerate(self.rig.copiers):
                    right = content_of(request.chain[index], shard, self.weights)
                    assert (copier.blocks[request.device_blocks[index]] == right).all()
            request.computed_count, request.phase = last, "running"
        for request_id in outcome.failed:
            request = self.requests[request_id]
            assert request.phase == "loading"
            request.phase = "running"
        for request_id in outcome.released:
            self.give(self.kept.pop(request_id))

    @precondition(lambda self: len(self.requests) < REQUEST_COUNT_MAX)
    @rule(path=PATHS)
    def arrive(self, path: list[str]) -> None:
        if self.rig.client.session is None:
            self.rig.client.reconnect()
        self.count += 1
        request = ModelRequest(f"r{self.count}", chain_of(*path))
        self.requests[request.request_id] = request
        self.rig.scheduler.on_new_request(request.request_id, request.chain)

    @rule(data=st.data(), local_count=st.integers(0, 2), less=st.integers(0, 1))
    def schedule(self, data: st.DataObject, local_count: int, less: int) -> None:
        request = self.pick(data, "waiting")
        if request is not None:
            self.try_to_start(request, local_count, less)

    @precondition(lambda self: len(self.requests) < REQUEST_COUNT_MAX)
    @rule(
        path=PATHS,
        local_count=st.integers(0, 2),
        step_count=st.integers(0, 4),
        demoted_from=st.integers(0, 6),
    )
    def serve(self, path: list[str], local_count: int, step_count: int, demoted_from: int) -> None:
        """A request on a good day, as far as its planning; what follows is up to other rules."""
        for block_hash in chain_of(*path)[demoted_from : demoted_from + 1]:
            if block_hash in self.rig.namespace.resident:
                self.rig.client.demote(self.rig.namespace, block_hash)
        self.arrive(path)
        request = self.requests[f"r{self.count}"]
        for grown_count in range(3):  # Its own prefix grows while it waits.
            if request.phase == "waiting":
                self.rig.control.step()
                self.try_to_start(request, local_count + grown_count, 0)
                self.rig.control.begin_waits()
                self.rig.control.end_waits()
        if request.phase == "running":
            self.grow(request, len(request.chain))
        for _ in range(step_count):
            self.apply(self.rig.step())

    @precondition(lambda self: len(self.requests) < REQUEST_COUNT_MAX)
    @rule(path=PATHS, what=st.sampled_from(["preempt", "finish", "reset", "reconnect"]))
    def cut_short(self, path: list[str], what: str) -> None:
        """Something happens while the workers know of copies that they have not made yet."""
        self.arrive(path)
        request = self.requests[f"r{self.count}"]
        for _ in range(2):
            self.apply(self.rig.step())
        for _ in range(3):
            if request.phase == "waiting":
                self.rig.control.step()
                self.try_to_start(request, 0, 0)
        if request.phase != "running":
            return
        self.grow(request, len(path) // 2)
        self.plan()
        if what == "preempt":
            self.preempt_one(request)
        elif what == "finish":
            self.end(request)
        elif what == "reset":
            self.reset()
            self.grow(request, len(path))
        else:
            self.rig.client.reconnect()
        for _ in range(3):
            self.apply(self.rig.step())

    @precondition(lambda self: len(self.requests) < REQUEST_COUNT_MAX)
    @rule(
        path=PATHS,
        what=st.sampled_from(["steps", "late", "lost", "reset", "short", "break", "refused"]),
        answer_count=st.integers(0, 4),
    )
    def linger(self, path: list[str], what: str, answer_count: int) -> None:
        """A request is over before its match or its slots have arrived."""
        self.arrive(path)
        request = self.requests[f"r{self.count}"]
        self.rig.control.step(answer_count)
        self.try_to_start(request, 0, 0)
        if request.phase != "waiting":
            self.grow(request, len(path))
            self.end(request)
        self.plan()
        if what == "late":
            self.rig.clock.advance(0.6)
        elif what == "lost":
            self.rig.client.reconnect()
        elif what == "reset":
            self.reset()
        elif what == "short":
            self.rig.scheduler.on_device_blocks_short(answer_count)
        elif what == "break":
            self.rig.copiers[0].failures = 1
        elif what == "refused":
            self.rig.client.fail_next("match", Unavailable("lost"))
        self.rig.control.step(answer_count)
        self.plan()
        self.apply(self.rig.results())

    def reset(self) -> None:
        self.weights = f"w{len(self.rig.client.namespaces)}"
        self.rig.spec = spec_of(self.weights, 2)
        self.rig.scheduler.reset(self.rig.spec)

    def try_to_start(self, request: ModelRequest, local_count: int, less: int) -> None:
        local_count = min(local_count, len(request.chain))
        count = self.rig.scheduler.get_onboard_count(request.request_id, local_count)
        if count is None or local_count + count > len(self.free):
            return
        assert local_count + count <= len(request.chain)
        if count > 1:
            count -= less
        request.device_blocks = self.take(local_count + count)
        request.computed_count = local_count
        self.write(request, 0, local_count)
        if count:
            request.phase, request.load_count = "loading", count
            fresh = request.device_blocks[local_count:]
            self.rig.scheduler.on_allocated(request.request_id, fresh, count)
        else:
            request.phase = "running"

    @rule(data=st.data(), count=st.integers(1, 6))
    def compute(self, data: st.DataObject, count: int) -> None:
        request = self.pick(data, "running")
        if request is not None:
            self.grow(request, count)

    def grow(self, request: ModelRequest, count: int) -> None:
        first = request.computed_count
        last = min(first + count, len(request.chain))
        missing = last - len(request.device_blocks)
        if missing > len(self.free):
            return
        request.device_blocks += self.take(max(0, missing))
        self.write(request, first, last)
        request.computed_count = last
        self.rig.scheduler.on_blocks_full(
            request.request_id, request.chain[:last], request.device_blocks[:last]
        )

    @rule(data=st.data(), phase=st.sampled_from(["waiting", "loading", "running"]))
    def finish(self, data: st.DataObject, phase: str) -> None:
        request = self.pick(data, phase)
        if request is not None:
            self.end(request)

    def end(self, request: ModelRequest) -> None:
        del self.requests[request.request_id]
        keep = self.rig.scheduler.request_finished(request.request_id)
        self.let_go(request, keep=keep)

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request = self.pick(data, "running")
        if request is not None:
            self.preempt_one(request)

    def preempt_one(self, request: ModelRequest) -> None:
        keep = self.rig.scheduler.on_preempted(request.request_id)
        self.let_go(request, keep=keep)
        request.phase = "waiting"

    # ------------------------------------------------------------------------------- the rest

    @rule()
    def plan(self) -> None:
        self.rig.plan()

    @rule(shard=st.integers(0, 1), count=st.integers(1, 6))
    def copy(self, shard: int, count: int) -> None:
        self.rig.lanes[shard].step(count)

    @rule()
    def results(self) -> None:
        self.apply(self.rig.results())

    @rule()
    def step(self) -> None:
        self.apply(self.rig.step())

    @rule(count=st.integers(1, 6))
    def answer(self, count: int) -> None:
        self.rig.control.step(count)

    @rule(begun_count=st.integers(0, 2), ended_count=st.integers(0, 2))
    def wait(self, begun_count: int, ended_count: int) -> None:
        """Answers of waits take their time, and come long after their requests have gone."""
        self.rig.control.end_waits(ended_count)
        self.rig.control.begin_waits(begun_count)

    @rule(
        path=PATHS, limit=st.integers(0, 2), what=st.sampled_from(["late", "lost", "end", "reset"])
    )
    def give_up_waiting(self, path: list[str], limit: int, what: str) -> None:
        """Something happens to a request while the daemon promotes for it."""
        namespace, client = self.rig.namespace, self.rig.client
        if len(self.requests) == REQUEST_COUNT_MAX or not namespace.has(chain_of(path[0])[0]):
            return
        client.demote(namespace, chain_of(path[0])[0])
        self.arrive(path)
        request = self.requests[f"r{self.count}"]
        self.rig.control.step()
        self.try_to_start(request, 0, 0)
        client.promote_limits.append(limit)
        self.rig.control.begin_waits()
        if what == "late":
            self.rig.clock.advance(1.6)
            self.try_to_start(request, 0, 0)
        elif what == "lost":
            client.reconnect()
        elif what == "end":
            self.end(request)
        else:
            self.reset()

    @rule(seconds=st.sampled_from([0.01, 0.06, 1.0, 29.5, 31.0]))
    def advance(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)
        self.rig.client.expire()

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        namespace = self.rig.namespace
        if resident := [*namespace.resident, *namespace.nvme]:
            self.rig.client.evict(namespace, data.draw(st.sampled_from(resident)))

    @rule(data=st.data())
    def demote(self, data: st.DataObject) -> None:
        if resident := list(self.rig.namespace.resident):
            self.rig.client.demote(self.rig.namespace, data.draw(st.sampled_from(resident)))

    @rule(shard=st.integers(0, 1))
    def break_copier(self, shard: int) -> None:
        self.rig.copiers[shard].failures = 1

    @rule(what=st.sampled_from(TROUBLES), luck=st.integers(0, 2))
    def trouble(self, what: str, luck: int) -> None:
        """One rule for all that sets everything back, or nothing would ever come to its end."""
        client = self.rig.client
        if luck:
            return
        if what == "reset":
            self.reset()
        elif what == "clear":
            client.void(self.rig.namespace)
        elif what == "recall":
            client.recall(self.rig.namespace, 3)
        elif what == "disconnect":
            client.disconnect()
        elif what in ("reconnect", "restart"):
            client.reconnect(restarted=what == "restart")
        else:
            client.fail_next(what, Unavailable("lost"))
            self.is_dirty = True

    @rule()
    def quiet(self) -> None:
        """The handlers wait for copies under way, so those come to their end first."""
        self.rig.copy()
        self.rig.client.quiet()

    # ------------------------------------------------------------------------------- what holds

    @invariant()
    def books_are_right(self) -> None:
        self.rig.check()

    @invariant()
    def waits_are_few(self) -> None:
        assert self.rig.control.waiting_count <= WAITING_ACQUIRES_MAX

    @invariant()
    def an_engine_with_kept_blocks_goes_on_stepping(self) -> None:
        assert self.rig.scheduler.has_work or not self.kept

    @invariant()
    def resident_bytes_are_those_computed(self) -> None:
        client = self.rig.client
        for namespace in client.namespaces.values():
            for block_hash, slot in namespace.resident.items():
                for shard in range(2):
                    right = content_of(block_hash, shard, namespace.spec.weights)
                    assert np.array_equal(client.memory[shard][slot], right)
            for block_hash, found in namespace.nvme.items():
                for shard in range(2):
                    right = content_of(block_hash, shard, namespace.spec.weights)
                    assert np.array_equal(found[shard], right)

    def teardown(self) -> None:
        for request in list(self.requests.values()):
            self.end(request)
        for _ in range(12):
            self.rig.clock.advance(0.1)
            self.rig.control.begin_waits()
            self.rig.control.end_waits()
            self.apply(self.rig.step())
        self.apply(self.rig.scheduler.on_results([]))
        stats = self.rig.scheduler.stats()
        assert sum(stats.onboarded_tier_blocks.values()) == stats.onboarded_blocks
        assert self.kept == {}
        assert len(self.free) == DEVICE_BLOCK_COUNT
        scheduler, client = self.rig.scheduler, self.rig.client
        assert scheduler.request_count == 0
        assert not scheduler.has_work
        assert scheduler.lease_count == scheduler.lingering_count == 0
        for lease_id, session in client.lease_sessions.items():
            assert lease_id in client.released or session != client.session
        if client.session is not None and not self.is_dirty:
            ours = [s for s in client.reserved.values() if s == client.session]
            assert len(ours) == scheduler.stock_count


class UnheldConnectorMachine(ConnectorMachine):
    """An engine that reuses a preempted request's device blocks at once."""

    holds_preempted_blocks = False


PROFILE = settings(
    max_examples=80,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestConnector = ConnectorMachine.TestCase
TestConnector.settings = PROFILE
TestUnheldConnector = UnheldConnectorMachine.TestCase
TestUnheldConnector.settings = PROFILE
