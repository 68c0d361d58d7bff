"""`python -m kvtier.cli.tied PID ...`: `kvtier ...` that ends when process PID does.

A benchmark or demo that is killed cannot remove the daemon it has started; the kernel can.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from kvtier.cli.main import main as kvtier_main

_PR_SET_PDEATHSIG = 1
# The starter died before it could be watched: nobody is left to serve.
EXIT_ALONE = 4


def main() -> int:
    starter, words = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM)) != 0:
        sys.stderr.write("kvtier: this kernel does not tell of a parent's death\n")
    if os.getppid() != starter:
        return EXIT_ALONE
    return kvtier_main(words)


if __name__ == "__main__":
    sys.exit(main())
