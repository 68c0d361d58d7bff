"""vLLM's own connector tests with our connector in them: a plugin, for scripts/vllm_upstream.py.

Their code is neither here nor changed. What their tests make connectors with (`unit/utils.py`)
is replaced, so that ours takes part in three ways:

- where a test takes the connector that its helper makes, that is ours, and the fake daemon holds
  the prompts that the test calls remote;
- where a test puts a mock into the scheduler, and says what it answers, ours stands behind the
  mock: it hears every call, and makes the loads that the mock promises between steps. What the mock
  promises within a step ours never does; there it is in the place of the second connector of a
  MultiConnector;
- where vLLM asks a class what it can do, the name in its registry leads to ours.

Loads of ours are made and reported by our worker side in the step in which the test says that they
were received. After each test nothing may be left on our side of requests that vLLM has forgotten.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.core.sched.output import SchedulerOutput

import tests
from kvtier.connector.jobs import OnboardJob
from kvtier.connector.vllm import KVTierConnector
from tests.support.connector_rig import DeviceCopier, content_of
from tests.vllm.scheduler_rig import BLOCK_TOKENS, SETTINGS, SchedulerRig, kv_cache_config, told_by

SOURCE = Path(os.environ["KVTIER_UPSTREAM_SOURCE"])
UTILS = "tests.v1.kv_connector.unit.utils"
HOOKS = ("on_new_request", "build_connector_meta", "update_connector_output", "take_events")
ENDINGS = ("request_finished", "request_finished_all_groups")

# Both are packages of the same name: what is not ours is found in theirs.
tests.__path__.append(str(SOURCE / "tests"))


class PointedRig(SchedulerRig):
    """Our two sides around a scheduler that a test has made and steps itself."""

    __repr__ = object.__repr__
    slot_count = 4096
    settings = SETTINGS

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.config = scheduler, scheduler.vllm_config
        self.device_block_count = scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        self.copier = DeviceCopier(self.device_block_count)
        self.load_count = 0
        self._bad: set[int] = set()  # Device blocks that the test calls wrong.
        self.connect()
        self.attach(scheduler.kv_cache_config)
        ours = self.connector
        self._ours = {name: getattr(ours, name) for name in (*HOOKS, "get_num_new_matched_tokens")}
        for name in ("on_new_request", "build_connector_meta", "update_connector_output"):
            setattr(ours, name, getattr(self, name))
        ours.get_num_new_matched_tokens = self.matched

    def hold(self, request: Any, block_count: int) -> None:
        """Have the first blocks of the request's prompt in the daemon.

        Whatever it has said of them before is too old by now to be believed.
        """
        self.clock.advance(2 * self.settings.match_fresh_seconds)
        namespace = self.client.open_namespace(self.spec)
        parent = None
        for block_hash in map(bytes, request.block_hashes[:block_count]):
            if not namespace.has(block_hash):
                slot = self.client.free.pop(0)
                self.client.memory[:, slot] = content_of(block_hash)
                namespace.resident[block_hash] = slot
                namespace.parents[block_hash] = parent
            parent = block_hash

    # ------------------------------------------------------------------------------- hooks

    def on_new_request(self, request: Any) -> None:
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            self.hold(request, len(request.block_hashes))
        self._ours["on_new_request"](request)

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """A daemon that answers before the scheduler has asked twice: the tests know no waiting."""
        for _ in range(6):
            self._answer()
            found, is_async = self._ours["get_num_new_matched_tokens"](request, local_tokens)
            if found is not None:
                break
        self.load_count += bool(found)
        return found, is_async

    def build_connector_meta(self, output: Any) -> Any:
        order = self._ours["build_connector_meta"](output)
        self._start(order)
        return order

    def update_connector_output(self, told: Any) -> None:
        self._bad |= set(told.invalid_block_ids or ())
        self._load(set(told.finished_recving or ()))
        self.worker.take_received()
        self.worker.take_bad_blocks()
        report = self.worker.take_report()
        self._ours["update_connector_output"](replace(told, kv_connector_worker_meta=report))

    def _load(self, received: set[str]) -> None:
        """Make the loads of these requests; one of a block that the test calls wrong fails."""
        jobs = [(copy, copy.progress.job) for copy in self.lane.copies]
        due = [c for c, j in jobs if isinstance(j, OnboardJob) and j.request_id in received]
        rest = [copy for copy, _ in jobs if copy not in due]
        for copy in due:
            self.copier.failures = int(not self._bad.isdisjoint(copy.progress.job.device_blocks))
            self.lane.copies = deque([copy])
            self.lane.step()
        self.copier.failures = 0
        self.lane.copies = deque(rest)

    # ------------------------------------------------------------------------------- the end

    def close(self) -> None:
        for _ in range(9):  # As an idle engine goes on stepping while we have work.
            self.clock.advance(self.settings.finish_wait_seconds)
            self._start(self.side.build_order(SchedulerOutput.make_empty()))
            self.lane.step()
            self.side.on_output(told_by(self.worker))
            self._answer()
        assert self.client.violations == []
        assert self.core.check_invariants() == []
        assert set(self.side._requests) <= set(self.scheduler.requests)
        assert set(self.side._loading) <= set(self.scheduler.requests)
        if not self.scheduler.requests:
            assert self.core.request_count == 0
            assert self.core.lease_count == 0
            assert not self.client.leases


class Hook(Mock):
    """A test's mock of one hook, with ours behind it."""

    def __call__(self, *args: Any, **words: Any) -> Any:
        return self.ours(super().__call__(*args, **words), *args, **words)


