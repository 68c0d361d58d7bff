"""vLLM's KV cache groups as kvtier has them: which are supported, and what a prefix needs of each.

How long a hit is, which blocks of a window it needs and which block an EAGLE drafter wants computed
again is vLLM's own to say: its coordinator is asked, with the daemon's answers in the place of its
block pool.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from kvtier.connector.grouped_call import Hit
from kvtier.connector.vllm.unsupported import layer_specs, refuse

# By the name of the class: subclasses are not taken on trust, as some free or move blocks while a
# request runs. A chain's blocks stay until their request ends; of
# the others vLLM gives up what lies before the window while the request goes on.
_CHAINED = ("FullAttentionSpec", "MLAAttentionSpec")
_UNCHAINED = ("SlidingWindowSpec", "ChunkedLocalAttentionSpec")


@dataclass(frozen=True, slots=True)
class GroupForm:
    """One KV cache group."""

    number: int
    name: str  # Part of its namespace.
    layer_names: tuple[str, ...]
    block_tokens: int
    chained: bool


def group_forms(kv_cache_config: Any) -> tuple[GroupForm, ...]:
    """Raises Unsupported for kinds of layers that are not known."""
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        refuse("a model without KV cache groups has nothing to keep", "run it alone")
    return tuple(_form_of(number, len(groups), group) for number, group in enumerate(groups))


def is_grouped(kv_cache_config: Any) -> bool:
    """Whether it takes more than one chain. Raises Unsupported as `group_forms`."""
    forms = group_forms(kv_cache_config)
    return len(forms) > 1 or not all(form.chained for form in forms)


def hash_tokens_of(kv_cache_config: Any) -> int:
    """Tokens that each of vLLM's block hashes stands for."""
    told = getattr(kv_cache_config, "hash_block_size", None)
    return int(told or gcd(*(form.block_tokens for form in group_forms(kv_cache_config))))


def check_grouped(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises Unsupported."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    parallel = vllm_config.parallel_config
    if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
        refuse("several ranks are not supported for hybrid models yet", "use one GPU an engine")
    if not hasattr(KVConnectorBase_V1, "get_transfer_results"):  # By which failed loads are told.
        refuse("hybrid models need a newer vLLM", "use vLLM 0.30 or newer")
    if not vllm_config.cache_config.enable_prefix_caching:
        refuse("hybrid models need vLLM's prefix caching", "switch it on")
    unit = hash_tokens_of(kv_cache_config)
    for form, group in zip(
        group_forms(kv_cache_config), kv_cache_config.kv_cache_groups, strict=True
    ):
        is_plain = getattr(group.kv_cache_spec, "prefix_cacheable", True) and not getattr(
            group, "host_resident", False
        )
        if not is_plain or form.block_tokens % unit:
            refuse(f"KV cache group {form.name} is not supported", "use another model")


class OwnHits:
    """`HitFinder` by vLLM's coordinator."""

    def __init__(self, coordinator: Any, hash_tokens: int) -> None:
        self._coordinator = coordinator
        self._hash_tokens = hash_tokens

    def find(
        self, hashes: Sequence[bytes], present: Sequence[Collection[bytes]], token_limit: int
    ) -> Hit:
        """Of copies, so that it may be asked in any thread: nothing of vLLM's own is changed."""
        answers = _Answers(present, self._hash_tokens)
        asked = copy.copy(self._coordinator)
        asked.block_pool = answers
        managers = [copy.copy(manager) for manager in asked.single_type_managers]
        for manager in managers:
            manager.block_pool = answers
        asked.single_type_managers = tuple(managers)
        blocks, tokens, *_ = asked.find_longest_cache_hit(hashes, token_limit)
        wanted = tuple(
            tuple(index for index, block in enumerate(group) if block is not answers.null_block)
            for group in blocks
        )
        return Hit(int(tokens), wanted)


class _Answers:
    """What of vLLM's BlockPool its search for a hit uses."""

    def __init__(self, present: Sequence[Collection[bytes]], hash_tokens: int) -> None:
        from vllm.v1.core.kv_cache_utils import KVCacheBlock

        self.hash_block_size = hash_tokens
        self.null_block = KVCacheBlock(block_id=0)
        self._there = KVCacheBlock(block_id=1)
        self._present = present

    def get_cached_block(self, block_hash: Any, group_ids: Sequence[int]) -> list[Any] | None:
        """Of groups that are asked together all must have it."""
        name = bytes(block_hash)
        if all(name in self._present[number] for number in group_ids):
            return [self._there] * len(group_ids)
        return None


def _form_of(number: int, count: int, group: Any) -> GroupForm:
    specs = layer_specs(group.kv_cache_spec)
    kinds = sorted({type(spec).__name__ for spec in specs})
    for kind in kinds:
        if kind not in _CHAINED + _UNCHAINED:
            refuse(
                f"layers of kind {kind} are not supported yet",
                "try --disable-hybrid-kv-cache-manager",
            )
    chained = set(kinds) <= set(_CHAINED)
    if not chained and len(kinds) > 1:
        refuse(f"a KV cache group of {' and '.join(kinds)} is not supported", "use another model")
    windows = {
        getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
        for spec in specs
    }
    reach = "" if chained else f" {'/'.join(sorted(map(str, windows)))}"
    return GroupForm(
        number,
        f"{number} of {count}: {'+'.join(kinds)}{reach}",
        tuple(group.layer_names),
        int(group.kv_cache_spec.block_size),
        chained,
    )
