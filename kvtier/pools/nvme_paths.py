"""The paths of an NVMe pool: formatting and opening them, and telling that they belong together."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvtier.errors import ConfigError
from kvtier.io.alignment import aligned_buffer
from kvtier.io.driver import Access, Batch, Driver, Outcome
from kvtier.io.file import DEPTH, FileDriver
from kvtier.layout import SEGMENT_BYTES
from kvtier.pools.nvme_recovery import TableUnreadable, read_area
from kvtier.pools.superblock import (
    COPY_OFFSETS,
    ROW_COUNT_MAX,
    SUPERBLOCK_BYTES,
    Superblock,
    assert_readable,
    fitting_geometry,
    newer,
    parse_superblock,
)

PATHS_MAX = 64


def open_paths(
    paths: Sequence[Path], *, writable: bool = True, depth: int = DEPTH
) -> list[FileDriver]:
    """A driver for each path, or none: ConfigError."""
    drivers: list[FileDriver] = []
    try:
        drivers.extend(FileDriver(path, depth=depth, writable=writable) for path in paths)
    except ConfigError:
        for driver in drivers:
            driver.close()
        raise
    return drivers


def format_paths(
    paths: Sequence[Path],
    length_bytes: int | None,
    *,
    pool_id: bytes,
    generation: int,
    force: bool = False,
    segment_bytes: int = SEGMENT_BYTES,
    row_count_max: int = ROW_COUNT_MAX,
    preallocate: bool = True,
) -> list[Superblock]:
    """Make one new pool of these paths; what they held is lost. ConfigError when one is in use,
    too small, or holds something and `force` was not said; nothing was changed then.

    `length_bytes` is the size of each file; a device gives all it has (None), or that much of it.
    """
    assert 0 < len(paths) <= PATHS_MAX
    if not force:
        for path in paths:
            _assert_empty(path)
    if length_bytes is not None:
        fitting_geometry(length_bytes, path_count=len(paths), segment_bytes=segment_bytes)
    for path in paths:
        _make_room(path, length_bytes, preallocate=preallocate)
    drivers = open_paths(paths)
    try:
        room_bytes = min(driver.length_bytes for driver in drivers)
        return format_drivers(
            drivers,
            min(room_bytes, length_bytes or room_bytes),
            pool_id=pool_id,
            generation=generation,
            segment_bytes=segment_bytes,
            row_count_max=row_count_max,
        )
    finally:
        for driver in drivers:
            driver.close()


def format_drivers(
    drivers: Sequence[Driver],
    length_bytes: int,
    *,
    pool_id: bytes,
    generation: int,
    segment_bytes: int = SEGMENT_BYTES,
    row_count_max: int = ROW_COUNT_MAX,
) -> list[Superblock]:
    """Write the superblocks of a new pool. Nothing else: what is left of an older pool has another
    generation."""
    geometry = fitting_geometry(
        length_bytes,
        path_count=len(drivers),
        segment_bytes=segment_bytes,
        row_count_max=row_count_max,
    )
    written = []
    for index, driver in enumerate(drivers):
        before = read_superblock(driver)
        revision = 1 if before is None else before.revision + 1
        superblock = Superblock(pool_id, generation, geometry, index, revision=revision)
        outcome = write_superblock(driver, superblock)
        if outcome is not Outcome.DONE:
            raise ConfigError(f"{driver.name} cannot be written: {outcome.name}")
        written.append(superblock)
    return written


def sorted_paths(drivers: Sequence[Driver]) -> tuple[list[Driver], list[Superblock]]:
    """The drivers in the order of the pool's paths; ConfigError unless they are its paths."""
    found: list[tuple[Superblock, Driver]] = []
    for driver in drivers:
        superblock = read_superblock(driver)
        if superblock is None:
            raise ConfigError(
                f"{driver.name} is not a pool of kvtier: give a path that `kvtier format` has made"
            )
        assert_readable(superblock, driver.name)
        if driver.length_bytes < superblock.geometry.length_bytes:
            raise ConfigError(f"{driver.name} is shorter than its superblock says: format it")
        found.append((superblock, driver))
    first = found[0][0]
    for superblock, driver in found:
        if (superblock.pool_id, superblock.generation) != (first.pool_id, first.generation):
            raise ConfigError(f"{driver.name} and {found[0][1].name} belong to different pools")
    path_count = first.geometry.path_count
    indexes = {superblock.path_index for superblock, _ in found}
    missing = sorted(set(range(path_count)) - indexes)
    if missing or len(found) != path_count:
        numbers = ", ".join(str(index + 1) for index in missing) or "none"
        raise ConfigError(
            f"{found[0][1].name} belongs to a pool of {path_count} paths, given are {len(found)}; "
            f"missing: {numbers}"
        )
    found.sort(key=lambda one: one[0].path_index)
    return [driver for _, driver in found], [superblock for superblock, _ in found]


