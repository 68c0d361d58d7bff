"""Moves whole blocks between the engine's KV tensor in host memory and slot views."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]


class HostBlockCopier:
    """The connector's BlockCopier over a CPU tensor; `np.copyto` releases the GIL for its bytes."""

    def __init__(self, kv_cache: torch.Tensor) -> None:
        assert kv_cache.device.type == "cpu"
        assert kv_cache.is_contiguous()
        self._blocks: Bytes = kv_cache.view(len(kv_cache), -1).view(torch.uint8).numpy()

    @property
    def block_bytes(self) -> int:
        """Size of one block, which is the size of every view."""
        return int(self._blocks.shape[1])

    def copy_out(self, device_blocks: Sequence[int], views: Sequence[Bytes]) -> None:
        """Device blocks into slot views, in order."""
        for device_block, view in zip(device_blocks, views, strict=True):
            np.copyto(view, self._blocks[device_block])

    def copy_in(self, device_blocks: Sequence[int], views: Sequence[Bytes]) -> None:
        """Slot views into device blocks, in order."""
        for device_block, view in zip(device_blocks, views, strict=True):
            np.copyto(self._blocks[device_block], view)
