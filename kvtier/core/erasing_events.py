"""Events of erasing: what a namespace has left in memory and below is overwritten by the shell.

The core says what may be overwritten now, and gives it to nobody until it hears that it was.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.types import NamespaceId, TierName


@dataclass(frozen=True, slots=True)
class EraseBegun:
    """Forget what lies below memory of this fingerprint, open or not, and give its namespace no
    slots until `EraseEnded`. An open one has been cleared before."""

    fingerprint: bytes
    namespace: NamespaceId | None = None


@dataclass(frozen=True, slots=True)
class HoldSlots:
    """Hold up to `count` free slots of the namespace that have not been erased yet."""

    namespace: NamespaceId
    count: int


@dataclass(frozen=True, slots=True)
class SlotsErased:
    """Answer to SlotsHeld: they were overwritten, with their entries."""

    namespace: NamespaceId
    slots: npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class HoldRemains:
    """Hold all of this segment that no block lies in."""

    tier: TierName
    segment: int


@dataclass(frozen=True, slots=True)
class RemainsErased:
    """Answer to RemainsHeld: they were overwritten, or that was given up."""

    tier: TierName
    segment: int


@dataclass(frozen=True, slots=True)
class EraseEnded:
    """The namespace may have slots again."""

    fingerprint: bytes
    namespace: NamespaceId | None = None


ErasingEvent = EraseBegun | HoldSlots | SlotsErased | HoldRemains | RemainsErased | EraseEnded
