"""What the engine needs of kvtier's connector; nothing of it is imported at run time.

`kvtier.connector` has the real ones, tests have one in memory, and an engine without a connector
simply computes everything that its own cache does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvtier.connector.jobs import JobResult, StepOutcome, StepPlan


class SchedulerSide(Protocol):
    """Hooks of the scheduler; none of them waits."""

    @property
    def has_work(self) -> bool:
        """Whether copies or their publication are still under way."""
        ...

    def on_new_request(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        tokens_of: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        """A request has arrived; the hashes are those of its full blocks, whose tokens `tokens_of`
        tells by block."""
        ...

    def get_onboard_count(self, request_id: str, local_block_count: int) -> int | None:
        """Blocks after the engine's own that kvtier can bring; None: ask again later."""
        ...

    def on_allocated(
        self, request_id: str, device_blocks: Sequence[int], onboard_count: int
    ) -> None:
        """The device blocks to fill; the request runs no token until its onboard has ended."""
        ...

    def on_blocks_full(
        self, request_id: str, hashes: Sequence[bytes], device_blocks: Sequence[int]
    ) -> None:
        """The request's whole chain of full blocks so far, in order."""
        ...

    def note_prefill(self, token_seconds: float) -> None:
        """What a token of a prefill takes now."""
        ...

    def build_plan(self) -> StepPlan:
        """The copies to start now."""
        ...

    def on_results(self, results: Sequence[JobResult]) -> StepOutcome:
        """Tell which copies have ended; learn what that means for requests."""
        ...

    def request_finished(self, request_id: str) -> bool:
        """True: a copy touches its device blocks or will; keep them until the outcome says so."""
        ...

    def on_preempted(self, request_id: str) -> bool:
        """As `request_finished`, for a request that will start again."""
        ...

    def on_device_blocks_short(self, block_count: int) -> None:
        """Let go of so many device blocks, of those that no copy touches yet."""
        ...


class WorkerSide(Protocol):
    """The copying half; its copies run on a thread of its own."""

    def note_step(self, token_count: int) -> None:
        """A step begins that computes so many tokens: offloads must not make it much longer."""
        ...

    def start(self, plan: StepPlan) -> None:
        """Queue a plan's copies; they come after what the engine has launched by now."""
        ...

    def follow_layer(self, layer: int) -> None:
        """What the engine launches from now on comes after this layer of all loads; only where
        loads go by layers."""
        ...

    def poll(self) -> Sequence[JobResult]:
        """The copies that have ended since the last call."""
        ...


@dataclass(frozen=True, slots=True)
class EngineConnector:
    """Both halves, as one process has them."""

    scheduler: SchedulerSide
    worker: WorkerSide

    def exchange(self) -> StepOutcome:
        """Start what is planned, take in what has ended."""
        plan = self.scheduler.build_plan()
        if plan.onboards or plan.offloads:
            self.worker.start(plan)
        return self.scheduler.on_results(self.worker.poll())
