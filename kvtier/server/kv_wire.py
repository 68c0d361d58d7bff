"""KV cache events as vLLM writes them: a batch is [time, [event, ...]], an event a map with `type`.

Pure but for the encoder, which msgspec brings. Facts: vLLM's `distributed/kv_events.py`, 0.25 to
0.33. The fields that vLLM leaves out when they have their default are left out here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.types import TierName

OWNER = "kvtier"
CPU, STORAGE = "CPU", "STORAGE"
LOCAL, REMOTE = "LOCAL", "REMOTE"


@dataclass(frozen=True, slots=True)
class WirePlace:
    """How a subscriber tells our tiers apart."""

    name: str
    locality: str


# Several tiers are one place: a block has left it when it is in none of them.
PLACE_OF = {
    TierName.DRAM: WirePlace(CPU, LOCAL),
    TierName.CXL: WirePlace(CPU, LOCAL),
    TierName.NVME: WirePlace(STORAGE, LOCAL),
    TierName.REMOTE: WirePlace(STORAGE, REMOTE),
}


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks of one chain, in its order. Without token ids it names hashes only."""

    hashes: Sequence[bytes]
    parent: bytes | None
    block_tokens: int
    place: WirePlace
    token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Removed:
    hashes: Sequence[bytes]
    place: WirePlace


@dataclass(frozen=True, slots=True)
class Cleared:
    """Everything of the topic."""


Event = Stored | Removed | Cleared
EVENT_BYTES, HASH_BYTES, TOKEN_BYTES = 160, 34, 5


def weight_of(event: Event) -> int:
    """What it counts for in a queue: its blocks, and at least one."""
    return 1 if isinstance(event, Cleared) else max(1, len(event.hashes))


def size_of(event: Event) -> int:
    """About how many bytes it takes in a batch; at least as many as any hash and token id need."""
    if isinstance(event, Cleared):
        return EVENT_BYTES
    tokens = len(event.token_ids) if isinstance(event, Stored) else 0
    return EVENT_BYTES + HASH_BYTES * len(event.hashes) + TOKEN_BYTES * tokens


class WireForm:
    """Turns events into a batch's bytes."""

    def __init__(self, hash_form: str, pack: Callable[[object], bytes]) -> None:
        self._is_int = hash_form == "int64"
        self._pack = pack

    def batch(self, wall_seconds: float, events: Sequence[Event]) -> bytes:
        return self._pack([wall_seconds, [self._map_of(event) for event in events]])

    def _map_of(self, event: Event) -> dict[str, object]:
        if isinstance(event, Cleared):
            return {"type": "AllBlocksCleared"}
        if isinstance(event, Removed):
            return {
                "type": "BlockRemoved",
                "block_hashes": self._hashes(event.hashes),
                "medium": event.place.name,
                "locality": event.place.locality,
                "ownership": OWNER,
            }
        parent = event.parent
        return {
            "type": "BlockStored",
            "block_hashes": self._hashes(event.hashes),
            "parent_block_hash": None if parent is None else self._hashes([parent])[0],
            "token_ids": list(event.token_ids),
            "block_size": event.block_tokens,
            "lora_id": None,
            "medium": event.place.name,
            "lora_name": None,
            "locality": event.place.locality,
            "ownership": OWNER,
        }

    def _hashes(self, hashes: Sequence[bytes]) -> list[object]:
        if not self._is_int:
            return list(hashes)
        return [int.from_bytes(one[-8:], "big") for one in hashes]
