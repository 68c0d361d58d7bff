"""The namespace of a vLLM engine: everything that must agree before another one may use its KV.

Computed in the worker, which alone knows its tensors, their packing and the form of every layer;
the scheduler side gets it by handshake. vLLM's block hashes do not tell weights, dtype or layout.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvtier.connector.vllm.geometry import BlockGeometry
from kvtier.connector.vllm.groups import GroupForm
from kvtier.connector.vllm.options import PREFIX, Options
from kvtier.connector.vllm.unsupported import layer_specs
from kvtier.connector.vllm.weights import files_digest, weight_files
from kvtier.namespace import FACT_CHARS_MAX, NamespaceSpec

log = logging.getLogger(__name__)

# Position encodings that do not depend on how long a context the engine allows.
_STEADY_ROPES = ("default", "linear", "llama3", "yarn", "mrope")
# Facts of a model's configuration that change nothing about its KV.
_NOT_FACTS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


def namespace_of_engine(
    vllm_config: Any, kv_cache_config: Any, geometry: BlockGeometry, options: Options
) -> NamespaceSpec:
    """Of an engine of one group. Raises BadRequest when a fact is out of bounds."""
    spec = _spec_of(vllm_config, kv_cache_config.kv_cache_groups[0], geometry, options)
    spec.validate()
    return spec


def namespace_of_group(
    vllm_config: Any,
    kv_cache_config: Any,
    geometry: BlockGeometry,
    options: Options,
    form: GroupForm,
) -> NamespaceSpec:
    """Of one group of a hybrid model. Raises BadRequest when a fact is out of bounds."""
    groups = kv_cache_config.kv_cache_groups
    spec = _spec_of(vllm_config, groups[form.number], geometry, options)
    others = " ".join(_layers_digest(group)[:8] for group in groups)
    spec = replace(
        spec,
        kv_group=_clip(form.name),
        chained=form.chained,
        extra=spec.extra | {"groups": _clip(others)},
    )
    spec.validate()
    return spec


def _spec_of(
    vllm_config: Any, group: Any, geometry: BlockGeometry, options: Options
) -> NamespaceSpec:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return NamespaceSpec(
        model=_model_name(model),
        weights=options.weights or _weights_of(vllm_config),
        kv_dtype=f"{geometry.dtype} {cache.cache_dtype}",
        layout=geometry.layout,
        block_tokens=group.kv_cache_spec.block_size,
        shard_bytes=geometry.shard_bytes,
        hash_bytes=_hash_bytes(cache.prefix_caching_hash_algo),
        attention=_clip(_attention_of(vllm_config)),
        hash_algorithm=cache.prefix_caching_hash_algo,
        hash_seed=none_hash(cache.prefix_caching_hash_algo).hex(),
        tenant=options.tenant,
        salt=options.salt,
        extra={
            "engine": f"vllm {_vllm_minor()}",
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantization": str(model.quantization or ""),
            "config": _config_digest(vllm_config),
            "layers": _layers_digest(group),
            "speculative": _clip(_speculative_of(vllm_config)),
        },
    )


def none_hash(algorithm: str) -> bytes:
    """The parent of every first block in this process: equal in two engines that share a seed."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    if not hasattr(kv_cache_utils, "NONE_HASH"):
        kv_cache_utils.init_none_hash(get_hash_fn_by_name(algorithm))
    return bytes(kv_cache_utils.NONE_HASH)


def _hash_bytes(algorithm: str) -> int:
    return 16 if "xxhash" in algorithm else 32


def _vllm_minor() -> str:
    """Layouts and packings belong to one minor version; nobody promises more."""
    import vllm

    return ".".join(str(vllm.__version__).split(".")[:2])


def _model_name(model: Any) -> str:
    path = Path(model.model)
    return _clip(path.name if path.exists() else model.model)


def _weights_of(vllm_config: Any) -> str:
    if str(vllm_config.load_config.load_format) == "dummy":
        return f"dummy seed {vllm_config.model_config.seed}"
    files = weight_files(_weights_path(vllm_config))
    if files:
        return files_digest(files)
    log.warning(
        "kvtier: the weights' files were not found, so nothing is shared with other engines or"
        " kept for the next start; set %sweights to a text that changes whenever they do",
        PREFIX,
    )
    return f"unknown {secrets.token_hex(16)}"


def _weights_path(vllm_config: Any) -> Path:
    """Where the loader found them: a local path, or the hub's cache."""
    model, load = vllm_config.model_config, vllm_config.load_config
    path = Path(model.model)
    if path.exists():
        return path
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(
        model.model, "config.json", cache_dir=load.download_dir, revision=model.revision
    )
    return Path(config).parent if isinstance(config, str) else path


def _config_digest(vllm_config: Any) -> str:
    """Of the model's configuration as it is in force, overrides included."""
    model = vllm_config.model_config
    facts = {k: v for k, v in model.hf_config.to_dict().items() if k not in _NOT_FACTS}
    text_config = getattr(model, "hf_text_config", model.hf_config)
    ropes = getattr(text_config, "rope_parameters", None) or getattr(
        text_config, "rope_scaling", None
    )
    if not _is_steady(ropes):
        facts["kvtier: longest context"] = model.max_model_len
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _is_steady(ropes: Any) -> bool:
    """Whether keys are the same whatever `max_model_len` is; some scalings look at it."""
    if not isinstance(ropes, Mapping):
        return ropes is None
    kind = ropes.get("rope_type", ropes.get("type"))
    if kind is None:  # One for each kind of layer, or none at all.
        return all(_is_steady(part) for part in ropes.values() if isinstance(part, Mapping))
    return kind in _STEADY_ROPES


def _layers_digest(group: Any) -> str:
    lines = [*group.layer_names, *(str(spec) for spec in layer_specs(group.kv_cache_spec))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _attention_of(vllm_config: Any) -> str:
    """The kernels' names, as some pack a block in their own way; on CPUs by instruction set."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    names = set()
    for layer in layers:
        chosen = getattr(layer, "attn_backend", None)
        if chosen is not None:
            names.add(str(chosen.get_name()))
    if vllm_config.device_config.device_type == "cpu":
        amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
        names.add(f"{torch.backends.cpu.get_cpu_capability()} amx={amx}")
    return " ".join(sorted(names))


def _speculative_of(vllm_config: Any) -> str:
    """A draft model's layers are part of a block."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return ""
    model = getattr(speculative, "model", None)
    revision = getattr(speculative, "revision", None)
    return f"{speculative.method} {model} {revision}"


def _clip(text: str) -> str:
    """Facts are bounded; what is cut off stays in the digest."""
    if len(text) <= FACT_CHARS_MAX:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{text[: FACT_CHARS_MAX - 65]} {digest}"
