"""Our connector, loaded by vLLM from here, so that a rank can be stopped in the middle of a store.

Ranks are processes that vLLM starts by itself: they are told by files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.connector.vllm import KVTierConnector, copier, worker_side

__all__ = ["KVTierConnector", "arm", "is_stuck"]

FOLDER_VARIABLE = "KVTIER_TEST_HALF_COPIES"
STUCK_SECONDS = 240.0


def _file(name: str) -> Path:
    return Path(os.environ[FOLDER_VARIABLE]) / name


def arm(rank: int) -> None:
    """The next store on this rank stops in its middle."""
    _file(f"stuck-{rank}").unlink(missing_ok=True)
    _file(f"armed-{rank}").touch()


def is_stuck(rank: int) -> bool:
    return _file(f"stuck-{rank}").exists()


class HalfCopier:
    """Once armed it writes half of one block out, and then waits to be killed."""

    def __init__(self, geometry: Any) -> None:
        self._inner = copier.cpu_copier(geometry)

    def copy_in(self, device_blocks: Sequence[int], views: Sequence[Any]) -> None:
        self._inner.copy_in(device_blocks, views)

    def copy_out(self, device_blocks: Sequence[int], views: Sequence[Any]) -> None:
        from vllm.distributed import get_tp_group

        rank = get_tp_group().rank_in_group
        if not _file(f"armed-{rank}").exists():
            self._inner.copy_out(device_blocks, views)
            return
        _file(f"armed-{rank}").unlink()
        whole = np.empty_like(views[0])
        self._inner.copy_out(device_blocks[:1], [whole])
        np.copyto(views[0][: len(whole) // 2], whole[: len(whole) // 2])
        _file(f"stuck-{rank}").touch()
        time.sleep(STUCK_SECONDS)


# In the ranks alone: the tests' own process imports this module for its names.
if FOLDER_VARIABLE in os.environ:
    worker_side.cpu_copier = HalfCopier  # type: ignore[assignment]
