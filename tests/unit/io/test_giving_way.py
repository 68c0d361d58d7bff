"""A thread's priority is lower for a while, and then what it was."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from kvtier.io.giving_way import GivingWay

_WITHOUT_PERMISSION = """
import os, resource, threading
from kvtier.io.giving_way import GivingWay
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)
resource.setrlimit(resource.RLIMIT_NICE, (0, 0))
way, before = GivingWay(), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
with way.given():
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
assert not way.is_possible
print("unchanged")
"""


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


needs_permission = pytest.mark.skipif(
    not GivingWay().is_possible, reason="this process may not raise a priority again"
)


@needs_permission
def test_a_thread_gives_way_for_a_while_and_no_other_one_with_it() -> None:
    way, before, seen = GivingWay(), priority(), list[int]()

    def work() -> None:
        with way.given():
            seen.append(priority())
        seen.append(priority())
        try:
            with way.given():
                raise ValueError
        except ValueError:
            seen.append(priority())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen[0] > before
    assert seen[1:] == [before, before]
    assert priority() == before


def test_a_thread_that_could_not_have_its_priority_back_keeps_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_PERMISSION],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.strip() == "unchanged", done.stderr
