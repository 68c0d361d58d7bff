"""Columns that grow: NumPy arrays indexed by row or place, lengthened where they lie.

Copying the columns of a million blocks would hold the event loop for tens of milliseconds; a large
array that is resized in place is moved by the kernel, page table entry by page table entry. So
nobody may keep a view of a column (a slice of it): use it within the statement.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

Scalar = TypeVar("Scalar", bound=np.generic)


def grow(column: npt.NDArray[Scalar], count: int, fill: float) -> None:
    """Lengthen the column to `count`, the new part filled with `fill`."""
    old = len(column)
    assert count >= old, "a column never shrinks"
    column.resize(count, refcheck=False)
    column[old:] = fill
