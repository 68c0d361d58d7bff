"""The defaults are those of the classes in transformers, which published files rely on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvtier.sizing.families import FAMILIES
from kvtier.sizing.model import model_kv

# Files of models that transformers knows under another name, or does not know.
NOT_TEXT_CLASSES = ("kimi_k2", "qwen2_vl", "qwen2_5_vl")
KINDS = {
    "full_attention": "full",
    "indexed_attention": "latent",
    "sliding_attention": "window",
    "chunked_attention": "window",
}


def known_types() -> list[str]:
    return [name for name in FAMILIES if name not in NOT_TEXT_CLASSES]


@pytest.fixture(scope="module")
def classes() -> Any:
    return pytest.importorskip("transformers").CONFIG_MAPPING


@pytest.mark.slow
@pytest.mark.parametrize("model_type", known_types())
def test_defaults_are_those_of_the_class(model_type: str, classes: Any) -> None:
    config = classes[model_type]()
    for name, value in FAMILIES[model_type].defaults.items():
        if name == "global_head_dim":  # The class puts it into its layers with full attention.
            full = config.layer_types.index("full_attention")
            assert config.per_layer_config[full].head_dim == value
        elif name == "head_dim" and not hasattr(type(config), name):
            assert config.hidden_size // config.num_attention_heads == value
        elif name == "sliding_window":  # The class drops it when it is switched off.
            assert type(config).sliding_window == value
        elif FAMILIES[model_type].has_global_heads and name in ("head_dim", "num_key_value_heads"):
            assert getattr(config.per_layer_config[0], name) == value
        else:
            assert getattr(config, name) == value, name


@pytest.mark.slow
@pytest.mark.parametrize("model_type", known_types())
def test_a_file_without_fields_is_read_as_its_class_reads_it(model_type: str, classes: Any) -> None:
    config = classes[model_type]()
    if model_type == "glm4_moe":
        pytest.skip("the class's own defaults do not fit together: 4,096 is no multiple of 96")
    groups = {group.kind.value: group for group in model_kv({"model_type": model_type}).groups}
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        kept = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
        expected = Counter(KINDS[name] for name in layer_types[:kept])
        assert {kind: g.layer_count for kind, g in groups.items() if kind != "index"} == expected
    if "latent" in groups or FAMILIES[model_type].has_global_heads:
        return
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if model_type == "falcon":
        kv_heads = 1
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    for group in groups.values():
        assert (group.kv_head_count, group.head_dim) == (kv_heads, head_dim)
