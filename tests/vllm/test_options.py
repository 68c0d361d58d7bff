"""What a user sets, and what is refused at the start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from kvtier.connector.vllm.options import parse_options
from kvtier.connector.vllm.refusals import check_supported, warn_of_failing_loads
from kvtier.connector.vllm.unsupported import Unsupported
from kvtier.errors import ConfigError
from kvtier.policy.load_or_recompute import OnboardWish
from tests.vllm.engines import transfer_config, vllm_engine
from tests.vllm.versions import needs_engine

pytestmark = pytest.mark.vllm


def test_nothing_needs_to_be_set() -> None:
    options = parse_options({})
    assert options.socket is None
    assert options.weights == ""


def test_keys_of_others_are_left_alone() -> None:
    options = parse_options({"other.key": 1, "kvtier.socket": "/run/k.sock", "spec_name": "x"})
    assert options.socket == Path("/run/k.sock")


def test_limits_can_be_set() -> None:
    extra = {"kvtier.onboard_wait_seconds": 1, "kvtier.onboard": "always"}
    settings = parse_options(extra).settings
    assert settings.onboard_wait_seconds == 1.0
    assert settings.onboard is OnboardWish.ALWAYS


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"kvtier.sockett": "x"}, "is kvtier.socket meant"),
        ({"kvtier.worker_count": 2}, "no key kvtier.worker_count"),
        ({"kvtier.socket": 1}, "kvtier.socket is 1: it must be a text"),
        ({"kvtier.socket": "tcp://host:1"}, "Unix socket"),
        ({"kvtier.stock_blocks": 0.5}, "must be of type int"),
        ({"kvtier.stock_blocks": True}, "must be of type int"),
        ({"kvtier.stock_blocks": 0}, "must be at least 1"),
        ({"kvtier.onboard_wait_seconds": float("nan")}, "must be a finite number"),
        ({"kvtier.turn_wait_seconds": float("inf")}, "must be a finite number"),
        ({"kvtier.onboard": "often"}, "must be one of auto, always, never"),
        ({"kvtier.onboard": True}, "must be one of auto, always, never"),
    ],
)
def test_mistakes_are_named(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        parse_options(extra)
    assert "\n" not in str(error.value)


class FullAttentionSpec:
    block_size = 32


class SlidingWindowSpec(FullAttentionSpec):
    pass


class RSWASpec(FullAttentionSpec):
    pass


class MambaSpec(FullAttentionSpec):
    pass


def config(**changes: Any) -> SimpleNamespace:
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1} | {
        name: value for name, value in changes.items() if name.endswith("_size")
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(enable_sleep_mode=changes.get("sleep", False)),
        cache_config=SimpleNamespace(
            calculate_kv_scales=changes.get("scales", False),
            enable_prefix_caching=changes.get("caching", True),
        ),
    )


def caches(*specs: Any) -> SimpleNamespace:
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["a"]) for spec in specs]
    )


HYBRID = caches(FullAttentionSpec(), SlidingWindowSpec())


@pytest.mark.parametrize(
    ("vllm_config", "kv_cache_config", "words"),
    [
        (config(prefill_context_parallel_size=2), caches(FullAttentionSpec()), "context"),
        (config(decode_context_parallel_size=2), caches(FullAttentionSpec()), "context"),
        (config(sleep=True), caches(FullAttentionSpec()), "--enable-sleep-mode"),
        (config(scales=True), caches(FullAttentionSpec()), "--calculate-kv-scales"),
        (config(tensor_parallel_size=2), HYBRID, "several ranks"),
        (config(pipeline_parallel_size=2), HYBRID, "several ranks"),
        (config(caching=False), HYBRID, "prefix caching"),
        (config(), caches(FullAttentionSpec(), MambaSpec()), "MambaSpec"),
        (config(), caches(RSWASpec()), "RSWASpec"),
        (config(), caches(), "without KV cache groups"),
        (config(), None, "0.28 or newer"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(
    vllm_config: Any, kv_cache_config: Any, words: str
) -> None:
    with pytest.raises(Unsupported, match=words) as refused:
        check_supported(vllm_config, kv_cache_config)
    assert "\n" not in str(refused.value)
    assert "kvtier" in str(refused.value)


@pytest.mark.parametrize("ranks", [{}, {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}])
def test_one_group_of_full_attention_is_supported_on_any_ranks(ranks: dict[str, int]) -> None:
    check_supported(config(**ranks), caches(FullAttentionSpec()))


def test_windows_beside_full_attention_are_supported_and_windows_alone() -> None:
    check_supported(config(), HYBRID)
    check_supported(config(), caches(SlidingWindowSpec()))


def test_mla_is_refused_where_the_engine_computes_prompts_without_what_is_before_them(
    tiny_deepseek: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a hit of 96 of 100 tokens, all bytes right, it said other tokens than without."""
    options = EngineArgs(model=str(tiny_deepseek), skip_tokenizer_init=True, max_model_len=512)
    real = options.create_engine_config()
    assert real.model_config.use_mla
    with pytest.raises(Unsupported, match="MLA prompts"):
        check_supported(real, caches(FullAttentionSpec()))
    monkeypatch.setattr(real.scheduler_config, "enable_chunked_prefill", True)
    check_supported(real, caches(FullAttentionSpec()))


def test_engine_on_several_nodes_is_refused() -> None:
    several = config(tensor_parallel_size=16)
    several.parallel_config.nnodes_within_dp = 2
    with pytest.raises(Unsupported, match="on 2 nodes"):
        check_supported(several, caches(FullAttentionSpec()))


@pytest.mark.parametrize(
    ("given", "is_warned"),
    [
        ({}, True),  # vLLM's default.
        ({"kv_load_failure_policy": "fail"}, True),
        ({"kv_load_failure_policy": "recompute"}, False),
        ({"kv_role": "kv_producer"}, False),  # Loads nothing.
    ],
)
def test_one_line_warns_when_a_failed_load_would_end_its_request(
    given: dict[str, str], is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = {"kv_connector": "KVTierConnector", "kv_role": "kv_both"} | given
    warn_of_failing_loads(KVTransferConfig(**wanted))
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == is_warned
    assert all('"kv_load_failure_policy": "recompute"' in text for text in texts)
    assert not any("\n" in text for text in texts)


@needs_engine
def test_an_engine_warns_once_when_it_starts(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transfer = transfer_config(tmp_path / "nobody.sock")
    transfer.kv_load_failure_policy = "fail"
    with vllm_engine(tiny_llama, transfer):
        pass
    told = [one for one in caplog.records if "kv_load_failure_policy" in one.getMessage()]
    assert len(told) == 1


def test_plugin_registers_the_connector_by_its_class_name_as_often_as_asked() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvtier.connector.vllm import KVTierConnector
    from kvtier.connector.vllm.plugin import register

    register()
    register()
    name = KVTierConnector.__name__
    assert KVConnectorFactory.get_connector_class_by_name(name) is KVTierConnector


def test_plugin_is_declared_for_vllm() -> None:
    from importlib.metadata import entry_points

    found = entry_points(group="vllm.general_plugins", name="kvtier")
    assert [point.load().__module__ for point in found] == ["kvtier.connector.vllm.plugin"]


def test_connector_answers_every_hook_of_vllms_interface() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from kvtier.connector.vllm import KVTierConnector

    assert not KVTierConnector.__abstractmethods__
    assert set(dir(KVConnectorBase_V1)) <= set(dir(KVTierConnector))
