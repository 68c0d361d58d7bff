"""Queues pieces of copies by their path, or by a plainer one where that is refused."""

from __future__ import annotations

import logging
from typing import Protocol

from kvtier.cuda.copy_paths import CopyPath, PathSupport
from kvtier.cuda.copy_plan import Piece
from kvtier.cuda.errors import CudaBroken, CudaRefused
from kvtier.cuda.runtime import CudaRuntime, Direction, SourceOrder, Stream
from kvtier.errors import KVTierError

log = logging.getLogger(__name__)


class KernelsBusy(KVTierError):
    """As many pieces are under way as kernels can take, or this one is larger than any they take:
    send it another way."""


class KernelCopies(Protocol):
    """Copies by kernels; see `CopyPath.KERNEL` and `CopyPath.STAGED`."""

    def submit(self, piece: Piece, stream: Stream) -> None:
        """Queue the whole piece on the stream.

        Raises CudaRefused or KernelsBusy, and then has queued nothing that touches the piece.
        """
        ...

    def close(self) -> None:
        """When all that was submitted has ended."""
        ...


class PieceSubmitter:
    """A path that was refused once is not tried again: it would be refused for every piece."""

    def __init__(self, runtime: CudaRuntime, kernels: KernelCopies | None) -> None:
        self._runtime = runtime
        self._kernels = kernels
        self.support = PathSupport(runtime.has_batches, kernels is not None)

    def submit(self, piece: Piece, stream: Stream) -> None:
        """Raises CudaRefused; then a part may be queued if the piece went by plain copies."""
        if piece.path in (CopyPath.KERNEL, CopyPath.STAGED) and self.support.has_kernels:
            assert self._kernels is not None
            try:
                self._kernels.submit(piece, stream)
                return
            except KernelsBusy:
                pass  # The next piece may find them idle.
            except CudaRefused as error:
                self._give_up(error, PathSupport(self.support.has_batches, has_kernels=False))
        if piece.path is not CopyPath.PLAIN and self.support.has_batches:
            try:
                self._submit_batch(piece, stream)
                return
            except CudaRefused as error:
                self._give_up(error, PathSupport(False, self.support.has_kernels))
        self._submit_plain(piece, stream)

    def _give_up(self, error: CudaRefused, support: PathSupport) -> None:
        if isinstance(error, CudaBroken):
            raise error
        self.support = support
        log.warning("a copy path was refused: not used again", extra={"reason": str(error)})

    def _submit_batch(self, piece: Piece, stream: Stream) -> None:
        if piece.direction is Direction.HOST_TO_DEVICE:
            # Leased slots are quiet, so the driver may read them whenever it likes.
            order, targets, sources = SourceOrder.ANY, piece.device, piece.seen
        else:
            order, targets, sources = SourceOrder.STREAM, piece.seen, piece.device
        self._runtime.copy_batch(targets, sources, piece.sizes, order, stream)

    def _submit_plain(self, piece: Piece, stream: Stream) -> None:
        is_load = piece.direction is Direction.HOST_TO_DEVICE
        columns = (piece.device, piece.host) if is_load else (piece.host, piece.device)
        for target, source, size in zip(
            columns[0].tolist(), columns[1].tolist(), piece.sizes.tolist(), strict=True
        ):
            self._runtime.copy(target, source, size, piece.direction, stream)
