"""What must agree for KV to be reusable, and its fingerprint; pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field

from kvtier.errors import BadRequest

MODEL_CHARS_MAX = 256
# Facts end up in one canonical JSON text and in every client's memory: a bound keeps a client from
# filling the daemon with them.
EXTRA_COUNT_MAX = 32
FACT_CHARS_MAX = 256
SHARD_BYTES_MAX = 1 << 30
SHARD_COUNT_MAX = 128
BLOCK_TOKENS_MAX = 65_536
FINGERPRINT_BYTES = 16


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """The facts of the protocol's NamespaceSpec; field meanings and bounds stand there."""

    model: str
    weights: str
    kv_dtype: str
    layout: str
    block_tokens: int
    shard_bytes: int
    hash_bytes: int = 32
    shard_count: int = 1
    parallel: str = ""
    kv_group: str = ""
    attention: str = ""
    hash_algorithm: str = "sha256_cbor"
    hash_seed: str = ""
    tenant: str = ""
    salt: str = ""
    extra: dict[str, str] = field(default_factory=dict)
    chained: bool = True  # False: a map of existence; the protocol calls it `unchained`.

    def validate(self) -> None:
        """Raises BadRequest that names the fact and what it may be."""
        _check_range("block_tokens", self.block_tokens, 1, BLOCK_TOKENS_MAX)
        _check_range("hash_bytes", self.hash_bytes, 16, 32)
        _check_range("shard_bytes", self.shard_bytes, 1, SHARD_BYTES_MAX)
        _check_range("shard_count", self.shard_count, 1, SHARD_COUNT_MAX)
        for name in ("model", "weights", "kv_dtype", "layout", "hash_algorithm"):
            if not getattr(self, name):
                raise BadRequest(f"namespace fact {name!r} is empty: name it")
        if len(self.extra) > EXTRA_COUNT_MAX:
            raise BadRequest(f"{len(self.extra)} extra facts: give at most {EXTRA_COUNT_MAX}")
        for name, value in [*_text_facts(self), *self.extra.items()]:
            if len(name) > FACT_CHARS_MAX or len(value) > FACT_CHARS_MAX:
                raise BadRequest(
                    f"namespace fact {name[:32]!r} is too long: at most {FACT_CHARS_MAX} characters"
                )

    def canonical_json(self) -> str:
        """Every fact, keys sorted, no spaces, ASCII: equal text means reusable KV."""
        facts = asdict(self)
        if self.chained:
            del facts["chained"]  # As it was before there were others.
        return json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    def fingerprint(self) -> bytes:
        """128 bits over the canonical JSON; part of every key in every tier."""
        digest = hashlib.sha256(self.canonical_json().encode("ascii")).digest()
        return digest[:FINGERPRINT_BYTES]


def _text_facts(spec: NamespaceSpec) -> list[tuple[str, str]]:
    return [(name, value) for name, value in asdict(spec).items() if isinstance(value, str)]


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise BadRequest(f"namespace fact {name!r} is {value}: it may be {low} to {high}")
