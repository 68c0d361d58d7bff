"""The ctypes binding against a libcudart of our own, built as each version of CUDA is."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvtier.cuda import libraries
from kvtier.cuda.cudart import BATCH_VARIABLE, Cudart, open_cudart
from kvtier.cuda.errors import (
    CudaBroken,
    CudaCode,
    CudaMemoryFull,
    CudaRefused,
    CudaUnavailable,
    RegistrationRefused,
)
from kvtier.cuda.runtime import Direction, KernelLaunch, SourceOrder
from tests.tidy.sources import ROOT

SOURCE = ROOT / "tests" / "support" / "fake_libcudart.c"

pytestmark = [
    pytest.mark.slow,  # The compiler takes longer than a unit test may.
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler"),
]

Build = Callable[..., str]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder = tmp_path_factory.mktemp("cudart")
    built: dict[str, str] = {}

    def build_one(*, runtime: int = 13000, driver: int = 13000, query: bool = True) -> str:
        name = f"libcudart-{runtime}-{driver}-{int(query)}.so"
        if name not in built:
            flags = [f"-DRUNTIME_VERSION={runtime}", f"-DDRIVER_VERSION={driver}"]
            flags += [f"-DHAS_DRIVER_QUERY={int(query)}", "-shared", "-fPIC", "-w"]
            subprocess.run(["gcc", *flags, str(SOURCE), "-o", str(folder / name)], check=True)
            built[name] = str(folder / name)
        return built[name]

    return build_one


def number(path: str, name: str) -> ctypes.c_int:
    return ctypes.c_int.in_dll(ctypes.CDLL(path), name)


def copy_batch(cudart: Cudart, count: int = 5) -> bool:
    """Whether the bytes have arrived."""
    source = np.arange(count * 100, dtype=np.uint8)
    target = np.zeros_like(source)
    steps = np.arange(count, dtype=np.uint64) * np.uint64(100)
    stream = cudart.create_stream(0)
    cudart.copy_batch(
        steps + np.uint64(target.ctypes.data),
        steps + np.uint64(source.ctypes.data),
        np.full(count, 100, np.uint64),
        SourceOrder.STREAM,
        stream,
    )
    return bool((target == source).all())


@pytest.mark.parametrize(
    ("runtime", "driver", "query", "form"),
    [
        (13000, 13000, True, 9),
        (12080, 12080, True, 9),
        (12090, 13000, True, 9),
        (12060, 12080, True, 9),  # The driver has what this runtime does not know.
        (13000, 13000, False, 108),
        (12080, 12090, False, 109),
    ],
)
def test_a_batch_is_called_with_the_arguments_of_its_version(
    build: Build, runtime: int, driver: int, query: bool, form: int
) -> None:
    path = build(runtime=runtime, driver=driver, query=query)
    cudart = open_cudart(path)
    assert cudart.has_batches
    assert copy_batch(cudart)
    assert number(path, "fake_last_batch").value == form
    assert number(path, "fake_last_order").value == SourceOrder.STREAM
    stream = ctypes.c_void_p.in_dll(ctypes.CDLL(path), "fake_last_stream")
    assert stream.value == 0x7FF0DEADBEEF


@pytest.mark.parametrize(
    ("runtime", "driver", "query"),
    [(12060, 12060, True), (12080, 12060, True), (12060, 12080, False)],
)
def test_without_a_form_that_is_known_there_are_no_batches(
    build: Build, runtime: int, driver: int, query: bool
) -> None:
    cudart = open_cudart(build(runtime=runtime, driver=driver, query=query))
    assert not cudart.has_batches
    with pytest.raises(CudaRefused):
        copy_batch(cudart)


def test_batches_can_be_switched_off(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BATCH_VARIABLE, "0")
    assert not open_cudart(build()).has_batches


@pytest.mark.parametrize(
    ("runtime", "driver", "what"),
    [
        (11080, 12080, "CUDA 11.8"),
        (14000, 14000, "CUDA 14.0"),
        (13000, 0, "no NVIDIA driver"),
        (13000, 12090, "upgrade the driver"),
    ],
)
def test_a_version_that_is_not_known_or_has_no_driver_is_unavailable(
    build: Build, runtime: int, driver: int, what: str
) -> None:
    with pytest.raises(CudaUnavailable, match=what):
        open_cudart(build(runtime=runtime, driver=driver))


def test_a_driver_of_the_same_major_version_will_do(build: Build) -> None:
    """CUDA promises that within one major version."""
    assert open_cudart(build(runtime=12090, driver=12020)).device_count() == 1


def test_another_library_is_told_from_libcudart() -> None:
    with pytest.raises(CudaUnavailable, match="cudaRuntimeGetVersion"):
        open_cudart("libc.so.6")


def test_an_absent_library_is_told_with_all_that_was_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    absent = tmp_path / "libcudart.so.13"
    with pytest.raises(CudaUnavailable, match=str(absent)):
        open_cudart(str(absent))
    monkeypatch.setattr(libraries, "candidates", lambda: ["libcudart-absent.so"])
    with pytest.raises(CudaUnavailable, match=libraries.CUDART_VARIABLE):
        open_cudart()


def test_the_library_that_the_process_has_loaded_is_taken_first(build: Build) -> None:
    path = build()
    ctypes.CDLL(path)
    candidates = libraries.candidates()
    assert candidates.index(path) < candidates.index("libcudart.so.13")
    assert len(candidates) == len(set(candidates))


def test_the_environment_may_name_the_library(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(libraries.CUDART_VARIABLE, build(runtime=12080, driver=12080))
    assert open_cudart().device_count() == 1


def test_importing_the_binding_loads_no_library() -> None:
    code = (
        "import kvtier.cuda.cudart; text = open('/proc/self/maps').read();"
        " assert 'libcudart' not in text and 'libcuda.so' not in text"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_every_call_of_the_protocol_arrives(build: Build) -> None:
    path = build()
    cudart = open_cudart(path)
    attributes = cudart.attributes(0)
    assert (attributes.pci_bus, attributes.numa_node) == ("0000:1B:00.0", None)
    assert attributes.compute_capability == (75, 76)
    assert attributes.can_register_host
    cudart.use_device(0)
    assert cudart.free_bytes() == 5 << 30
    assert cudart.priorities() == (0, -5)
    stream = cudart.create_stream(-5)
    event = cudart.create_event()
    assert number(path, "fake_last_stream_flags").value == 1, "the stream would follow stream 0"
    assert number(path, "fake_last_event_flags").value == 2, "timing costs"
    cudart.record_event(event, stream)
    cudart.wait_event(stream, event)
    assert cudart.is_event_done(event)
    assert cudart.elapsed_seconds(event, event) == pytest.approx(2.5e-3)
    cudart.synchronize_stream(stream)
    address = cudart.allocate_device(4096)
    host = np.full(4096, 9, np.uint8)
    cudart.register_host(host.ctypes.data, 4096)
    assert number(path, "fake_last_register_flags").value == 3
    assert cudart.device_address(host.ctypes.data) == host.ctypes.data + (1 << 45)
    cudart.copy(address, host.ctypes.data, 4096, Direction.HOST_TO_DEVICE, stream)
    np.copyto(host, 0)
    cudart.copy(host.ctypes.data, address, 4096, Direction.DEVICE_TO_HOST, stream)
    assert (host == 9).all()
    cudart.unregister_host(host.ctypes.data)
    cudart.free_device(address)
    cudart.destroy_event(event)
    cudart.destroy_stream(stream)


def test_a_kernel_is_loaded_and_gets_its_arguments(build: Build) -> None:
    cudart = open_cudart(build())
    result = np.zeros(1, np.uint64)
    function = cudart.load_function(b"cubin", "add")
    launch = KernelLaunch(function, 3, 32, [result.ctypes.data, 1 << 40])
    cudart.launch(launch, cudart.create_stream(0))
    assert int(result[0]) == (1 << 40) + 96
    with pytest.raises(CudaRefused, match="SYMBOL_ABSENT"):
        cudart.load_function(b"cubin", "subtract")


def test_without_the_driver_s_functions_kernels_are_unavailable(build: Build) -> None:
    with pytest.raises(CudaUnavailable, match="without kernels"):
        open_cudart(build(query=False)).load_function(b"cubin", "add")


def test_a_refused_call_leaves_no_error_for_others_to_find(build: Build) -> None:
    path = build()
    cudart = open_cudart(path)
    number(path, "fake_next_code").value = CudaCode.OUT_OF_MEMORY
    with pytest.raises(RegistrationRefused, match="OUT_OF_MEMORY"):
        cudart.register_host(4096, 4096)
    assert number(path, "fake_pending").value == 0
    number(path, "fake_next_code").value = CudaCode.OUT_OF_MEMORY
    with pytest.raises(CudaMemoryFull):
        cudart.allocate_device(4096)
    event, stream = cudart.create_event(), cudart.create_stream(0)
    number(path, "fake_next_code").value = CudaCode.INVALID_HANDLE
    with pytest.raises(CudaRefused):
        cudart.record_event(event, stream)
    assert cudart.take_error() == 0
    assert cudart.device_count() == 1


def test_an_event_that_is_not_ready_is_no_error(build: Build) -> None:
    path = build()
    cudart = open_cudart(path)
    event = cudart.create_event()
    number(path, "fake_next_code").value = CudaCode.NOT_READY
    assert not cudart.is_event_done(event)
    assert cudart.take_error() == 0
    assert cudart.is_event_done(event)


# An NVLink that failed, tensor memory left by a kernel, a client that the MPS server has ended.
@pytest.mark.parametrize("code", [CudaCode.ILLEGAL_ADDRESS, 220, 721, 810])
def test_a_lost_context_is_final(build: Build, code: int) -> None:
    path = build()
    cudart = open_cudart(path)
    event = cudart.create_event()
    number(path, "fake_next_code").value = code
    with pytest.raises(CudaBroken, match=f"{code}"):
        cudart.is_event_done(event)
    with pytest.raises(CudaBroken):
        cudart.create_event()
    with pytest.raises(CudaBroken):
        copy_batch(cudart)
