"""kvtier beside another connector, in vLLM's MultiConnector."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvtier.connector.vllm import KVTierConnector
from kvtier.connector.vllm.plugin import register
from tests.support.daemon import RunningDaemon
from tests.vllm.engines import VllmEngine, prompt_of, vllm_engine
from tests.vllm.identity import differing
from tests.vllm.scheduler_rig import SchedulerRig
from tests.vllm.versions import needs_engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def multi_config(socket: Path, folder: Path, *, is_first: bool) -> KVTransferConfig:
    """By names alone: the plugin makes ours known."""
    ours = {
        "kv_connector": "KVTierConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "kvtier.socket": str(socket),
            "kvtier.onboard": "always",
            "kvtier.onboard_wait_seconds": 2.0,
        },
    }
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": [ours, other] if is_first else [other, ours]},
    )


class MultiEngine(VllmEngine):
    """An engine whose connector holds ours and another."""

    def __init__(self, engine: VllmEngine) -> None:
        super().__init__(engine.llm)
        self.connector = ours_of(self.scheduler.connector)

    def connector_of_worker(self) -> KVTierConnector:
        return ours_of(get_kv_transfer_group())


def ours_of(multi: Any) -> KVTierConnector:
    connectors = getattr(multi, "sub_connectors", None) or multi._connectors  # As before 0.32.
    (found,) = (c for c in connectors if isinstance(c, KVTierConnector))
    return found


def test_plugin_is_found_and_may_be_called_again() -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="kvtier")
    found.load()()
    register()
    named = KVConnectorFactory.get_connector_class_by_name(KVTierConnector.__name__)
    assert named is KVTierConnector


@needs_engine
@pytest.mark.parametrize("is_first", [True, False])
def test_engine_with_two_connectors_says_the_same_and_hits(
    tiny_llama: Path, daemon: RunningDaemon, tmp_path: Path, is_first: bool
) -> None:
    """The other one, when it comes first, is asked first: it has what was stored as well."""
    prompts = [prompt_of(100), prompt_of(170, seed=2)]
    with vllm_engine(tiny_llama) as engine:
        alone = engine.generate(prompts)
    said, onboarded = [], []
    for folder in (tmp_path / "one", tmp_path / "one" if not is_first else tmp_path / "other"):
        transfer = multi_config(daemon.socket, folder, is_first=is_first)
        with vllm_engine(tiny_llama, transfer) as started:
            engine = MultiEngine(started)
            engine.wait_ready()
            said.append(engine.generate(prompts))
            engine.settle()
            assert engine.left_behind() == []
            onboarded.append(engine.stats.onboarded_blocks)
            names = {metric.name for metric in engine.llm.get_metrics()}
            assert any("kvtier" in name for name in names), "its metrics are told through vLLM"
    assert differing(alone, said[0]) == differing(alone, said[1]) == []
    assert onboarded == [0, 3 + 5 if is_first else 0]
    assert [g.cached_count for g in said[1]] == [96, 160]


def test_scheduler_side_meets_its_worker_by_the_first_report_when_not_before(
    tiny_llama: Path,
) -> None:
    """MultiConnector passes on the handshake of its first connector that has one."""
    rig = SchedulerRig(tiny_llama)
    core, rig.side._core = rig.core, None
    met: list[Any] = []
    rig.side.meet = lambda handshakes: (  # type: ignore[method-assign]
        met.extend(handshakes.values()),
        rig.side.begin(core, rig.client, rig.spec),
    )
    rig.add("before", prompt_of(40), tokens=1)
    rig.step()
    assert met == [rig.worker.handshake()]
    rig.run()
    rig.add("after", prompt_of(100), tokens=1)
    rig.run()
    assert core.stats().committed_blocks == 6
    rig.check_nothing_left()


def test_blocks_that_another_connector_was_loading_are_not_offloaded(tiny_llama: Path) -> None:
    """vLLM counts what is being loaded as computed; then the request is aborted."""
    rig = SchedulerRig(tiny_llama)
    rig.add("warm", prompt_of(40, seed=9))
    rig.run()
    request = rig.add("loading", prompt_of(100))
    rig._answer()
    assert rig.side.get_matched_tokens(request, 0) == (0, False)
    new_blocks = [SimpleNamespace(block_id=index) for index in range(10, 16)]
    rig.side.on_allocated(request, SimpleNamespace(blocks=[new_blocks]), 0)
    request.num_computed_tokens = 96
    before = len(rig.client.commits)
    rig.side.on_finished(request, list(range(10, 16)))
    for _ in range(5):
        rig.core.on_results(())
        rig.worker.start(rig.side.build_order(nothing_scheduled()))
        rig.lane.step()
        rig.core.on_results(rig.worker._worker.poll() if rig.worker._worker else ())
        rig.control.step()
    assert len(rig.client.commits) == before


def nothing_scheduled() -> Any:
    return SimpleNamespace(
        preempted_req_ids=(),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
        ),
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
    )
