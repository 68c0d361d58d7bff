"""Slabs carved from a dax device: memory that is no part of the system's, such as CXL memory.

Invariants: a place of the device belongs to one slab, or to none; it is given again only when no
view of the slab before is left; the device is ours alone (flock) until nobody who has it from us
can write to it any more. For that lock lives as long as any mapping made with our file descriptor,
a client's included: a later daemon must not use memory into which an engine of ours still copies.

A file descriptor of the device opens all of it, whoever's blocks lie there. So clients get one only
where everybody who could ask for it is one tenant; else blocks are promoted into DRAM for them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvtier.clock import Clock
from kvtier.errors import ConfigError, Forbidden
from kvtier.io.dax import DaxDevice
from kvtier.memory import Mapping
from kvtier.pools.dax_superblock import SUPERBLOCK_BYTES, DaxSuperblock, parse_dax_superblock
from kvtier.pools.slabs import (
    POPULATE_STEP_BYTES,
    SLAB_BYTES_MAX,
    PageKind,
    PopulateCancelled,
    Slab,
)
from kvtier.types import SlabId

# Whatever lies at the start of somebody else's memory is looked for here: partition tables, file
# systems and the label of a namespace begin lower.
_HEAD_BYTES = 2 << 20
_LOCK_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A slab that was given back while somebody still had a view of it."""

    place: int
    mapping: Mapping


class DaxSource:
    """Implements `SlabSource` on one device."""

    def __init__(
        self,
        device: DaxDevice,
        *,
        slab_bytes: int,
        generation: int,
        is_single_tenant: bool = False,
        wait_seconds: float = 0.0,
        force: bool = False,
    ) -> None:
        """Take the device, or wait so long for those that it was lent to; ConfigError when it is
        still in use, holds somebody else's bytes and `force` was not said, or is too small. Then it
        was not changed."""
        _assert_fitting(device, slab_bytes)
        self._device = device
        self._slab_bytes = slab_bytes
        self._is_single_tenant = is_single_tenant
        self._fd = _open_locked(device, wait_seconds)
        superblock = DaxSuperblock(generation, device.size_bytes, device.align_bytes, slab_bytes)
        try:
            _take(self._fd, device, superblock, force=force)
        except BaseException:
            os.close(self._fd)
            raise
        self._lock = threading.Lock()  # Guards the rest.
        self._free = list(range(self.slab_count_max))
        self._places: dict[SlabId, int] = {}
        self._leaving: list[_Leaving] = []

    @property
    def name(self) -> str:
        return str(self._device.path)

    @property
    def slab_count_max(self) -> int:
        return _slab_count(self._device, self._slab_bytes)

    def room_bytes(self) -> None:
        """Not told: a device that is full refuses, which harms nobody."""

    def free_bytes(self) -> int:
        """What slabs could be made of now."""
        with self._lock:
            self._reap()
            return len(self._free) * self._slab_bytes

    def populate(
        self,
        slab_id: SlabId,
        slab_bytes: int,
        *,
        clock: Clock,
        is_cancelled: Callable[[], bool],
    ) -> Slab:
        """Map a free place and fill it with zeros, so that no tenant finds another's bytes."""
        assert slab_bytes == self._slab_bytes, "slabs of one device have one size"
        started = clock.now()
        with self._lock:
            self._reap()
            if not self._free:
                raise OSError(errno.ENOSPC, f"{self.name} has no place for another slab")
            place = self._free.pop(0)
            try:
                mapping = Mapping(self._fd, slab_bytes, self._offset(place))
            except BaseException:
                self._free.insert(0, place)
                raise
            self._places[slab_id] = place
        try:
            _zero(mapping, is_cancelled)
            # A number of its own, so that every slab ends alike; the lock is shared.
            fd = os.dup(self._fd)
        except BaseException:
            self._leave(slab_id, mapping)
            raise
        return Slab(
            id=slab_id,
            fd=fd,
            mapping=mapping,
            page_kind=PageKind.DEVICE,
            huge_bytes=slab_bytes,
            populate_seconds=clock.now() - started,
        )

    def adopt(self, slab: Slab) -> None:
        raise AssertionError("slabs of a device are not left with anybody")

    def end(self, slab: Slab) -> None:
        os.close(slab.fd)
        self._leave(slab.id, slab.mapping)

    def offset_of(self, slab: Slab) -> int:
        """Where on the device the slab lies; who maps it needs that."""
        with self._lock:
            return self._offset(self._places[slab.id])

    def open_for_client(self) -> int:
        """A file descriptor to pass on; the caller closes its own. Raises Forbidden.

        It shares our lock: opened anew it would leave the device free for another daemon as soon
        as we are gone, with the client's copies still under way.
        """
        if not self._is_single_tenant:
            raise Forbidden(
                f"{self.name} holds the blocks of several tenants: whoever has it open reads all"
            )
        return os.dup(self._fd)

    def close(self) -> None:
        """Let the device go, once the slabs that are left have been unmapped as well."""
        os.close(self._fd)

    def check_invariants(self) -> list[str]:
        with self._lock:
            leaving = [one.place for one in self._leaving]
            places = sorted([*self._free, *self._places.values(), *leaving])
        if places == list(range(self.slab_count_max)):
            return []
        return [f"a place of {self.name} was lost, or given twice"]

    def _offset(self, place: int) -> int:
        return _head_bytes(self._device) + place * self._slab_bytes

    def _leave(self, slab_id: SlabId, mapping: Mapping) -> None:
        with self._lock:
            self._leaving.append(_Leaving(self._places.pop(slab_id), mapping))
            self._reap()

    def _reap(self) -> None:
        """Places whose last view has gone are free again. Called with the lock held."""
        waiting: list[_Leaving] = []
        for one in self._leaving:
            if one.mapping.close():
                self._free.append(one.place)
            else:
                waiting.append(one)
        self._leaving = waiting


