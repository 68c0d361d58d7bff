"""The beginning of a list that others go on appending to, without a copy.

A prompt of 128 Ki tokens has thousands of block hashes; to copy them costs a scheduler's thread as
much as all else that is done for the request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class Head(Sequence[T]):
    """The first `count` elements; nobody may change those as long as this is used."""

    __slots__ = ("_count", "_whole")

    def __init__(self, whole: Sequence[T], count: int) -> None:
        assert count <= len(whole), "a head is no longer than its whole"
        self._whole = whole
        self._count = count

    def until(self, count: int) -> Head[T]:
        """The first `count` elements of the same list."""
        return self if count == self._count else Head(self._whole, count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            first, last, step = index.indices(self._count)
            return self._whole[first:last:step]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        return self._whole[index if index >= 0 else index + self._count]

    def __iter__(self) -> Iterator[T]:
        return iter(self._whole[: self._count])
