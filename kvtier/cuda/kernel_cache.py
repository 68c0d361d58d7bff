"""Kernels as cubins: compiled once for a GPU on this machine, kept on disk, loaded by any runtime.

The sources come with the package and include nothing but each other; NVRTC, which cupy brings,
compiles them without a compiler on the user's machine. A cubin is kept under a hash of all that it
was made from, so a changed source, another GPU or another NVRTC never meets an old one.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from kvtier.cuda.errors import CudaUnavailable

log = logging.getLogger(__name__)

SOURCE_FOLDER = Path(__file__).parent / "kernel_sources"

_OPTIONS = ("--std=c++17",)
_DIGEST_BYTES = hashlib.sha256().digest_size


class KernelCompiler(Protocol):
    @property
    def version(self) -> str:
        """Other versions may make other cubins."""
        ...

    def compile(self, source: str, headers: Mapping[str, str], options: tuple[str, ...]) -> bytes:
        """A cubin. Raises CudaUnavailable with the compiler's words."""
        ...


class KernelCache:
    """Cubins in a folder of this user's own; without one, each process compiles for itself.

    A cubin is code that runs in the engine: a folder that others can write is not used.
    """

    def __init__(self, folder: Path | None, compiler: KernelCompiler) -> None:
        self._folder = folder
        self._compiler = compiler

    def cubin(self, name: str, compute_capability: tuple[int, int]) -> bytes:
        """Of `name`.cu. Raises CudaUnavailable: go on without kernels."""
        major, minor = compute_capability
        options = (*_OPTIONS, f"--gpu-architecture=sm_{major}{minor}")
        place = self._place(name, options)
        image = _read(place) if place else None
        if image is None:
            headers = {file: text for file, text in sources().items() if file.endswith(".cuh")}
            image = self._compiler.compile(sources()[f"{name}.cu"], headers, options)
            if place:
                _write(place, image)
        return image

    def _place(self, name: str, options: tuple[str, ...]) -> Path | None:
        if self._folder is None or not _is_private(self._folder):
            return None
        made_from = hashlib.sha256()
        for part in (source_hash(), self._compiler.version, name, *options):
            made_from.update(f"{len(part)}:{part}".encode())
        return self._folder / f"{name}-{made_from.hexdigest()[:32]}.cubin"


class NvrtcCompiler:
    """NVRTC through cupy, without a device or a driver. Raises CudaUnavailable without cupy."""

    def __init__(self) -> None:
        try:
            from cupy.cuda import nvrtc
        except ImportError as error:
            raise CudaUnavailable(
                f"kernels are compiled by cupy, which cannot be imported ({error}):"
                " install kvtier[cuda12] or kvtier[cuda13]"
            ) from error
        self._nvrtc: Any = nvrtc

    @property
    def version(self) -> str:
        try:
            major, minor = self._nvrtc.getVersion()
        except RuntimeError as error:  # The library is missing.
            raise CudaUnavailable(f"no NVRTC: {error}") from error
        return f"nvrtc {major}.{minor}"

    def compile(self, source: str, headers: Mapping[str, str], options: tuple[str, ...]) -> bytes:
        nvrtc = self._nvrtc
        program = nvrtc.createProgram(
            source,
            "kernels.cu",
            [text.encode() for text in headers.values()],
            [name.encode() for name in headers],
        )
        try:
            nvrtc.compileProgram(program, options)
            cubin: bytes = nvrtc.getCUBIN(program)
        except nvrtc.NVRTCError as error:
            words = nvrtc.getProgramLog(program)
            raise CudaUnavailable(f"kernels do not compile: {error}: {words}") from error
        finally:
            nvrtc.destroyProgram(program)
        # cupy takes the last byte for the end of a string and cuts it off; it is always 0, the top
        # of an alignment. One too many does no harm.
        return cubin + b"\0"


def default_folder() -> Path:
    """Of this user's cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvtier" / "kernels"


@cache
def sources() -> dict[str, str]:
    """Every kernel source by its file name."""
    files = sorted([*SOURCE_FOLDER.glob("*.cu"), *SOURCE_FOLDER.glob("*.cuh")])
    if not files:
        raise CudaUnavailable(f"the kernels' sources are missing from {SOURCE_FOLDER}")
    return {file.name: file.read_text(encoding="utf-8") for file in files}


@cache
def source_hash() -> str:
    """Of all sources: any may be included by any."""
    digest = hashlib.sha256()
    for name, text in sources().items():
        digest.update(f"{len(name)}:{name}{len(text)}:{text}".encode())
    return digest.hexdigest()


def _is_private(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        log.warning("no folder for compiled kernels", extra={"reason": str(error)})
        return False
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if found.st_uid != os.geteuid() or others_write:
        log.warning("others can write compiled kernels: not used", extra={"folder": str(folder)})
        return False
    return True


def _read(place: Path) -> bytes | None:
    """The image behind its own hash; None if it is absent or was torn."""
    try:
        data = place.read_bytes()
    except OSError:
        return None
    digest, image = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return image if hashlib.sha256(image).digest() == digest else None


def _write(place: Path, image: bytes) -> None:
    """Whole or not at all: ranks start together, and each may write the same cubin."""
    try:
        with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
            temporary = Path(file.name)
            try:
                file.write(hashlib.sha256(image).digest() + image)
                file.flush()
                temporary.replace(place)
            except OSError:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise
    except OSError as error:
        log.warning("a compiled kernel could not be kept", extra={"reason": str(error)})
