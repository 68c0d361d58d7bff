"""The KV of a model: groups of layers that keep the same."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvtier.sizing.dtypes import KvDtype


class AttentionKind(Enum):
    """What a group's layers keep."""

    FULL = "full"  # Keys and values of every token.
    WINDOW = "window"  # The same, but only the last tokens are ever read again.
    LATENT = "latent"  # One vector for keys and values of all heads (MLA); never split by TP.
    INDEX = "index"  # Keys that choose which latents are read; never split by TP.

    @property
    def has_heads(self) -> bool:
        return self in (AttentionKind.FULL, AttentionKind.WINDOW)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroup:
    """Layers that keep the same; `head_bytes` is one head's part of one token in one layer."""

    kind: AttentionKind
    layer_count: int
    kv_head_count: int
    head_dim: int
    head_bytes: int
    window_tokens: int | None = None

    @property
    def token_bytes(self) -> int:
        return self.layer_count * self.kv_head_count * self.head_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKv:
    """What one copy of a model keeps of each token."""

    model_type: str
    dtype: KvDtype
    attention_head_count: int
    groups: tuple[KvGroup, ...]
    positions_max: int | None
    notes: tuple[str, ...]

    @property
    def token_bytes(self) -> int:
        return sum(group.token_bytes for group in self.groups)
