"""The paths of the NVMe pool at start: made if that was asked for, and opened, or refused.

All of it may block. What is wrong is a ConfigError of one line, and then nothing was changed but
for files that were made.
"""

from __future__ import annotations

import logging
import secrets
import stat
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from kvtier.config import NvmeConfig
from kvtier.config_values import AUTO
from kvtier.errors import ConfigError
from kvtier.io.driver import Driver
from kvtier.io.file import FileDriver
from kvtier.pools.key_file import sealer_from
from kvtier.pools.nvme import MakeSealer
from kvtier.pools.nvme_paths import format_paths, sorted_paths

log = logging.getLogger(__name__)

OpenDriver = Callable[[Path, int], Driver]
"""(path, depth) -> its driver; raises ConfigError."""


@dataclass(frozen=True, slots=True)
class NvmePaths:
    """Open, but nothing was written to them yet."""

    drivers: tuple[Driver, ...]
    capacity_bytes: int  # Of all segments.
    make_sealer: MakeSealer | None = None  # Blocks are encrypted.

    @property
    def queued_count(self) -> int:
        """Reads and writes that wait for a thread."""
        return sum(one.queued_count for one in self.drivers if isinstance(one, FileDriver))

    def time_calls(self, time_call: Callable[[str], AbstractContextManager[object]]) -> None:
        """Enter this around every call of the kernel that reads or writes a path."""
        for driver in self.drivers:
            if isinstance(driver, FileDriver):
                driver.time_call = time_call

    def close(self) -> None:
        for driver in self.drivers:
            driver.close()


def open_file(path: Path, depth: int) -> Driver:
    driver = FileDriver(path, depth=depth)
    if driver.buffered_reason:
        log.warning(
            "nvme path is buffered: slower, and its pages take memory",
            extra={"path": path, "reason": driver.buffered_reason},
        )
    return driver


def open_paths(config: NvmeConfig, open_driver: OpenDriver = open_file) -> NvmePaths:
    """Raises ConfigError."""
    make_sealer = _sealer_of(config)
    paths = [Path(path).expanduser() for path in config.paths]
    if config.bytes != AUTO:
        _make_absent(paths, config.bytes)
    drivers: list[Driver] = []
    try:
        drivers.extend(_open_one(path, config.depth, open_driver) for path in paths)
        ordered, superblocks = sorted_paths(drivers)
    except ConfigError as error:
        for driver in drivers:
            driver.close()
        raise ConfigError(f"nvme.paths: {error}") from None
    geometry = superblocks[0].geometry
    segment_count = geometry.segment_count * geometry.path_count
    return NvmePaths(tuple(ordered), segment_count * geometry.segment_bytes, make_sealer)


def _sealer_of(config: NvmeConfig) -> MakeSealer | None:
    if not config.key_file:
        return None
    try:
        return sealer_from(Path(config.key_file).expanduser())
    except ConfigError as error:
        raise ConfigError(f"nvme.key_file: {error}") from None


def _open_one(path: Path, depth: int, open_driver: OpenDriver) -> Driver:
    try:
        return open_driver(path, depth)
    except ConfigError:
        if path.exists():
            raise
        raise ConfigError(
            f"{path} does not exist: make the pool with `kvtier format`, or set nvme.bytes"
        ) from None


def _make_absent(paths: Sequence[Path], length_bytes: int) -> None:
    """Make and format the files, unless they are there; all of them or none."""
    absent = [path for path in paths if _is_absent(path)]
    if not absent:
        return
    if len(absent) < len(paths):
        there = next(path for path in paths if path not in absent)
        raise ConfigError(
            f"nvme.paths: {absent[0]} does not exist and {there} does: one pool is made of all its "
            "paths, with `kvtier format`"
        )
    for path in paths:
        if not path.parent.is_dir():
            raise ConfigError(f"nvme.paths: the folder {path.parent} does not exist: make it")
    log.info("making nvme pool", extra={"paths": len(paths), "bytes": length_bytes})
    format_paths(
        paths,
        length_bytes,
        pool_id=secrets.token_bytes(16),
        generation=secrets.randbits(64),
    )


def _is_absent(path: Path) -> bool:
    """Not there, or a file without a single byte."""
    try:
        found = path.stat()
    except OSError:
        return True  # Whatever is wrong with it is told when it is to be made.
    return stat.S_ISREG(found.st_mode) and found.st_size == 0
