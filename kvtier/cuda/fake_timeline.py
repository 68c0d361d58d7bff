"""Virtual time of a fake GPU: streams as queues, engines that do one thing at a time.

The host's time moves with its calls and when the host says so; operations start when the one before
them in their stream has ended, what they wait for has ended, and their engine is free. Copy engines
take what was ready first, blind to the priority of streams; the compute engine goes by priority and
never interrupts what runs.

With a seed, durations are drawn from a wide range and engines take any number of operations at
once: every order that the streams and events allow can come about, and half-done copies are the
rule.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

Step = Callable[[], None]


class Engine(IntEnum):
    """What an operation occupies."""

    NONE = 0
    COMPUTE = 1
    HOST_TO_DEVICE = 2
    DEVICE_TO_HOST = 3


@dataclass(slots=True, eq=False)
class Operation:
    """One entry of a stream; its steps run at its start, its end and between, evenly or not."""

    name: str
    engine: Engine
    seconds: float
    steps: Sequence[Step] = ()
    waits: list[Operation] = field(default_factory=list)
    number: int = 0
    ready_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None


@dataclass(slots=True, eq=False)
class Queue:
    """A stream's operations that have not ended, and the last one of all."""

    priority: int = 0
    operations: deque[Operation] = field(default_factory=deque)
    last: Operation | None = None


class Timeline:
    """Runs queues in virtual time; invariant: nothing has happened after `now`."""

    def __init__(self, seed: int | None) -> None:
        self.now = 0.0
        self.history: list[Operation] = []  # All that occupied an engine, by start.
        self._random = None if seed is None else np.random.default_rng(seed)
        self._queues: list[Queue] = []
        self._busy: dict[Engine, Operation] = {}
        self._due: list[tuple[float, int, Operation, Step | None]] = []
        self._count = 0

    @property
    def is_even(self) -> bool:
        """Whether things take what they cost, and not what chance says."""
        return self._random is None

    def add_queue(self, priority: int = 0) -> Queue:
        queue = Queue(priority)
        self._queues.append(queue)
        return queue

    def remove_queue(self, queue: Queue) -> None:
        """What it still holds runs to its end, as in CUDA."""
        if queue.operations:
            self.run_until_ended(queue.operations[-1])
        self._queues.remove(queue)

    def submit(self, queue: Queue, operation: Operation) -> None:
        self._count += 1
        operation.number = self._count
        if self._random is not None:
            operation.seconds = float(1e-6 * 2 ** self._random.uniform(0, 10))
        queue.operations.append(operation)
        queue.last = operation

    def random_order(self, count: int) -> list[int]:
        """In which order copies of a batch are done."""
        if self._random is None:
            return list(range(count))
        return [int(index) for index in self._random.permutation(count)]

    def random_part(self, whole: int) -> int:
        """Where a copy is when something else looks."""
        return whole // 2 if self._random is None else int(self._random.integers(0, whole + 1))

    def run_until(self, time: float) -> None:
        """Raises Fault for the operation that failed; nothing runs after that."""
        self._start_ready()
        while self._due and self._due[0][0] <= time:
            self._run_next()
        self.now = max(self.now, time)

    def run_until_ended(self, operation: Operation) -> None:
        self._start_ready()
        while operation.ended_at is None:
            assert self._due, f"{operation.name} waits for what never ends"
            self._run_next()

    def busy_seconds(self, engine: Engine) -> float:
        """How long the engine was occupied, up to now."""
        return sum(
            (operation.ended_at if operation.ended_at is not None else self.now)
            - (operation.started_at or 0.0)
            for operation in self.history
            if operation.engine is engine
        )

    def _run_next(self) -> None:
        self.now, _, operation, step = heapq.heappop(self._due)
        if step is not None:
            step()
            return
        operation.ended_at = self.now
        operation.steps, operation.waits = (), []  # Their views and their past may go.
        if self._busy.get(operation.engine) is operation:
            del self._busy[operation.engine]
        for queue in self._queues:
            if queue.operations and queue.operations[0] is operation:
                queue.operations.popleft()
        self._start_ready()

    def _start_ready(self) -> None:
        while (found := self._next_to_start()) is not None:
            self._start(found)

    def _next_to_start(self) -> Operation | None:
        best: tuple[tuple[float, float, int], Operation] | None = None
        for queue in self._queues:
            operation = queue.operations[0] if queue.operations else None
            if operation is None or operation.started_at is not None:
                continue
            if any(other.ended_at is None for other in operation.waits):
                continue
            if operation.ready_at is None:
                operation.ready_at = self.now
            if operation.engine in self._busy:
                continue
            priority = queue.priority if operation.engine is Engine.COMPUTE else 0
            order = (float(priority), operation.ready_at, operation.number)
            if best is None or order < best[0]:
                best = order, operation
        return best[1] if best is not None else None

    def _start(self, operation: Operation) -> None:
        operation.started_at = self.now
        if operation.engine is not Engine.NONE:
            self.history.append(operation)
            if self._random is None:
                self._busy[operation.engine] = operation
        count = len(operation.steps)
        for index, step in enumerate(operation.steps):
            share = index / (count - 1) if count > 1 else 1.0
            self._push(self.now + operation.seconds * share, operation, step)
        self._push(self.now + operation.seconds, operation, None)

    def _push(self, time: float, operation: Operation, step: Step | None) -> None:
        self._count += 1
        heapq.heappush(self._due, (time, self._count, operation, step))
