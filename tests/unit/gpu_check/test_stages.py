"""Each stage of the GPU check on a fake GPU, small: what it measures, what it would find."""

from __future__ import annotations

import pytest

from benchmarks.gpu import copy_sweep, registration_costs
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.kv import Shape
from kvtier.cuda.copy_paths import CopyPath
from kvtier.cuda.fake import FakeCudart, FakeDevice
from kvtier.cuda.kernel_copies import RunKernels
from tests.support.twin_kernels import TwinKernels, copy_runs_twin
from tests.unit.gpu_check.small_rig import rig_of

pytestmark = pytest.mark.slow

MIB = 1 << 20
SMALL = Shape(layers=2, heads=2, width=32, block_tokens=8, block_count=6)

COPIES = copy_sweep.Sizes(
    run_bytes=(4 << 10, 64 << 10),
    piece_bytes_max=MIB // 4,
    piece_runs_max=64,
    best_bytes=MIB,
    repeat_count=2,
    shape=SMALL,
)


def test_registration_costs_what_the_fake_says() -> None:
    cuda, findings = FakeCudart(), Findings()
    sizes = registration_costs.Sizes(slab_bytes=4 * MIB, slab_count=2)
    registration_costs.measure(rig_of(cuda), findings, sizes)
    small = findings.figures["registration"][0]
    assert small["pages"] == "4 KiB"
    assert small["seconds_a_gib"] == pytest.approx((1 << 30) / 10e9, rel=0.01)
    assert small["second_mapping_seconds_a_gib"] == pytest.approx((1 << 30) / 10e9, rel=0.01)
    assert not findings.wrong
    cuda.assert_clean()


def test_no_time_left_is_said_and_not_measured() -> None:
    cuda, findings = FakeCudart(), Findings()
    sizes = registration_costs.Sizes(slab_bytes=2 * MIB, slab_count=1)
    registration_costs.measure(rig_of(cuda, seconds=1.0), findings, sizes)
    assert findings.is_cut_short
    assert "registration" not in findings.figures


@pytest.mark.parametrize("device", [FakeDevice(), FakeDevice(is_aliased=True)])
def test_the_sweep_goes_over_every_path_and_direction(device: FakeDevice) -> None:
    cuda, findings = FakeCudart(device=device), Findings()
    copy_sweep.measure(rig_of(cuda), findings, COPIES)
    rows = [row for row in findings.figures["runs"] if row["run_bytes"] == 4 << 10]
    assert [(row["path"], row["direction"]) for row in rows] == [
        ("plain", "up"),
        ("batch", "up"),
        ("kernel", "up"),
        ("plain", "down"),
        ("batch", "down"),
        ("staged", "down"),
        ("batch + batch", "up + down"),
        ("kernel + staged", "up + down"),
    ]
    assert 40 < findings.figures["best_plain_up_gigabytes_per_second"] < 54
    assert not findings.wrong
    cuda.assert_clean()
    assert cuda.memory.device.allocation_count == 0


def test_the_sweep_runs_with_the_kernels_that_a_gpu_gets() -> None:
    cuda, findings = FakeCudart(), Findings()
    cuda.add_twin("copy_runs", copy_runs_twin)
    rig, kernels = rig_of(cuda), RunKernels(cuda, b"cubin")
    rig.make_kernels = lambda: kernels
    copy_sweep.measure(rig, findings, COPIES)
    assert {row["path"] for row in findings.figures["runs"]} >= {"kernel", "staged"}
    assert not findings.wrong
    kernels.close()
    cuda.assert_clean()


def test_the_sweep_sees_the_cliff_of_short_runs_upwards() -> None:
    findings = Findings()
    copy_sweep.measure(rig_of(FakeCudart()), findings, COPIES)
    share = {
        (row["run_bytes"], row["path"]): row["of_best"]
        for row in findings.figures["runs"]
        if row["direction"] == "up"
    }
    assert share[4 << 10, "batch"] < 0.1
    assert share[4 << 10, "kernel"] > 2 * share[4 << 10, "batch"]
    assert share[64 << 10, "batch"] > 0.9


def test_without_batches_and_kernels_plain_copies_are_left_and_said() -> None:
    cuda, findings = FakeCudart(device=FakeDevice(has_batches=False)), Findings()
    copy_sweep.measure(rig_of(cuda, with_kernels=False), findings, COPIES)
    assert {row["path"] for row in findings.figures["runs"]} == {"plain"}
    assert findings.wrong == ["kernels are there"]


def test_a_path_that_moves_wrong_bytes_fails_the_sweep() -> None:
    cuda, findings = FakeCudart(), Findings()
    rig, kernels = rig_of(cuda), TwinKernels(cuda)
    kernels.corrupt.add(CopyPath.STAGED)
    rig.make_kernels = lambda: kernels
    copy_sweep.measure(rig, findings, COPIES)
    assert findings.wrong == ["every path moves the right bytes ['staged DEVICE_TO_HOST']"]


def test_blocks_too_small_for_the_link_miss_the_target() -> None:
    findings = Findings()
    copy_sweep.measure(rig_of(FakeCudart()), findings, COPIES)
    assert [text.partition(":")[0] for text in findings.missed] == [
        "offload of whole blocks",
        "onboard of whole blocks",
        "both of whole blocks",
    ]
    assert {row["order"] for row in findings.figures["blocks"]} == {"BL2NHC", "2BNHC"}
