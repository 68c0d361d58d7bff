"""Fixtures that every kind of test may use."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clock import ManualClock


@pytest.fixture
def manual_clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A private directory with a path short enough for Unix sockets; tmp_path is too long."""
    path = Path(tempfile.mkdtemp(prefix="kvt-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
