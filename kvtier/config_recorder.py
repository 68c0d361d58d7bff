"""`[recorder]`: where the daemon writes down what it was told."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.config_values import PathValue, Size, option

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class RecorderConfig:
    """A flight recorder: every event that the daemon's decisions follow from, so that `kvtier
    replay` can make them again elsewhere; see simulator.md. Off unless `folder` is set."""

    folder: str = option(
        "",
        PathValue(),
        "Where recordings are written; made if it is not there. They name no token, and block "
        "hashes are salted with a key that is drawn for each recording and not kept.",
    )
    bytes: int = option(
        1024 * MIB,
        Size(8 * MIB, 1 << 50),
        "What all recordings in the folder may take; the oldest files go. What is left of a "
        "recording whose first file has gone can be simulated, but not replayed.",
    )

    @property
    def is_set(self) -> bool:
        return self.folder != ""
