"""Fixtures that every kind of test may use."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clock import ManualClock

# A shell starts background jobs with SIGINT ignored, and that is inherited: the processes of tests
# that press ctrl-C would never notice. A handler here is the default in whoever is started.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def manual_clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A private directory with a path short enough for Unix sockets; tmp_path is too long."""
    path = Path(tempfile.mkdtemp(prefix="kvt-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
