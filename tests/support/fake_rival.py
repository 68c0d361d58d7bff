"""A driver that measures nothing: `fake_rival.py MODE SCALE` answers with figures known before.

Modes: well; silent (an onboard never ends); dying (exits when asked to offload); refusing (says why
it has no disk); wrong (one block of each onboard).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.rivals.drivers.serve import BLOCK_COUNT, Figures, Unmeasurable, serve


class FakeRival:
    def __init__(self, mode: str, scale: float) -> None:
        self._mode = mode
        self._scale = scale
        self._asked_count = 0
        self._children: list[subprocess.Popen[bytes]] = []

    def do_about(self, _: Figures) -> Figures:
        os.write(1, b"what a library prints\n")
        return {"versions": {"python": "3"}}

    def do_start(self, order: Figures) -> Figures:
        if order["disk"] and self._mode == "refusing":
            raise Unmeasurable("it has no disk")
        self._children.append(subprocess.Popen(["sleep", "60"]))
        return {"start_s": self._scale, "pids": [os.getpid(), self._children[-1].pid]}

    def do_prepare_match(self, order: Figures) -> Figures:
        return {"asked_count": order["tokens"] // 16}

    def do_match(self, _: Figures) -> Figures:
        self._asked_count += 1
        milliseconds = self._scale * self._asked_count
        return {"match_ms": milliseconds, "hold_ms": 2 * milliseconds, "hit_count": 4}

    def do_offload(self, _: Figures) -> Figures:
        if self._mode == "dying":
            sys.stderr.write("no room left\n")
            sys.stderr.flush()
            os._exit(3)
        return {"offload_ms": 10 * self._scale}

    def do_onboard(self, _: Figures) -> Figures:
        if self._mode == "silent":
            time.sleep(60)
        wrong = int(self._mode == "wrong")
        figures = {"onboard_ms": 20 * self._scale, "hold_ms": 1.0}
        return {**figures, "hit_count": BLOCK_COUNT, "wrong_count": wrong}

    def do_forget(self, _: Figures) -> Figures:
        return {}

    def do_write_down(self, _: Figures) -> Figures:
        return {"write_ms": 30 * self._scale}

    def do_empty_memory(self, _: Figures) -> Figures:
        return {}

    def do_restart(self, _: Figures) -> Figures:
        return {"answer_s": self._scale, "hit_count": BLOCK_COUNT, "asked_count": BLOCK_COUNT}

    def close(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()


if __name__ == "__main__":
    sys.exit(serve(FakeRival(sys.argv[1], float(sys.argv[2]))))
