"""Kernels are compiled once for what they are made from; what is kept is used whole or not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from kvtier.cuda import kernel_cache
from kvtier.cuda.errors import CudaUnavailable
from kvtier.cuda.kernel_cache import KernelCache, sources
from tests.support.kernel_twin import KERNELS


class FakeCompiler:
    """Answers with what it was asked, numbered."""

    def __init__(self, version: str = "fake 1") -> None:
        self.version = version
        self.asked: list[tuple[str, Mapping[str, str], tuple[str, ...]]] = []

    def compile(self, source: str, headers: Mapping[str, str], options: tuple[str, ...]) -> bytes:
        self.asked.append((source, headers, options))
        return f"{self.version} {options[-1]} {len(source)}".encode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kernels"


def test_a_kernel_is_compiled_once(folder: Path) -> None:
    compiler = FakeCompiler()
    first = KernelCache(folder, compiler).cubin("kv_copy", (9, 0))
    second = KernelCache(folder, compiler).cubin("kv_copy", (9, 0))
    assert first == second
    assert len(compiler.asked) == 1


def test_the_compiler_gets_the_source_its_headers_and_the_gpu(folder: Path) -> None:
    compiler = FakeCompiler()
    KernelCache(folder, compiler).cubin("kv_copy", (10, 0))
    [(source, headers, options)] = compiler.asked
    assert source == (KERNELS / "kv_copy.cu").read_text(encoding="utf-8")
    assert set(headers) == {path.name for path in KERNELS.glob("*.cuh")}
    assert options[-1] == "--gpu-architecture=sm_100"


def test_another_gpu_source_or_compiler_is_another_cubin(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = FakeCompiler()
    KernelCache(folder, compiler).cubin("kv_copy", (9, 0))
    KernelCache(folder, compiler).cubin("kv_copy", (8, 0))
    KernelCache(folder, compiler).cubin("paged_attention", (9, 0))
    newer = FakeCompiler("fake 2")
    assert KernelCache(folder, newer).cubin("kv_copy", (9, 0)).startswith(b"fake 2")
    monkeypatch.setattr(kernel_cache, "source_hash", lambda: "changed")
    KernelCache(folder, compiler).cubin("kv_copy", (9, 0))
    assert len(compiler.asked) == 4


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_torn_file_is_compiled_again(folder: Path, damage: bytes | None) -> None:
    compiler = FakeCompiler()
    good = KernelCache(folder, compiler).cubin("kv_copy", (9, 0))
    [kept] = folder.iterdir()
    kept.write_bytes(kept.read_bytes()[:-1] if damage is None else damage)
    assert KernelCache(folder, compiler).cubin("kv_copy", (9, 0)) == good
    assert len(compiler.asked) == 2
    KernelCache(folder, compiler).cubin("kv_copy", (9, 0))
    assert len(compiler.asked) == 2


def test_a_folder_that_others_can_write_is_not_used(folder: Path) -> None:
    compiler = FakeCompiler()
    folder.mkdir()
    folder.chmod(0o777)
    for _ in range(2):
        KernelCache(folder, compiler).cubin("kv_copy", (9, 0))
    assert len(compiler.asked) == 2
    assert not list(folder.iterdir())


@pytest.mark.parametrize("folder_name", [None, "file/kernels"])
def test_without_a_folder_kernels_are_compiled_all_the_same(
    tmp_path: Path, folder_name: str | None
) -> None:
    (tmp_path / "file").write_bytes(b"")
    folder = tmp_path / folder_name if folder_name else None
    assert KernelCache(folder, FakeCompiler()).cubin("kv_copy", (9, 0))


def test_a_failure_to_compile_keeps_nothing(folder: Path) -> None:
    class Broken(FakeCompiler):
        def compile(
            self, source: str, headers: Mapping[str, str], options: tuple[str, ...]
        ) -> bytes:
            raise CudaUnavailable("no such GPU")

    with pytest.raises(CudaUnavailable):
        KernelCache(folder, Broken()).cubin("kv_copy", (99, 0))
    assert not list(folder.iterdir())


def test_sources_include_nothing_but_each_other() -> None:
    """NVRTC has no headers of the host, and needs none."""
    for name, text in sources().items():
        included = [
            line.split()[1].strip('"') for line in text.splitlines() if line.startswith("#include")
        ]
        assert set(included) <= set(sources()), name


def test_without_cupy_the_error_names_what_to_install() -> None:
    pytest.importorskip("numpy")
    try:
        import cupy  # noqa: F401
    except ImportError:
        with pytest.raises(CudaUnavailable, match=r"kvtier\[cuda13\]"):
            kernel_cache.NvrtcCompiler()
    else:
        pytest.skip("cupy is here")
