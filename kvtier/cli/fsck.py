"""`kvtier fsck PATH…`: read every block of an NVMe pool and compare it with its checksum.

The paths are only read, but they must not be in use. Blocks of every namespace and epoch are
looked at; which of them a daemon would still want, only the daemon knows. After a power cut or a
killed daemon corrupt blocks are no damage: they were being written, or a slot was being reused, and
the daemon treats them as misses. Exit codes: 0; 1 when blocks are corrupt or unreadable; 2 when the
paths are no whole pool.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvtier.cli.output import add_json_argument, bytes_text, print_json
from kvtier.io.alignment import aligned_buffer
from kvtier.io.driver import Outcome
from kvtier.layout import SlotLayout
from kvtier.memory import Bytes
from kvtier.pools.key_file import sealer_from
from kvtier.pools.nvme import NvmePool
from kvtier.pools.nvme_paths import open_paths
from kvtier.pools.nvme_recovery import RecoveredBlocks
from kvtier.pools.slot_table import Slots

EXIT_CORRUPT = 1
_STEP_BYTES = 64 << 20
_SHOWN_MAX = 20
_BAR_WIDTH = 40
_BAR_SECONDS = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="all paths of the pool")
    parser.add_argument(
        "--key-file", type=Path, metavar="FILE", help="the keys of a pool that is encrypted"
    )
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    make_sealer = None if arguments.key_file is None else sealer_from(arguments.key_file)
    pool = NvmePool(
        open_paths(arguments.paths, writable=False), writable=False, make_sealer=make_sealer
    )
    try:
        found = pool.recover(None)
        outcomes, bad, payload_bytes = _verify(pool, found)
    finally:
        pool.close(clean=False)
    wrong_count = sum(outcomes.values()) - outcomes[Outcome.DONE]
    figures = {
        "paths": [str(path) for path in arguments.paths],
        "was_clean": pool.was_clean,
        "locked_segments": pool.locked_count,
        "segments_used": len(found.lives),
        "segments": pool.geometry.segment_count * pool.geometry.path_count,
        "blocks": len(found.slots),
        "payload_bytes": payload_bytes,
        "right_blocks": outcomes[Outcome.DONE],
        "corrupt_blocks": outcomes[Outcome.CORRUPT],
        "unreadable_blocks": wrong_count - outcomes[Outcome.CORRUPT],
        "void_entries": len(found.void_slots),
        "bad": bad[:_SHOWN_MAX],
    }
    if arguments.json:
        print_json(figures)
    else:
        _print_text(figures, bad)
    return EXIT_CORRUPT if wrong_count else 0


def _verify(
    pool: NvmePool, found: RecoveredBlocks
) -> tuple[Counter[Outcome], list[dict[str, object]], int]:
    """(how many blocks ended how, the bad ones, bytes of payload)."""
    outcomes: Counter[Outcome] = Counter()
    bad: list[dict[str, object]] = []
    payload_bytes = 0
    buffer = aligned_buffer(max(_STEP_BYTES, pool.geometry.segment_bytes))
    bar = _Bar(len(found.slots))
    for layout, slots in _batches(pool, found.slots):
        results = pool.read_blocks(slots, _views(buffer, layout, len(slots))).wait()
        outcomes.update(results)
        payload_bytes += layout.payload_bytes * len(slots)
        for slot, outcome in zip(slots.tolist(), results, strict=True):
            if outcome is not Outcome.DONE:
                header = pool.header_of(slot)
                bad.append(
                    {
                        "segment": header.segment,
                        "slot": slot,
                        "namespace": header.fingerprint.hex(),
                        "outcome": str(outcome),
                    }
                )
        bar.move(len(slots), len(bad))
    bar.end()
    return outcomes, bad, payload_bytes


def _batches(pool: NvmePool, slots: Slots) -> Iterator[tuple[SlotLayout, Slots]]:
    """Runs of slots of one layout, of bounded size."""
    segments = slots // pool.geometry.row_count_max
    borders = np.flatnonzero(np.diff(segments)) + 1
    for own in np.split(slots, borders):
        if len(own) == 0:
            continue
        layout = pool.header_of(int(own[0])).layout
        step = max(1, _STEP_BYTES // layout.slot_bytes)
        for first in range(0, len(own), step):
            yield layout, own[first : first + step]


def _views(buffer: Bytes, layout: SlotLayout, count: int) -> list[list[Bytes]]:
    block_bytes = layout.shard_count * layout.padded_shard_bytes
    rows = buffer[: count * block_bytes].reshape(
        count, layout.shard_count, layout.padded_shard_bytes
    )
    return [list(row) for row in rows]


class _Bar:
    """Progress on stderr; nothing where nobody watches."""

    def __init__(self, total_count: int) -> None:
        self._total_count = total_count
        self._done_count = 0
        self._shown_at = 0.0
        self._watched = sys.stderr.isatty() and total_count > 0

    def move(self, count: int, bad_count: int) -> None:
        self._done_count += count
        now = time.monotonic()
        if not self._watched or now - self._shown_at < _BAR_SECONDS:
            return
        self._shown_at = now
        share = self._done_count / self._total_count
        bar = ("#" * round(share * _BAR_WIDTH)).ljust(_BAR_WIDTH)
        sys.stderr.write(f"\r[{bar}] {share:4.0%} of {self._total_count} blocks, {bad_count} bad")
        sys.stderr.flush()

    def end(self) -> None:
        if self._watched:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def _print_text(figures: dict[str, object], bad: list[dict[str, object]]) -> None:
    size = figures["payload_bytes"]
    assert isinstance(size, int)
    closed = "closed cleanly" if figures["was_clean"] else "not closed cleanly"
    print(
        f"{figures['segments_used']} of {figures['segments']} segments used, {closed}; "
        f"{figures['blocks']} blocks of {bytes_text(size)}: {figures['right_blocks']} right, "
        f"{figures['corrupt_blocks']} corrupt, {figures['unreadable_blocks']} unreadable"
    )
    for one in bad[:_SHOWN_MAX]:
        print(f"  segment {one['segment']}, slot {one['slot']}: {one['outcome']}")
    if len(bad) > _SHOWN_MAX:
        print(f"  … and {len(bad) - _SHOWN_MAX} more")
    if bad:
        print("a daemon treats these blocks as misses; nothing needs to be done")
