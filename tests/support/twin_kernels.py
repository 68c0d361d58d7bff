"""Copy kernels on a fake GPU, run as their twins: what the real ones must do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtier.cuda.copy_paths import CopyPath
from kvtier.cuda.copy_plan import Piece
from kvtier.cuda.errors import CudaCode, CudaRefused
from kvtier.cuda.fake import FakeCudart
from kvtier.cuda.fake_memory import FakeMemory
from kvtier.cuda.runtime import Direction, KernelLaunch, Ranges, Stream


def copy_runs_twin(memory: FakeMemory, arguments: Sequence[int]) -> None:
    """What `copy_runs` of kernels/kv_copy.cu does, by its arguments."""
    table, run_count, tiles_per_run = arguments
    assert tiles_per_run > 0
    columns = memory.on_device(table, 3 * 8 * run_count).view(np.uint64).reshape(3, run_count)
    for target, source, size in columns.T.tolist():
        np.copyto(memory.on_device(target, size), memory.on_device(source, size))


class TwinKernels:
    """Copies by kernels as the real ones will be: every run a row of a table."""

    def __init__(self, cuda: FakeCudart) -> None:
        self._cuda = cuda
        self._tables: list[Piece] = []
        self.paths: set[CopyPath] = set()
        self.refuse = False
        self.corrupt: set[CopyPath] = set()  # Paths on which a byte is lost.
        cuda.add_twin("copy_runs", self._twin)
        self._function = cuda.load_function(b"cubin", "copy_runs")

    def submit(self, piece: Piece, stream: Stream) -> None:
        if self.refuse:
            raise CudaRefused("cuLaunchKernel", CudaCode.INVALID_VALUE)
        self.paths.add(piece.path)
        self._tables.append(piece)
        on_device = Ranges(piece.device, piece.sizes)
        on_host = Ranges(piece.seen, piece.sizes)
        is_load = piece.direction is Direction.HOST_TO_DEVICE
        reads, writes = (on_host, on_device) if is_load else (on_device, on_host)
        launch = KernelLaunch(
            self._function, 4, 1024, [len(self._tables) - 1], reads=reads, writes=writes
        )
        self._cuda.launch(launch, stream)

    def close(self) -> None:
        pass

    def _twin(self, memory: FakeMemory, arguments: Sequence[int]) -> None:
        [index] = arguments
        piece = self._tables[index]
        is_load = piece.direction is Direction.HOST_TO_DEVICE
        targets, sources = (piece.device, piece.seen) if is_load else (piece.seen, piece.device)
        for target, source, size in zip(
            targets.tolist(), sources.tolist(), piece.sizes.tolist(), strict=True
        ):
            np.copyto(memory.on_device(target, size), memory.on_device(source, size))
        if piece.path in self.corrupt:
            memory.on_device(int(targets[-1]), 1)[0] ^= 1
