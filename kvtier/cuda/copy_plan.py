"""From blocks and slots to pieces of copies: pure arithmetic on columns of addresses.

    blocks x runs of the layout  -> runs, sorted by device address, neighbours made one
    runs                         -> pieces: one submission each, of one path and bounded size

Neighbours are merged here because no driver does it, and every copy in a batch costs the host half
a microsecond. A run never leaves its slab: a slab is one registration, and a copy across two is
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.cuda.copy_paths import CopyPath, PathLimits, PathSupport, choose_path
from kvtier.cuda.device_layout import DeviceLayout
from kvtier.cuda.runtime import Addresses, Direction
from kvtier.errors import BadRequest

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SlabView:
    """What planning needs to know of a slab."""

    alias: int  # What the device adds to the host's addresses.
    is_registered: bool


@dataclass(frozen=True, slots=True, eq=False)
class CopyRuns:
    """Runs of bytes between device and host; `slabs` are indices into a list of SlabView."""

    device: Addresses
    host: Addresses
    sizes: Addresses
    slabs: Indices

    def at(self, which: npt.NDArray[np.bool_] | Indices | slice) -> CopyRuns:
        return CopyRuns(self.device[which], self.host[which], self.sizes[which], self.slabs[which])


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One submission."""

    path: CopyPath
    direction: Direction
    device: Addresses
    host: Addresses  # The host's addresses, for plain copies.
    seen: Addresses  # The device's addresses of the same bytes, for batches and kernels.
    sizes: Addresses
    slabs: Indices | None = None  # Of each run; None: all are of one.

    @property
    def bytes_count(self) -> int:
        return int(self.sizes.sum())


def runs_of(
    layout: DeviceLayout, device_blocks: Indices, slots: Addresses, slabs: Indices
) -> CopyRuns:
    """All bytes of the blocks: `device_blocks[i]` lies at host address `slots[i]`, in `slabs[i]`.

    Raises BadRequest for a block that does not exist, or that is named twice.
    """
    if not len(device_blocks) == len(slots) == len(slabs):
        raise BadRequest("blocks, slots and slabs differ in number")
    if len(device_blocks) and not (
        int(device_blocks.min()) >= 0 and int(device_blocks.max()) < layout.block_count
    ):
        raise BadRequest(f"a device block is not one of {layout.block_count}")
    if len(np.unique(device_blocks)) != len(device_blocks):
        raise BadRequest("a device block is named twice")
    blocks = device_blocks.astype(np.uint64)
    run_count = len(layout.sizes)
    return merged(
        CopyRuns(
            (layout.addresses[None, :] + blocks[:, None] * layout.steps[None, :]).ravel(),
            (slots[:, None] + layout.places[None, :]).ravel(),
            np.tile(layout.sizes, len(blocks)),
            np.repeat(slabs, run_count),
        )
    )


def merged(runs: CopyRuns) -> CopyRuns:
    """Sorted by device address; runs that are neighbours on both sides and in one slab are one."""
    if not len(runs.sizes):
        return runs
    order = np.argsort(runs.device, kind="stable")
    ordered = runs.at(order)
    device, host, sizes, slabs = ordered.device, ordered.host, ordered.sizes, ordered.slabs
    is_first = np.ones(len(order), bool)
    is_first[1:] = (
        (device[1:] != device[:-1] + sizes[:-1])
        | (host[1:] != host[:-1] + sizes[:-1])
        | (slabs[1:] != slabs[:-1])
    )
    firsts = np.flatnonzero(is_first)
    return CopyRuns(device[firsts], host[firsts], np.add.reduceat(sizes, firsts), slabs[firsts])


def split(runs: CopyRuns, bytes_max: int) -> CopyRuns:
    """Runs longer than `bytes_max` in several."""
    counts = -(-runs.sizes.astype(np.int64) // bytes_max)
    if bool((counts == 1).all()):
        return runs
    source = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = (place * bytes_max).astype(np.uint64)
    sizes = np.minimum(runs.sizes[source] - offsets, np.uint64(bytes_max))
    return CopyRuns(
        runs.device[source] + offsets, runs.host[source] + offsets, sizes, runs.slabs[source]
    )


def pieces_of(
    runs: CopyRuns,
    slabs: Sequence[SlabView],
    direction: Direction,
    support: PathSupport,
    limits: PathLimits = PathLimits(),
) -> list[Piece]:
    """Long runs first: they need no kernel, so the link is busy while the rest is prepared."""
    if not len(runs.sizes):
        return []
    registered = np.array([slab.is_registered for slab in slabs], bool)[runs.slabs]
    aliases = np.array([slab.alias for slab in slabs], np.int64).astype(np.uint64)
    is_small = runs.sizes < limits.small_run_bytes
    pieces: list[Piece] = []
    for group in (registered & ~is_small, registered & is_small, ~registered):
        part = split(runs.at(group), limits.piece_bytes_max) if group.any() else runs.at(group)
        if not len(part.sizes):
            continue
        path = choose_path(
            direction,
            run_bytes=int(part.sizes.max()),
            run_count=len(part.sizes),
            is_registered=bool(registered[group].all()),
            support=support,
            limits=limits,
        )
        for bounds in _cuts(part.sizes, limits):
            some = part.at(bounds)
            seen = some.host + aliases[some.slabs]
            pieces.append(
                Piece(path, direction, some.device, some.host, seen, some.sizes, some.slabs)
            )
    return pieces


def _cuts(sizes: Addresses, limits: PathLimits) -> list[slice]:
    """Consecutive runs up to both limits."""
    ends = np.cumsum(sizes.astype(np.int64))
    cuts: list[slice] = []
    first, runs_max = 0, limits.piece_runs_first
    while first < len(sizes):
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + limits.piece_bytes_max, side="right"))
        last = max(first + 1, min(last, first + min(runs_max, limits.piece_runs_max)))
        cuts.append(slice(first, last))
        first, runs_max = last, 2 * runs_max
    return cuts
