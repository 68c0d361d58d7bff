"""Overwriting with zeros, without the GIL, from a small piece of memory that stays in the cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtier.io.alignment import aligned_buffer
from kvtier.io.driver import Access, Batch, Driver, Outcome
from kvtier.memory import Bytes

# Nobody writes here.
_ZEROS = aligned_buffer(1 << 20)
# One such call at a time: others' reads and writes go beside it.
_CALL_VIEWS = 8


def zero(view: Bytes) -> None:
    """All of the view is 0 when this returns. Piece by piece: `fill` would hold the GIL."""
    for first in range(0, view.nbytes, len(_ZEROS)):
        part = view[first : first + len(_ZEROS)]
        np.copyto(part, _ZEROS[: len(part)])


def zero_all(views: Sequence[Bytes]) -> None:
    for view in views:
        zero(view)


def write_zeros(driver: Driver, first: int, length_bytes: int) -> Outcome:
    """The bytes from `first` on are 0, or why not; not synced. Blocks, one call after the other."""
    step = _CALL_VIEWS * len(_ZEROS)
    for start in range(0, length_bytes, step):
        left = min(step, length_bytes - start)
        views = tuple(_ZEROS[: min(len(_ZEROS), left - at)] for at in range(0, left, len(_ZEROS)))
        batch = Batch(1)
        driver.write([Access(0, first + start, views)], batch)
        [outcome] = batch.wait()  # A call that hangs has its place until it returns.
        if outcome is not Outcome.DONE:
            return outcome
    return Outcome.DONE
