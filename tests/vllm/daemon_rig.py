"""The scheduler rig on a real daemon: its client, its control thread and its copies in threads.

Still no model: see scheduler_rig. Time is real, so a test waits for conditions, not for steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvtier.client import Client
from kvtier.clock import SystemClock
from kvtier.types import Role
from tests.support.connector_rig import SHARD_BYTES, DeviceCopier
from tests.support.engine_half import PATIENT
from tests.vllm.scheduler_rig import SchedulerRig

WAIT_SECONDS = 60.0
Bytes = npt.NDArray[np.uint8]


class PaddedCopier(DeviceCopier):
    """The rig's small blocks at the beginning of the daemon's large ones."""

    def __init__(self, device_block_count: int) -> None:
        super().__init__(device_block_count)
        self.may_load = threading.Event()
        self.may_load.set()

    def copy_out(self, device_blocks: Sequence[int], views: Sequence[Bytes]) -> None:
        super().copy_out(device_blocks, [view[:SHARD_BYTES] for view in views])

    def copy_in(self, device_blocks: Sequence[int], views: Sequence[Bytes]) -> None:
        assert self.may_load.wait(WAIT_SECONDS), "nobody let the loads go on"
        super().copy_in(device_blocks, [view[:SHARD_BYTES] for view in views])


@dataclass
class DaemonRig(SchedulerRig):
    """One engine on the daemon at `socket`."""

    shard_bytes: ClassVar[int] = 64 << 10

    socket: Path = Path()

    def connect(self) -> None:
        engine_id = b"rig".ljust(16, b"\0")
        self.clock = SystemClock()
        self.client, self.worker_client = (
            Client(self.socket, engine_id=engine_id, role=role, name="rig", settings=PATIENT)
            for role in (Role.SCHEDULER, Role.WORKER)
        )
        self.control = self.lane = None
        self.copier = PaddedCopier(self.device_block_count)

    def wait_ready(self) -> None:
        """Both sides have their sessions, and the worker its slabs."""
        arena = self.worker_client.arena(self.worker_client.open_namespace(self.spec))
        self.wait(lambda: self.core._desk.session() is not None and arena.mapped_slot_count)

    def wait(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.core.stats()
            time.sleep(0.001)

    def step_until(self, condition: Callable[[], Any]) -> None:
        self.wait(lambda: (self.step(), condition())[1])

    def settle(self) -> None:
        """Until nothing is left to do for vLLM or for us."""
        self.step_until(lambda: not self.scheduler.has_requests())

    def forget_own_cache(self) -> None:
        assert self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        self.copier.may_load.set()
        self.scheduler.shutdown()
        self.worker.close()
        self.client.close()
        self.worker_client.close()

    def _copy(self) -> None:
        pass

    def _answer(self) -> None:
        pass

    def _pass_time(self) -> None:
        pass

    def _check_resident(self) -> None:
        pass


@contextmanager
def daemon_rig(model: Path, socket: Path, **options: Any) -> Iterator[DaemonRig]:
    """Ready when entered."""
    rig = DaemonRig(model, socket=socket, **options)
    try:
        rig.wait_ready()
        yield rig
    finally:
        rig.close()
