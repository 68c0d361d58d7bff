"""Sessions that come and go in one process, each with a mixed load, until the process is killed.

The seeds of all lives follow from their numbers, so that one life can read what another has stored.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.client import Client, ClientSettings
from kvtier.errors import KVTierError
from tests.support.known_blocks import spec_of
from tests.support.mixed_load import LoadPlan, MixedLoad

BLOCK_BYTES = 32 << 10
SETTINGS = ClientSettings(timeout_seconds=5.0, retry_seconds_max=0.2)
START_SECONDS_MAX = 30.0


@dataclass(frozen=True)
class ChurnPlan:
    """`numbers`: those of this process's sessions, of `session_count` in all, which began at
    `began` (monotonic seconds); a life ends after half to one and a half times `life_seconds`."""

    numbers: Sequence[int]
    session_count: int
    began: float
    salts: Sequence[str]
    life_seconds: float
    pause_seconds: float


def salt_of(number: int, life: int, salts: Sequence[str]) -> str:
    """Each life has another namespace than the last one of its session."""
    return salts[(number + life) % len(salts)]


def seed_of(number: int, life: int) -> int:
    return life * 1000 + number


class SessionChurn:
    """Says what MixedLoad says, with the salt."""

    def __init__(self, socket: Path, plan: ChurnPlan, say: Callable[..., None]) -> None:
        self._socket = socket
        self._plan = plan
        self._say = say

    def start(self) -> None:
        for number in self._plan.numbers:
            threading.Thread(target=self._run, args=(number,), daemon=True).start()

    def _run(self, number: int) -> None:
        life = 0
        while True:  # Until the process ends.
            # Numbered by the time, too: who begins after a kill is among those that live now.
            life = max(
                life + 1, int((time.monotonic() - self._plan.began) / self._plan.life_seconds)
            )
            try:
                self._live(number, life)
            except (KVTierError, TimeoutError) as error:
                self._say(event="refused", name=type(error).__name__)
                time.sleep(0.1)

    def _live(self, number: int, life: int) -> None:
        """Raises KVTierError."""
        plan, seed = self._plan, seed_of(number, life)
        salt = salt_of(number, life, plan.salts)
        with Client(self._socket, name=f"session {number}", settings=SETTINGS) as client:
            namespace = client.open_namespace(spec_of(salt, BLOCK_BYTES))
            if not client.wait_namespace(namespace, START_SECONDS_MAX):
                raise TimeoutError("the namespace was not opened")
            over = threading.Event()
            load = MixedLoad(
                client,
                namespace,
                LoadPlan(seed, plan.pause_seconds, self._others(number, life), clears=False),
                lambda **fields: self._say(**fields, salt=salt),
            )
            share = random.Random(seed).uniform(0.5, 1.5)
            timer = threading.Timer(share * plan.life_seconds, over.set)
            timer.start()
            load.run(over)
            timer.join()
        self._say(event="lived")

    def _others(self, number: int, life: int) -> list[int]:
        """Of lives in the same namespace, at about the same time."""
        salts = self._plan.salts
        here = salt_of(number, life, salts)
        numbers = range(self._plan.session_count)
        near = [(one, life + step) for one in numbers for step in (-1, 0, 1)]
        return [seed_of(*one) for one in near if salt_of(*one, salts) == here]


def begin(socket: Path, plan: dict[str, Any], say: Callable[..., None]) -> None:
    SessionChurn(socket, ChurnPlan(**plan), say).start()
