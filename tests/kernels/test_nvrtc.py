"""The sources compile as they will on a user's machine: by cupy's NVRTC, without a GPU."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from kvtier.cuda.errors import CudaUnavailable
from kvtier.cuda.kernel_cache import KernelCache, NvrtcCompiler
from tests.support.kernel_compiler import ARCHITECTURES, SOURCES

pytest.importorskip("cupy", reason="no cupy to compile the kernels with")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", SOURCES)
def test_nvrtc_makes_a_whole_cubin(tmp_path: Path, source: str, architecture: str) -> None:
    cache = KernelCache(tmp_path / "kernels", NvrtcCompiler())
    capability = (int(architecture[:-1]), int(architecture[-1]))
    image = cache.cubin(source, capability)
    assert image[:4] == b"\x7fELF"
    assert len(image) >= end_of_headers(image)
    assert KernelCache(tmp_path / "kernels", NvrtcCompiler()).cubin(source, capability) == image


def end_of_headers(image: bytes) -> int:
    """Of the program headers, the last thing in a cubin; cupy once cut off a byte there."""
    [first] = struct.unpack_from("<Q", image, 0x20)
    size, count = struct.unpack_from("<HH", image, 0x36)
    return int(first + size * count)


def test_an_unknown_gpu_is_refused_with_the_compilers_words(tmp_path: Path) -> None:
    with pytest.raises(CudaUnavailable, match="architecture"):
        KernelCache(tmp_path / "kernels", NvrtcCompiler()).cubin("kv_copy", (1, 0))