def mock_before(rig: PointedRig) -> Mock:
    """What a test puts into the scheduler instead of a connector: it answers, and ours hears it."""
    connector, own_loads = rig.connector, set[str]()

    def matched(answer: Any, request: Any, local_tokens: int) -> Any:
        tokens, is_async = answer
        if tokens and is_async:
            rig.hold(request, (local_tokens + tokens) // BLOCK_TOKENS)
        found = connector.get_num_new_matched_tokens(request, local_tokens)
        if tokens and is_async:
            assert found == (tokens, True), "ours does not load what the daemon holds"
            own_loads.add(request.request_id)
        return answer

    def allocated(answer: Any, request: Any, blocks: Any, tokens: int) -> Any:
        is_own = request.request_id in own_loads
        connector.update_state_after_alloc(request, blocks, tokens if is_own else 0)
        own_loads.discard(request.request_id)
        return answer

    def finished(answer: Any, request: Any, block_ids: Any) -> Any:
        assert connector.request_finished(request, block_ids) == (False, None)
        return answer

    def heard(name: str) -> Any:
        return lambda answer, *args: getattr(connector, name)(*args)

    mock = Mock()
    mock.get_external_cache_hit_sources.side_effect = lambda request, tokens: {
        _any_source(): tokens
    }
    ways: dict[str, Any] = {name: heard(name) for name in HOOKS[:3]}
    ways |= {"get_num_new_matched_tokens": matched, "update_state_after_alloc": allocated}
    ways |= {"request_finished": finished}
    for name, ours in ways.items():
        hook = Hook()
        hook.ours = ours
        setattr(mock, name, hook)
    return mock


def _any_source() -> Any:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    return CacheHitSource.EXTERNAL_UNSPECIFIED


class Pointing:
    """The replaced helpers, and the rig of the test that runs."""

    def __init__(self) -> None:
        self.rig: PointedRig | None = None

    def install(self) -> None:
        import importlib

        utils = importlib.import_module(UTILS)
        self.make_config, self.make_scheduler = utils.create_vllm_config, utils.create_scheduler
        utils.create_vllm_config = self.create_vllm_config
        utils.create_scheduler = self.create_scheduler
        utils.create_mock_connector = self.create_mock_connector
        utils.ExampleConnector = self.example
        for name in ("SimpleCPUOffloadConnector", "OffloadingConnector"):
            KVConnectorFactory._registry[name] = lambda: KVTierConnector

    def create_vllm_config(self, *args: Any, **words: Any) -> Any:
        config = self.make_config(*args, **words)
        if "kv_connector" not in words:
            config.kv_transfer_config = KVTransferConfig(
                kv_connector="KVTierConnector",
                kv_connector_module_path="kvtier.connector.vllm",
                kv_role="kv_both",
                kv_load_failure_policy=config.kv_transfer_config.kv_load_failure_policy,
            )
        return config

    def create_scheduler(self, *args: Any, **words: Any) -> Any:
        scheduler = self.make_scheduler(*args, **words)
        if isinstance(scheduler.connector, KVTierConnector):
            self.rig = PointedRig(scheduler)
        return scheduler

    def create_mock_connector(self) -> Mock:
        assert self.rig is not None, "the test made no scheduler with our connector"
        return mock_before(self.rig)

    @staticmethod
    def example(config: Any, role: Any, kv_caches: Any) -> KVTierConnector:
        """Some tests have a cache of no layers at all."""
        transfer = config.kv_transfer_config
        own = replace(config, kv_transfer_config=replace(transfer, kv_connector_extra_config={}))
        return KVTierConnector(
            own, role, kv_caches if kv_caches.kv_cache_groups else kv_cache_config(8)
        )


POINTING = Pointing()


def pytest_configure(config: pytest.Config) -> None:
    POINTING.install()


@pytest.fixture(autouse=True)
def _nothing_of_ours_is_left(record_property: Any) -> Iterator[None]:
    POINTING.rig = None
    yield
    if POINTING.rig is not None:
        record_property("loads", POINTING.rig.load_count)
        POINTING.rig.close()
