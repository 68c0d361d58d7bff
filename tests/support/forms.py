"""Short and full forms of long tests, and the seeds of simulations.

`make test` runs the short form on fixed seeds; `make torture` sets KVTIER_TORTURE=1 and runs what
is marked `full_form` or `torture`; `make sim` sets KVTIER_SIM_SEED.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

TORTURE_VARIABLE = "KVTIER_TORTURE"
FINDINGS_VARIABLE = "KVTIER_TORTURE_FINDINGS"
SIM_SEED_VARIABLE = "KVTIER_SIM_SEED"


def is_torture() -> bool:
    return os.environ.get(TORTURE_VARIABLE) == "1"


def rounds(*, short: int, full: int) -> int:
    """How many rounds to run now; the test carries the mark `full_form`."""
    return full if is_torture() else short


def state_finding(text: str) -> None:
    """What a long test counted: shown by `pytest -s`, and in the report of `make torture`."""
    sys.stdout.write(f"\n{text}\n")
    if path := os.environ.get(FINDINGS_VARIABLE):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{text}\n")


def sim_seeds(fixed: Sequence[int]) -> list[int]:
    """The seed that `make sim SEED=n` asks for, else the fixed ones."""
    if seed := os.environ.get(SIM_SEED_VARIABLE):
        return [int(seed)]
    return list(fixed)
