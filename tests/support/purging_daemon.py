"""`kvtier serve` that kills itself in the middle of a purge, where a test says so.

Used as a program. The file $KVTIER_TEST_KILL has one line for each life that is to end so: `begin
STEP`, as that step begins, or `add STEP`, when it has erased something for the first time; `term
STEP` is then an orderly end. The line is taken out before the end. Clears among
the nodes take less time than they should.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from kvtier.pools.remote.epochs import EpochTimes
from kvtier.server.purge_tiers import Progress
from kvtier.server.remote_tier import RemoteKeeper
from tests.support.serving import serve_daemon

VARIABLE = "KVTIER_TEST_KILL"
PROGRAM = [sys.executable, "-m", "tests.support.purging_daemon"]
QUICK = EpochTimes(view_seconds=0.9, refresh_seconds=0.2, call_seconds=0.4)
_begin, _add = Progress.begin, Progress.add


def die_if_due(point: str) -> None:
    path = Path(os.environ[VARIABLE])
    points = path.read_text().splitlines()
    if points and points[0] == point:
        path.write_text("\n".join(points[1:]))
        os.kill(os.getpid(), signal.SIGTERM if point.startswith("term") else signal.SIGKILL)


def begin(progress: Progress, step: str) -> None:
    _begin(progress, step)
    die_if_due(f"begin {step}")


def add(progress: Progress, *arguments: Any, **named: Any) -> None:
    _add(progress, *arguments, **named)
    for kind in ("add", "term"):
        die_if_due(f"{kind} {progress.step}")


def main() -> int:
    Progress.begin, Progress.add = begin, add  # type: ignore[method-assign]
    defaults = RemoteKeeper.__init__.__kwdefaults__
    assert defaults is not None, "the keeper has times of its own"
    defaults["times"] = QUICK
    return serve_daemon()


if __name__ == "__main__":
    sys.exit(main())
