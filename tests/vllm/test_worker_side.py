"""The worker side under vLLM's orders of calls, without a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvtier.connector.jobs import FailReason, OffloadJob, OnboardJob, StepPlan
from kvtier.connector.vllm import KVTierConnector
from kvtier.connector.vllm.exchange import StepOrder, UnstartedLoad, WorkerReport
from tests.support.fake_client import FakeSession
from tests.vllm.scheduler_rig import SchedulerRig, kv_cache_config
from tests.vllm.versions import needs_transfer_results

pytestmark = pytest.mark.vllm


class WorkerRig:
    """A connector in a worker's role, whose copies run when told."""

    def __init__(self, model: Path) -> None:
        rig = SchedulerRig(model)
        self.rig = rig
        self.connector = KVTierConnector(rig.config, KVConnectorRole.WORKER, kv_cache_config(64))
        self.connector._worker = rig.worker
        self.session = FakeSession(1, 1)
        rig.client.reserved = dict.fromkeys(range(8), self.session)

    def order(self, *jobs: Any, **more: Any) -> StepOrder:
        onboards = tuple(job for job in jobs if isinstance(job, OnboardJob))
        offloads = tuple(job for job in jobs if isinstance(job, OffloadJob))
        return StepOrder(StepPlan(self.rig.spec, onboards, offloads), **more)

    def onboard(self, job_id: int, *device_blocks: int) -> OnboardJob:
        slots = tuple(range(len(device_blocks)))
        return OnboardJob(job_id, f"r{job_id}", self.session, slots, device_blocks, 1 << 62)

    def offload(self, job_id: int, *device_blocks: int) -> OffloadJob:
        slots = tuple(range(len(device_blocks)))
        return OffloadJob(job_id, f"r{job_id}", self.session, slots, device_blocks)


def step_of_v1(rig: WorkerRig, order: StepOrder) -> tuple[Any, ...]:
    """Model Runner V1: loads are begun after the forward pass, without words."""
    connector = rig.connector
    connector.handle_preemptions(order)
    connector.bind_connector_metadata(order)
    connector.wait_for_layer_load("layer0")
    connector.save_kv_layer("layer0", None, None)
    connector.start_load_kv(None)
    connector.wait_for_save()
    return collected(rig)


def step_of_v2(rig: WorkerRig, order: StepOrder) -> tuple[Any, ...]:
    """Model Runner V2, as of 0.33: more words, more hooks, finishing put off past a drafter."""
    connector = rig.connector
    connector.reset_capture_state()
    connector.handle_preemptions(order)
    connector.bind_connector_metadata(order)
    connector.wait_for_layer_load("layer0")
    connector.save_kv_layer("layer0", None, None)
    connector.finish_forward()
    connector.start_load_kv(
        None,
        scheduler_output=SimpleNamespace(),
        request_state_indices=None,
        request_ids=[],
        num_tokens=0,
        attn_metadata=None,
    )
    found = collected(rig, is_put_off=True)
    connector.wait_for_save()
    connector.clear_connector_metadata()
    return found


def collected(rig: WorkerRig, *, is_put_off: bool = False) -> tuple[Any, ...]:
    connector = rig.connector
    rig.rig.lane.step()
    results = connector.get_transfer_results(set())
    bad_blocks = connector.get_block_ids_with_load_errors()
    connector.get_kv_connector_stats()
    connector.get_kv_connector_kv_cache_events()
    report = connector.build_connector_worker_meta()
    if not is_put_off:
        connector.clear_connector_metadata()
    return results, bad_blocks, report


@needs_transfer_results
@pytest.mark.parametrize("step", [step_of_v1, step_of_v2])
def test_loads_are_told_once_with_their_failures_in_both_orders_of_calls(
    tiny_llama: Path, step: Any
) -> None:
    rig = WorkerRig(tiny_llama)
    rig.rig.copier.failures = 1
    results, bad, report = step(rig, rig.order(rig.onboard(1, 3, 4), rig.onboard(2, 5)))
    assert results.finished_recving == {"r1", "r2"}
    assert results.finished_sending == set()
    assert bad == {3, 4}
    assert [(r.job_id, r.failed) for r in report.results] == [(1, FailReason.COPY), (2, None)]
    results, bad, report = step(rig, rig.order())
    assert results.finished_recving == set()
    assert (bad, report) == (set(), None)


@needs_transfer_results
@pytest.mark.parametrize("step", [step_of_v1, step_of_v2])
def test_load_that_no_worker_was_told_of_is_told_as_failed(tiny_llama: Path, step: Any) -> None:
    rig = WorkerRig(tiny_llama)
    results, bad, report = step(rig, rig.order(unstarted=(UnstartedLoad("r9", (7, 8)),)))
    assert results.finished_recving == {"r9"}
    assert bad == {7, 8}
    assert report == WorkerReport([], [rig.connector.get_handshake_metadata()])


@needs_transfer_results
@pytest.mark.parametrize("step", [step_of_v1, step_of_v2])
def test_fenced_offload_touches_no_device_block_any_more(tiny_llama: Path, step: Any) -> None:
    rig = WorkerRig(tiny_llama)
    rig.connector.handle_preemptions(rig.order())
    rig.connector.bind_connector_metadata(rig.order(rig.offload(1, 3)))
    rig.connector.clear_connector_metadata()
    _, _, report = step(rig, rig.order(fenced_jobs=(1, 77)))
    assert [(r.job_id, r.failed) for r in report.results] == [(1, FailReason.WITHDRAWN)]
    assert rig.rig.copier.copied_out == []


def test_reports_of_two_workers_become_one() -> None:
    assert WorkerReport([1]).aggregate(WorkerReport([2])).results == [1, 2]  # type: ignore[list-item]
