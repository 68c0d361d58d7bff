"""`kvtier serve` on a disk that misbehaves when a test says so.

Used as a program. The file $KVTIER_TEST_FAULT holds one word, read before each call: `eio`, `gone`
and `no_space` make it fail, `stall` makes it hang until the word is gone, `bug` raises what no
driver may raise.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kvtier.io.driver import Access, Driver, Outcome
from kvtier.io.file import FileDriver, outcome_of
from kvtier.memory import Bytes
from kvtier.server import app, nvme
from tests.support.serving import serve_daemon

VARIABLE = "KVTIER_TEST_FAULT"
PROGRAM = [sys.executable, "-m", "tests.support.faulty_daemon"]
_ERRORS = {"eio": errno.EIO, "gone": errno.ENODEV, "no_space": errno.ENOSPC}


class FaultyFile(FileDriver):
    """Fails in the place of the kernel."""

    def _call(
        self, function: Callable[[int, list[Bytes], int], int], accesses: Sequence[Access]
    ) -> int | Outcome:
        while (word := _word()) == "stall":
            time.sleep(0.01)
        if word == "bug":
            raise ZeroDivisionError("a mistake of ours, planted")
        if word:
            return outcome_of(OSError(_ERRORS[word], "planted"))
        return super()._call(function, accesses)


def _word() -> str:
    try:
        return Path(os.environ[VARIABLE]).read_text().strip()
    except FileNotFoundError:
        return ""


def open_faulty(path: Path, depth: int) -> Driver:
    return FaultyFile(path, depth=depth)


def main() -> int:
    app.serve = partial(app.serve, open_driver=open_faulty)  # type: ignore[assignment]
    nvme.END_SECONDS = 0.5  # Tests of a disk that hangs need not take as long as an end may.
    return serve_daemon()


if __name__ == "__main__":
    sys.exit(main())
