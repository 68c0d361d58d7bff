"""Another user than the one the tests run as; root alone can be somebody else."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

OTHER_UID = 54_321
_SETRESUID = {"x86_64": 117, "aarch64": 147}[platform.machine()]
_SAME = -1

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@contextmanager
def as_user(uid: int) -> Iterator[None]:
    """This thread alone is that user meanwhile: what it connects, the kernel says, he has."""
    own = os.geteuid()
    _set_user(uid)
    try:
        yield
    finally:
        _set_user(own)


def _set_user(uid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    # Not libc's own function, which changes all threads.
    if libc.syscall(_SETRESUID, _SAME, uid, _SAME) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