def read_superblock(driver: Driver) -> Superblock | None:
    """The copy that counts; None when there is none. Raises ConfigError if neither can be read."""
    copies: list[Superblock | None] = []
    failure: TableUnreadable | None = None
    for offset in COPY_OFFSETS:
        if offset + SUPERBLOCK_BYTES > driver.length_bytes:
            return None
        try:
            raw = read_area(driver, offset, SUPERBLOCK_BYTES)
        except TableUnreadable as error:
            failure = error
            continue
        copies.append(parse_superblock(raw.tobytes()))  # gil-ok: 4 KiB
    if failure is not None and not copies:
        raise ConfigError(str(failure))
    found: Superblock | None = None
    for copy in copies:
        found = newer(found, copy)
    return found


def write_superblock(driver: Driver, superblock: Superblock) -> Outcome:
    """Both copies, the second once the first is safe."""
    buffer = aligned_buffer(SUPERBLOCK_BYTES)
    np.copyto(buffer, np.frombuffer(superblock.pack(), np.uint8))
    for offset in COPY_OFFSETS:
        batch = Batch(1)
        driver.write([Access(0, offset, (buffer,))], batch)
        [outcome] = batch.wait()
        if outcome is Outcome.DONE:
            outcome = driver.sync()
        if outcome is not Outcome.DONE:
            return outcome
    return Outcome.DONE


def _assert_empty(path: Path) -> None:
    """Raise ConfigError when formatting would destroy something."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    try:
        head = os.pread(fd, COPY_OFFSETS[-1] + SUPERBLOCK_BYTES, 0)
    finally:
        os.close(fd)
    if any(parse_superblock(head[first : first + SUPERBLOCK_BYTES]) for first in COPY_OFFSETS):
        raise ConfigError(f"{path} is a pool of kvtier already; --force formats it anew")
    if any(head):
        raise ConfigError(f"{path} holds something that is not kvtier's; --force overwrites it")


def _make_room(path: Path, length_bytes: int | None, *, preallocate: bool) -> None:
    """A file gets its length, and its blocks, now: capacity must not run out later."""
    is_new = not path.exists()
    is_device = not is_new and stat.S_ISBLK(path.stat().st_mode)
    if not is_device and length_bytes is None:
        raise ConfigError(f"{path} is no device: say how large the file shall be (--bytes)")
    # O_EXCL on a device: refused while it is mounted, or part of something larger.
    flags = os.O_EXCL if is_device else os.O_CREAT
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if length_bytes is not None and not is_device:
                os.ftruncate(fd, length_bytes)
                if preallocate:
                    os.posix_fallocate(fd, 0, length_bytes)
        finally:
            os.close(fd)
    except BlockingIOError:
        raise ConfigError(f"{path} is in use by another process (flock)") from None
    except OSError as error:
        if is_new:
            with suppress(OSError):  # On a read-only file system, though there is nothing.
                path.unlink(missing_ok=True)
        raise ConfigError(f"{path}: {error.strerror}") from None
