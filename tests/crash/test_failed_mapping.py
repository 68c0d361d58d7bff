"""A mapping that the kernel refuses, beside threads that map memory of their own.

A refused MAP_FIXED may already have removed what it should replace. Whoever then unmaps the range
unmaps what another thread got there: its stack, and the process ends without a word.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from kvtier.io.memory import create_memfd
from kvtier.memory import HUGE_BYTES, Mapping

BESIDE_NEW_THREADS = """
import threading, time
from kvtier.io.memory import create_memfd
from kvtier.memory import HUGE_BYTES, Mapping

fd = create_memfd("kvtier-trial", HUGE_BYTES, hugetlb=True)
end = time.monotonic() + 1.0

def be_refused():
    while time.monotonic() < end:
        try:
            Mapping(fd, HUGE_BYTES)
        except OSError:
            pass

refused = threading.Thread(target=be_refused)
refused.start()
while time.monotonic() < end:
    threads = [threading.Thread(target=time.sleep, args=(0,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
refused.join()
"""


@pytest.fixture
def huge_pages_are_refused() -> None:
    """Skip where some are reserved, or where no file of them can be made."""
    try:
        fd = create_memfd("kvtier-trial", HUGE_BYTES, hugetlb=True)
    except OSError as error:
        pytest.skip(f"no file of huge pages can be made here: {error}")
    try:
        Mapping(fd, HUGE_BYTES).close()
    except OSError:
        return
    finally:
        os.close(fd)
    pytest.skip("huge pages are reserved here, so that none is refused")


@pytest.mark.usefixtures("huge_pages_are_refused")
def test_refused_mapping_unmaps_nothing_of_other_threads() -> None:
    ended = subprocess.run([sys.executable, "-c", BESIDE_NEW_THREADS], timeout=60)
    assert ended.returncode != -signal.SIGSEGV, "a refused mapping unmapped another thread's memory"
    assert ended.returncode == 0
