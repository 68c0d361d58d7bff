"""Kernels get tables of runs; what they move is right, in order, and never a kernel's write to the
host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvtier.cuda.copy_paths import CopyPath, PathLimits, PathSupport
from kvtier.cuda.copy_plan import Piece
from kvtier.cuda.copy_submit import KernelsBusy, PieceSubmitter
from kvtier.cuda.errors import CudaCode, CudaRefused, CudaUnavailable
from kvtier.cuda.fake import FakeCudart, FakeDevice
from kvtier.cuda.fake_memory import DEVICE_FIRST
from kvtier.cuda.kernel_cache import KernelCache
from kvtier.cuda.kernel_copies import (
    TABLE_COUNT,
    RunKernels,
    find_run_kernels,
    load_run_kernels,
)
from kvtier.cuda.path_trials import give_up_wrong_paths
from kvtier.cuda.runtime import Direction, KernelLaunch, Ranges, Stream
from tests.support.copy_rig import CopyRig
from tests.support.kv_layouts import LAYOUTS, Sizes
from tests.support.pinned import HostSlab
from tests.support.twin_kernels import copy_runs_twin

# Everything is short, and pieces are many.
LIMITS = PathLimits(
    small_run_bytes=4096, kernel_count_min=1, piece_bytes_max=1500, piece_runs_max=7
)
DEVICES = {
    "batches": FakeDevice(),
    "aliases": FakeDevice(is_aliased=True),
    "no batches": FakeDevice(has_batches=False),
    # Copies from staging are plain then, which take the host's own address.
    "aliases without batches": FakeDevice(is_aliased=True, has_batches=False),
}
ODD = Sizes(layers=3, blocks=9, heads=3, tokens=5, width=7)


class WatchedCuda(FakeCudart):
    """Counts launches and the copies of a batch, and forbids kernels to write to the host."""

    launch_count = 0
    batch_sizes: Sequence[int] = ()

    def launch(self, launch: KernelLaunch, stream: Stream) -> None:
        self.launch_count += 1
        assert int(launch.writes.starts.min()) >= DEVICE_FIRST, "a kernel writes to the host"
        assert launch.block_threads <= 1024
        super().launch(launch, stream)

    def copy_batch(self, targets, sources, sizes, order, stream) -> None:  # type: ignore[no-untyped-def]
        self.batch_sizes = sizes.tolist()
        super().copy_batch(targets, sources, sizes, order, stream)


def cuda_of(device: str = "batches", seed: int | None = None) -> WatchedCuda:
    cuda = WatchedCuda(seed=seed, device=DEVICES[device])
    cuda.add_twin("copy_runs", copy_runs_twin)
    return cuda


def round_trip(cuda: WatchedCuda, name: str, sizes: Sizes) -> None:
    kernels = RunKernels(cuda, b"cubin", limits=LIMITS)
    rig = CopyRig(cuda, LAYOUTS[name](cuda, sizes), limits=LIMITS, kernels=kernels)
    rig.scramble()
    blocks, slots = [6, 1, 2, 3, 0], [7, 0, 1, 2, 5]
    expected = [rig.kv.block_bytes(block) for block in blocks]
    rig.offload(blocks, slots)
    assert [ticket.failed for ticket in rig.run()] == [None]
    for slot, block_bytes in zip(slots, expected, strict=True):
        np.testing.assert_array_equal(rig.slot_bytes_of(slot), block_bytes)
    stores_count = cuda.launch_count
    rig.scramble()
    targets = [3, 7, 5, 1, 6]
    before = [rig.kv.block_bytes(block) for block in range(8)]
    rig.onboard(targets, slots)
    assert [ticket.failed for ticket in rig.run()] == [None]
    for block in range(8):
        wanted = expected[targets.index(block)] if block in targets else before[block]
        np.testing.assert_array_equal(rig.kv.block_bytes(block), wanted)
    assert cuda.launch_count > stores_count > 0, "not by kernels"
    rig.streams.close()
    kernels.close()
    rig.registry.close()
    cuda.assert_clean()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_goes_out_and_comes_back_by_kernels(name: str, device: str) -> None:
    round_trip(cuda_of(device), name, ODD)


@pytest.mark.slow
def test_no_interleaving_of_streams_is_a_race() -> None:
    for seed in range(50):
        round_trip(cuda_of(seed=seed), "split", ODD)


def test_both_kernel_paths_pass_the_trials_at_the_start() -> None:
    cuda = cuda_of("aliases")
    kernels = RunKernels(cuda, b"cubin")
    submitter = PieceSubmitter(cuda, kernels)
    assert give_up_wrong_paths(cuda, submitter) == []
    assert submitter.support == PathSupport(has_batches=True, has_kernels=True)
    assert cuda.launch_count == 2
    kernels.close()
    cuda.assert_clean()
    assert cuda.memory.device.allocation_count == 0


class FakeCompiler:
    version = "fake"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def compile(self, source: str, headers: object, options: tuple[str, ...]) -> bytes:
        self.asked.append(options[-1])
        return b"cubin"


class PieceRig:
    """Device memory, a pinned slab, and pieces between them."""

    def __init__(self, *, limits: PathLimits = LIMITS) -> None:
        self.cuda = cuda_of()
        self.kernels = RunKernels(self.cuda, b"cubin", limits=limits)
        self.slab = HostSlab(1 << 16)
        self.cuda.register_host(self.slab.address, 1 << 16)
        self.device = self.cuda.allocate_device(1 << 16)
        self.streams = [self.cuda.create_stream(0) for _ in range(2)]

    def piece(
        self, host_offsets: Sequence[int], size: int, *, slabs: Sequence[int] | None = None
    ) -> Piece:
        """Of a store; on the device the runs lie 64 bytes apart, in the order given."""
        host = np.array(host_offsets, np.uint64) + np.uint64(self.slab.address)
        places = np.arange(len(host), dtype=np.uint64) * np.uint64(size + 64)
        return Piece(
            CopyPath.STAGED,
            Direction.DEVICE_TO_HOST,
            places + np.uint64(self.device),
            host,
            host,
            np.full(len(host), size, np.uint64),
            None if slabs is None else np.array(slabs, np.int64),
        )

    def fill(self) -> None:
        found = self.cuda.device_bytes(self.device, 1 << 16)
        np.copyto(found, np.random.default_rng(0).integers(0, 256, 1 << 16, np.uint8))


def test_neighbours_on_the_host_leave_staging_as_one_copy() -> None:
    rig = PieceRig()
    rig.kernels.submit(rig.piece([96, 0, 48, 500], 48), rig.streams[0])
    assert sorted(rig.cuda.batch_sizes) == [48, 144]


def test_a_copy_from_staging_never_crosses_slabs() -> None:
    """Two slabs may be neighbours in memory; each is a registration of its own."""
    rig = PieceRig()
    rig.kernels.submit(rig.piece([0, 48, 96, 144], 48, slabs=[0, 0, 1, 1]), rig.streams[0])
    assert sorted(rig.cuda.batch_sizes) == [96, 96]


def test_pieces_of_two_streams_do_not_meet_in_staging() -> None:
    rig = PieceRig()
    rig.fill()
    expected = rig.slab.array.copy()
    source = rig.cuda.device_bytes(rig.device, 1 << 16)
    for rank, stream in enumerate(rig.streams * 3):
        offsets = [4096 * rank, 4096 * rank + 200]
        for run, offset in enumerate(offsets):
            expected[offset : offset + 100] = source[run * 164 : run * 164 + 100]
        rig.kernels.submit(rig.piece(offsets, 100), stream)
    for stream in rig.streams:
        rig.cuda.synchronize_stream(stream)
    np.testing.assert_array_equal(rig.slab.array, expected)
    rig.cuda.checker.assert_no_races()


def test_a_piece_too_many_goes_another_way_and_kernels_stay_in_use() -> None:
    rig = PieceRig()
    rig.fill()
    submitter = PieceSubmitter(rig.cuda, rig.kernels)
    busy = Ranges.of((rig.device + 60_000, 1))
    rig.cuda.compute(rig.streams[0], 1.0, writes=busy, effect=lambda: None, name="forward")
    for rank in range(TABLE_COUNT):
        rig.kernels.submit(rig.piece([64 * rank], 48), rig.streams[0])
    with pytest.raises(KernelsBusy):
        rig.kernels.submit(rig.piece([2048], 48), rig.streams[0])
    submitter.submit(rig.piece([2048], 48), rig.streams[0])
    assert rig.cuda.launch_count == TABLE_COUNT
    assert submitter.support.has_kernels
    rig.cuda.synchronize_stream(rig.streams[0])
    submitter.submit(rig.piece([4096], 48), rig.streams[0])
    assert rig.cuda.launch_count == TABLE_COUNT + 1
    rig.cuda.synchronize_stream(rig.streams[0])
    source = rig.cuda.device_bytes(rig.device, 48)
    for offset in (0, 2048, 4096):
        np.testing.assert_array_equal(rig.slab.array[offset : offset + 48], source)


def test_the_worst_alignment_fits_into_staging() -> None:
    """Every run alone, and its bytes on both sides of a multiple of 256."""
    rig = PieceRig(limits=PathLimits(piece_bytes_max=7 * 204, piece_runs_max=7))
    rig.fill()
    rig.kernels.submit(rig.piece([4096 * rank + 255 for rank in range(7)], 204), rig.streams[0])
    rig.cuda.synchronize_stream(rig.streams[0])
    source = rig.cuda.device_bytes(rig.device, 7 * 268).reshape(7, 268)[:, :204]
    for rank in range(7):
        start = 4096 * rank + 255
        np.testing.assert_array_equal(rig.slab.array[start : start + 204], source[rank])


@pytest.mark.parametrize(("count", "size"), [(8, 16), (1, 8192)])
def test_what_does_not_fit_goes_another_way(count: int, size: int) -> None:
    rig = PieceRig()
    with pytest.raises(KernelsBusy):
        rig.kernels.submit(rig.piece([4096 * rank for rank in range(count)], size), rig.streams[0])
    assert rig.cuda.launch_count == 0


@pytest.mark.parametrize(
    "device",
    [
        FakeDevice(can_register=False),
        FakeDevice(device_bytes=1 << 20),
        FakeDevice(device_bytes=16 << 20),
    ],
)
def test_without_room_nothing_is_kept_and_copies_go_without_kernels(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cuda = FakeCudart(device=device)
    cuda.add_twin("copy_runs", copy_runs_twin)
    free_bytes = cuda.free_bytes()
    assert find_run_kernels(cuda, 0, FakeCompiler) is None
    assert cuda.free_bytes() == free_bytes
    cuda.assert_clean()


def test_kernels_are_found_kept_and_can_be_switched_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cuda = cuda_of()
    found = find_run_kernels(cuda, 0, FakeCompiler)
    assert found is not None
    assert [file.suffix for file in (tmp_path / "kvtier" / "kernels").iterdir()] == [".cubin"]
    monkeypatch.setenv("KVTIER_KERNELS", "0")
    assert find_run_kernels(cuda, 0, FakeCompiler) is None


def test_without_a_compiler_copies_go_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler() -> FakeCompiler:
        raise CudaUnavailable("no cupy")

    monkeypatch.delenv("KVTIER_KERNELS", raising=False)
    assert find_run_kernels(cuda_of(), 0, no_compiler) is None


def test_a_refused_launch_leaves_the_piece_to_others_and_the_table_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = PieceRig()
    rig.fill()

    def refuse(launch: KernelLaunch, stream: Stream) -> None:
        raise CudaRefused("cuLaunchKernel", CudaCode.INVALID_VALUE)

    monkeypatch.setattr(rig.cuda, "launch", refuse)
    submitter = PieceSubmitter(rig.cuda, rig.kernels)
    submitter.submit(rig.piece([0, 200], 48), rig.streams[0])
    assert not submitter.support.has_kernels
    rig.cuda.synchronize_stream(rig.streams[0])
    np.testing.assert_array_equal(rig.slab.array[:48], rig.cuda.device_bytes(rig.device, 48))
    assert all(rig.cuda.is_event_done(table.is_read) for table in rig.kernels._tables)


def test_kernels_are_compiled_for_the_device_that_is_there() -> None:
    compiler = FakeCompiler()
    cuda = cuda_of()
    load_run_kernels(cuda, KernelCache(None, compiler), 0, limits=LIMITS).close()
    assert compiler.asked == ["--gpu-architecture=sm_90"]
    cuda.assert_clean()
