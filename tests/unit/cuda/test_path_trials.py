"""Paths are tried before they are trusted."""

from __future__ import annotations

import pytest

from kvtier.cuda.copy_paths import CopyPath, PathLimits, PathSupport
from kvtier.cuda.copy_submit import PieceSubmitter
from kvtier.cuda.errors import CudaUnavailable
from kvtier.cuda.fake import FakeCudart, FakeDevice
from kvtier.cuda.fake_costs import FakeCosts
from kvtier.cuda.path_trials import calibrated, give_up_wrong_paths
from kvtier.cuda.registration import SlabRegistry
from kvtier.cuda.runtime import Addresses, Direction, SourceOrder, Stream
from kvtier.cuda.streams import CopyStreams
from tests.support.twin_kernels import TwinKernels

ALL = PathSupport(has_batches=True, has_kernels=True)


class WrongBatches(FakeCudart):
    """A driver that leaves one copy of a batch out, upwards."""

    def copy_batch(
        self,
        targets: Addresses,
        sources: Addresses,
        sizes: Addresses,
        order: SourceOrder,
        stream: Stream,
    ) -> None:
        last = len(sizes) - (order is SourceOrder.ANY)
        super().copy_batch(targets[:last], sources[:last], sizes[:last], order, stream)


class WrongCopies(FakeCudart):
    def copy(
        self, target: int, source: int, length_bytes: int, direction: Direction, stream: Stream
    ) -> None:
        super().copy(target, source, length_bytes - 1, direction, stream)


@pytest.mark.parametrize("is_aliased", [False, True])
def test_right_paths_stay_and_nothing_is_left_behind(is_aliased: bool) -> None:
    cuda = FakeCudart(device=FakeDevice(is_aliased=is_aliased))
    kernels = TwinKernels(cuda)
    submitter = PieceSubmitter(cuda, kernels)
    free_bytes = cuda.free_bytes()
    assert give_up_wrong_paths(cuda, submitter) == []
    assert submitter.support == ALL
    assert kernels.paths == {CopyPath.KERNEL, CopyPath.STAGED}
    cuda.assert_clean()
    assert cuda.free_bytes() == free_bytes


@pytest.mark.parametrize("path", [CopyPath.KERNEL, CopyPath.STAGED])
def test_a_kernel_that_loses_a_byte_is_given_up(path: CopyPath) -> None:
    cuda = FakeCudart()
    kernels = TwinKernels(cuda)
    kernels.corrupt = {path}
    submitter = PieceSubmitter(cuda, kernels)
    [wrong] = give_up_wrong_paths(cuda, submitter)
    assert wrong.startswith(path.value)
    assert submitter.support == PathSupport(has_batches=True, has_kernels=False)


def test_a_batch_that_leaves_a_copy_out_is_given_up() -> None:
    cuda = WrongBatches()
    submitter = PieceSubmitter(cuda, TwinKernels(cuda))
    assert give_up_wrong_paths(cuda, submitter) == ["batch HOST_TO_DEVICE"]
    assert submitter.support == PathSupport(has_batches=False, has_kernels=True)


def test_without_one_path_that_is_right_there_is_no_gpu() -> None:
    cuda = WrongCopies()
    with pytest.raises(CudaUnavailable, match="wrong bytes"):
        give_up_wrong_paths(cuda, PieceSubmitter(cuda, None))
    cuda.assert_clean()


def test_where_nothing_can_be_pinned_plain_copies_are_tried() -> None:
    cuda = FakeCudart(device=FakeDevice(can_register=False))
    submitter = PieceSubmitter(cuda, None)
    assert give_up_wrong_paths(cuda, submitter) == []
    assert calibrated(cuda, submitter) == PathLimits()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("costs", "small_run_bytes"),
    [
        (FakeCosts(), 28 << 10),
        (FakeCosts(small_copy_bytes=40 << 10), 40 << 10),
        (FakeCosts(small_to_device_seconds=0.0), 0),
        (FakeCosts(kernel_bytes_per_second=500e9), 64 << 10),
    ],
)
def test_the_limits_are_where_one_path_overtakes_the_other(
    costs: FakeCosts, small_run_bytes: int
) -> None:
    cuda = FakeCudart(costs=costs)
    limits = calibrated(cuda, PieceSubmitter(cuda, TwinKernels(cuda)))
    assert limits.small_run_bytes == small_run_bytes
    assert limits.piece_bytes_max == PathLimits().piece_bytes_max


def test_streams_try_their_paths_and_copy_by_what_was_right() -> None:
    cuda = WrongBatches()
    streams = CopyStreams(cuda, SlabRegistry(cuda))
    assert streams.try_paths() == ["batch HOST_TO_DEVICE"]
    assert not streams.support.has_batches
    streams.close()
    cuda.assert_clean()