def format_device(device: DaxDevice, *, generation: int, force: bool = False) -> None:
    """Make the device kvtier's; ConfigError as from `DaxSource`. What it held is lost."""
    fd = _open_locked(device)
    try:
        superblock = DaxSuperblock(generation, device.size_bytes, device.align_bytes, 0)
        _take(fd, device, superblock, force=force)
    finally:
        os.close(fd)


def _assert_fitting(device: DaxDevice, slab_bytes: int) -> None:
    if slab_bytes <= 0 or slab_bytes > SLAB_BYTES_MAX or slab_bytes % device.align_bytes:
        raise ConfigError(
            f"a slab of {slab_bytes} bytes on {device.path}: it must be a multiple of the device's "
            f"alignment, {device.align_bytes} bytes, and at most {SLAB_BYTES_MAX}"
        )
    if _slab_count(device, slab_bytes) < 1:
        raise ConfigError(
            f"{device.path} has {device.size_bytes} bytes: too few for a slab of {slab_bytes}"
        )


def _slab_count(device: DaxDevice, slab_bytes: int) -> int:
    return max(0, device.size_bytes - _head_bytes(device)) // slab_bytes


def _head_bytes(device: DaxDevice) -> int:
    """What the superblock takes: as little as can be mapped."""
    return -(-_HEAD_BYTES // device.align_bytes) * device.align_bytes


def _open_locked(device: DaxDevice, wait_seconds: float = 0.0) -> int:
    try:
        fd = os.open(device.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{device.path}: {error.strerror}") from None
    for _ in range(1 + round(wait_seconds / _LOCK_POLL_SECONDS)):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            threading.Event().wait(min(wait_seconds, _LOCK_POLL_SECONDS))
        else:
            return fd
    os.close(fd)
    raise ConfigError(f"{device.path} is in use by another process (flock)")


def _take(fd: int, device: DaxDevice, superblock: DaxSuperblock, *, force: bool) -> None:
    """Look at the start of the device, and write our superblock there."""
    try:
        mapping = Mapping(fd, _head_bytes(device))
    except OSError as error:
        raise ConfigError(f"{device.path} cannot be mapped: {error.strerror}") from None
    try:
        head = mapping.array
        found = parse_dax_superblock(head[:SUPERBLOCK_BYTES].tobytes())  # gil-ok: 4 KiB
        is_empty = not head[:_HEAD_BYTES].any()
        if found is None and not is_empty and not force:
            raise ConfigError(
                f"{device.path} holds something that is not kvtier's; "
                "`kvtier format --force` overwrites it"
            )
        np.copyto(head[:SUPERBLOCK_BYTES], np.frombuffer(superblock.pack(), np.uint8))
        del head
    finally:
        mapping.close()


def _zero(mapping: Mapping, is_cancelled: Callable[[], bool]) -> None:
    array = mapping.array
    for first in range(0, mapping.length_bytes, POPULATE_STEP_BYTES):
        if is_cancelled():
            raise PopulateCancelled
        np.copyto(array[first : first + POPULATE_STEP_BYTES], np.uint8(0))
