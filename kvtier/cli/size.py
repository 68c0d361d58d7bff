"""`kvtier size --model MODEL`: how much KV a model has, and how much of it a tier holds.

Asks no daemon and needs no GPU: it computes from the model's config.json what vLLM would keep.
Exit codes: 0; 2 for a mistake in the arguments, or a model that cannot be sized.
"""

from __future__ import annotations

import argparse
import os
from fractions import Fraction
from pathlib import Path

from kvtier.cli.model_files import find_config, read_config
from kvtier.cli.output import add_json_argument, bytes_text, print_json, table
from kvtier.cli.sizes import positive
from kvtier.sizing.capacity import LINKS, PROMPT_TOKENS, BlockSize
from kvtier.sizing.dtypes import AUTO, VALUE_BYTES
from kvtier.sizing.model import model_kv

_GIB = 1 << 30
_TIERS_GIB = (16, 64, 256, 1024)
_TIER_GIB_MAX = 1 << 20
_LINK_PROMPT = 8 << 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="a config.json, a folder with one, or the name of a model in the local Hugging Face "
        "cache; nothing is downloaded",
    )
    parser.add_argument(
        "--tp", type=positive, default=1, metavar="N", help="ranks of tensor parallelism (1)"
    )
    parser.add_argument(
        "--kv-dtype",
        choices=(AUTO, *VALUE_BYTES),
        default=AUTO,
        metavar="DTYPE",
        help="auto (as vLLM chooses), fp8, bf16, fp16 or fp32",
    )
    parser.add_argument(
        "--block-tokens", type=positive, default=16, metavar="N", help="tokens of a block (16)"
    )
    parser.add_argument(
        "--tier-gib",
        type=_gib,
        action="append",
        metavar="X",
        help="size of a tier; may be given several times "
        f"({', '.join(str(size) for size in _TIERS_GIB)})",
    )
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    path = find_config(arguments.model, os.environ)
    model = model_kv(read_config(path), kv_dtype=arguments.kv_dtype)
    size = BlockSize(model, tp=arguments.tp, block_tokens=arguments.block_tokens)
    tiers: list[int] = arguments.tier_gib or [gib * _GIB for gib in _TIERS_GIB]
    if arguments.json:
        print_json(_facts(path, size, tiers))
    else:
        print(_text(path, size, tiers))
    return 0


def _facts(path: Path, size: BlockSize, tiers: list[int]) -> dict[str, object]:
    return {
        "config": str(path),
        "model_type": size.model.model_type,
        "kv_dtype": size.model.dtype.name,
        "value_bytes": size.model.dtype.value_bytes,
        "groups": [
            {
                "attention": group.kind.value,
                "layers": group.layer_count,
                "kv_heads": group.kv_head_count,
                "head_dim": group.head_dim,
                "window_tokens": group.window_tokens,
                "token_bytes": group.token_bytes,
            }
            for group in size.model.groups
        ],
        "token_bytes": size.model.token_bytes,
        "tp": size.tp,
        "shard_count": size.shard_count,
        "shard_token_bytes": size.shard_token_bytes,
        "held_token_bytes": size.held_token_bytes,
        "block_tokens": size.block_tokens,
        "shard_bytes": size.shard_bytes,
        "block_bytes": size.block_bytes,
        "slot_bytes": size.slot_bytes,
        "prompts": [
            {
                "tokens": prompt.token_count,
                "slot_bytes": prompt.slot_bytes,
                "window_slot_bytes": prompt.window_slot_bytes,
            }
            for prompt in map(size.prompt, PROMPT_TOKENS)
        ],
        "tiers": [_tier_facts(size, tier_bytes) for tier_bytes in tiers],
        "links": [
            {
                "link": link.name,
                "bytes_per_second": link.bytes_per_second,
                "block_seconds": size.link_seconds(link),
            }
            for link in LINKS
        ],
        "notes": size.notes(),
    }


