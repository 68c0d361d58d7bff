"""From the KV of a token to blocks: what a tier holds of them, and how long one is under way.

Figures are of whole slots, as the pools cut them: each shard padded to what a disk reads. A block
has all layers in it, also where vLLM would keep several groups of blocks: that is how kvtier keeps
models with windows today. What windows could spare is told beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from kvtier.errors import BadRequest
from kvtier.layout import PAD_BYTES, SEGMENT_BYTES, SlotLayout
from kvtier.namespace import BLOCK_TOKENS_MAX, SHARD_BYTES_MAX, SHARD_COUNT_MAX
from kvtier.sizing.groups import KvGroup, ModelKv

PROMPT_TOKENS = (1 << 10, 8 << 10, 128 << 10)
# A slab or a segment holds whole slots: what is lost at its end is worth a word from here on.
_LOSS_TOLD = 0.02


@dataclass(frozen=True, slots=True)
class Link:
    """A way of bytes and its usual speed; `is_per_rank`: each rank has one of its own."""

    name: str
    bytes_per_second: float
    is_per_rank: bool


# What large transfers reach in practice, not the rates on the label.
LINKS = (
    Link("GPU, PCIe 5.0 x16", 50e9, is_per_rank=True),
    Link("GPU, PCIe 4.0 x16", 25e9, is_per_rank=True),
    Link("memory, one thread", 10e9, is_per_rank=False),
    Link("NVMe, PCIe 5.0", 13e9, is_per_rank=False),
    Link("NVMe, PCIe 4.0", 6.5e9, is_per_rank=False),
    Link("network, 100 Gbit/s", 11e9, is_per_rank=False),
)


@dataclass(frozen=True, slots=True)
class PromptRoom:
    """What the whole blocks of one prompt take."""

    token_count: int
    slot_bytes: int
    # If window layers kept only the blocks that resuming at the prompt's end reads.
    window_slot_bytes: int


class BlockSize:
    """The blocks of a model that runs on `tp` ranks."""

    def __init__(self, model: ModelKv, *, tp: int = 1, block_tokens: int = 16) -> None:
        """Raises BadRequest, in one line, for what neither vLLM nor kvtier would take."""
        if not 1 <= block_tokens <= BLOCK_TOKENS_MAX:
            raise BadRequest(f"--block-tokens {block_tokens}: give 1 to {BLOCK_TOKENS_MAX}")
        _check_tp(model, tp)
        self.model = model
        self.tp = tp
        self.block_tokens = block_tokens
        # Every rank holds the same latents: one copy is kept for all of them.
        self.is_one_copy = not any(group.kind.has_heads for group in model.groups)
        self.shard_count = 1 if self.is_one_copy else tp
        if self.shard_bytes > SHARD_BYTES_MAX:
            raise BadRequest(
                f"a block of {block_tokens} tokens has shards of {self.shard_bytes} bytes, at most "
                f"{SHARD_BYTES_MAX} are allowed: give fewer --block-tokens"
            )

    @property
    def shard_token_bytes(self) -> int:
        """What one rank holds of a token."""
        return sum(self._shard_token_bytes(group) for group in self.model.groups)

    @property
    def shard_bytes(self) -> int:
        return self.shard_token_bytes * self.block_tokens

    @property
    def block_bytes(self) -> int:
        """What kvtier holds of a block, without padding."""
        return self.shard_bytes * self.shard_count

    @property
    def slot_bytes(self) -> int:
        return self._slot_bytes(self.model.groups)

    @property
    def held_token_bytes(self) -> int:
        """What kvtier holds of a token: more than the model's where ranks have copies of heads."""
        return self.shard_token_bytes * self.shard_count

    def block_count(self, tier_bytes: int) -> int:
        return tier_bytes // self.slot_bytes

    def prompt(self, token_count: int) -> PromptRoom:
        """Blocks are kept when they are full: the rest of the prompt is always computed."""
        blocks = token_count // self.block_tokens
        slot_bytes = blocks * self.slot_bytes
        if not any(group.window_tokens for group in self.model.groups):
            return PromptRoom(token_count, slot_bytes, slot_bytes)
        # Groups that keep different tokens have blocks of their own.
        window_slot_bytes = sum(
            self._needed_count(group, blocks) * self._slot_bytes([group])
            for group in self.model.groups
        )
        return PromptRoom(token_count, slot_bytes, window_slot_bytes)

    def link_seconds(self, link: Link) -> float:
        """How long one block takes if nothing else is under way."""
        length_bytes = self.shard_bytes if link.is_per_rank else self.block_bytes
        return length_bytes / link.bytes_per_second

    def notes(self) -> list[str]:
        """What a reader must know beside the figures."""
        found = list(self.model.notes)
        if self.is_one_copy and self.tp > 1:
            found.append(f"all {self.tp} ranks hold the same latents: kvtier keeps one copy")
        head_counts = {g.kv_head_count for g in self.model.groups if g.kind.has_heads}
        found.extend(
            f"{self.tp} ranks share {count} KV heads: vLLM gives each rank a copy of its head, and "
            "kvtier keeps the shard of every rank"
            for count in sorted(head_counts)
            if count < self.tp
        )
        windows = sorted({g.window_tokens for g in self.model.groups if g.window_tokens})
        if windows:
            told = ", ".join(f"{window:,}" for window in windows)
            found.append(
                f"layers with a window read the last {told} tokens only; blocks hold all layers of "
                "all tokens, as vLLM does with --disable-hybrid-kv-cache-manager"
            )
        positions_max = self.model.positions_max
        if positions_max is not None and positions_max < max(PROMPT_TOKENS):
            found.append(f"the model itself takes up to {positions_max:,} tokens")
        found.extend(self._notes_on_slots())
        return found

    def _notes_on_slots(self) -> Iterable[str]:
        slot_bytes = self.slot_bytes
        if slot_bytes > (1 + _LOSS_TOLD) * self.block_bytes:
            yield (
                f"shards are padded to {PAD_BYTES >> 10} KiB, so that a block takes a slot of "
                f"{slot_bytes:,} bytes; more --block-tokens lose less"
            )
        if slot_bytes > SEGMENT_BYTES:
            yield (
                f"a block is larger than an NVMe segment ({SEGMENT_BYTES >> 20} MiB): it stays in "
                "memory; give fewer --block-tokens"
            )
            return
        slots = SEGMENT_BYTES // slot_bytes
        loss = 1 - slots * slot_bytes / SEGMENT_BYTES
        if loss >= _LOSS_TOLD:
            yield (
                f"an NVMe segment of {SEGMENT_BYTES >> 20} MiB holds {slots} whole slots: on NVMe "
                f"count {100 * loss:.0f} % fewer blocks"
            )

    def _needed_count(self, group: KvGroup, block_count: int) -> int:
        """Blocks of a group that resuming behind the last one reads."""
        if group.window_tokens is None:
            return block_count
        # The next token reads itself and the window's other tokens, which come before it.
        return min(block_count, ceil((group.window_tokens - 1) / self.block_tokens))

    def _shard_token_bytes(self, group: KvGroup) -> int:
        # Each rank has a head at least: a latent is one, and whole on every rank.
        heads = max(1, group.kv_head_count // self.tp)
        return group.layer_count * heads * group.head_bytes

    def _slot_bytes(self, groups: Iterable[KvGroup]) -> int:
        shard_bytes = sum(map(self._shard_token_bytes, groups)) * self.block_tokens
        return SlotLayout(shard_bytes, self.shard_count).slot_bytes


def _check_tp(model: ModelKv, tp: int) -> None:
    """vLLM's own rules: heads are split evenly, or each rank has a copy of one."""
    if not 1 <= tp <= SHARD_COUNT_MAX:
        raise BadRequest(f"--tp {tp}: give 1 to {SHARD_COUNT_MAX}")
    heads = model.attention_head_count
    if heads % tp:
        raise BadRequest(f"--tp {tp}: {heads} attention heads cannot be split among {tp} ranks")
    for group in model.groups:
        count = group.kv_head_count
        if group.kind.has_heads and count % tp and tp % count:
            raise BadRequest(
                f"--tp {tp}: {count} KV heads can neither be split among {tp} ranks nor be copied "
                f"evenly: give a divisor or a multiple of {count}"
            )