def _tier_facts(size: BlockSize, tier_bytes: int) -> dict[str, object]:
    return {
        "tier_bytes": tier_bytes,
        "blocks": size.block_count(tier_bytes),
        "tokens": size.block_count(tier_bytes) * size.block_tokens,
        "prompts": [
            {
                "tokens": prompt.token_count,
                "count": _count(tier_bytes, prompt.slot_bytes),
                "window_count": _count(tier_bytes, prompt.window_slot_bytes),
            }
            for prompt in map(size.prompt, PROMPT_TOKENS)
        ],
    }


def _text(path: Path, size: BlockSize, tiers: list[int]) -> str:
    model = size.model
    head = (
        f"{path}: {model.model_type[:40]}, KV in {model.dtype.name}, tensor parallelism {size.tp}"
    )
    parts = [head, _groups(size), _totals(size), _tiers(size, tiers), _links(size)]
    if notes := size.notes():
        parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts)


def _groups(size: BlockSize) -> str:
    return table(
        ("attention", "layers", "KV heads", "values a head", "window", "bytes a token"),
        [
            (
                group.kind.value,
                group.layer_count,
                group.kv_head_count,
                group.head_dim,
                group.window_tokens or "-",
                f"{group.token_bytes:,}",
            )
            for group in size.model.groups
        ],
    )


def _totals(size: BlockSize) -> str:
    """Bytes of a token and of a block: all the model's, one rank's, what kvtier holds."""
    rows = [("the model", size.model.token_bytes, size.model.token_bytes * size.block_tokens)]
    if size.tp > 1:
        rows.append(("each rank", size.shard_token_bytes, size.shard_bytes))
        rows.append(("kvtier", size.held_token_bytes, size.block_bytes))
    heads = ("held by", "bytes a token", f"bytes a block of {size.block_tokens} tokens", "")
    return table(
        heads,
        [(who, f"{token:,}", f"{block:,}", bytes_text(block)) for who, token, block in rows],
    )


def _tiers(size: BlockSize, tiers: list[int]) -> str:
    prompts = [size.prompt(count) for count in PROMPT_TOKENS]
    has_windows = any(one.window_slot_bytes != one.slot_bytes for one in prompts)
    heads = ["tier", "blocks", "tokens", *(f"{one.token_count >> 10} K prompts" for one in prompts)]
    rows = []
    for tier_bytes in tiers:
        blocks = size.block_count(tier_bytes)
        counts = [_count(tier_bytes, one.slot_bytes) for one in prompts]
        tokens = f"{blocks * size.block_tokens:,}"
        rows.append([bytes_text(tier_bytes), f"{blocks:,}", tokens, *map(_count_text, counts)])
        if has_windows:
            counts = [_count(tier_bytes, one.window_slot_bytes) for one in prompts]
            rows.append(["…windows only", "-", "-", *map(_count_text, counts)])
    return table(heads, rows)


def _links(size: BlockSize) -> str:
    blocks = _LINK_PROMPT // size.block_tokens
    return table(
        ("moved over (usual speed)", "GB/s", "a block", f"a prompt of {_LINK_PROMPT >> 10} K"),
        [
            (
                link.name + (", each rank" if link.is_per_rank and size.tp > 1 else ""),
                f"{link.bytes_per_second / 1e9:g}",
                seconds_text(size.link_seconds(link)),
                seconds_text(blocks * size.link_seconds(link)) if blocks else "-",
            )
            for link in LINKS
        ],
    )


def seconds_text(seconds: float) -> str:
    """Three digits in the unit that fits: 0.00026 -> "262 µs"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds * 1e6:.3g} µs"


def _count(tier_bytes: int, prompt_bytes: int) -> int | None:
    """None: the prompt has no full block, and nothing of it is kept."""
    return tier_bytes // prompt_bytes if prompt_bytes else None


def _count_text(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def _gib(text: str) -> int:
    """For argparse: "0.5" -> 536870912."""
    try:
        gib = Fraction(text)
    except (ValueError, ZeroDivisionError):
        gib = Fraction(0)
    if not 0 < gib <= _TIER_GIB_MAX:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size of a tier: give GiB above 0, at most {_TIER_GIB_MAX}"
        )
    return int(gib * _GIB)
