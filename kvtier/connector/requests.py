"""What the scheduler side remembers of one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count
from typing import Any

from kvtier.connector.client_api import LeaseLike
from kvtier.connector.heads import Head
from kvtier.connector.jobs import FailReason, JobResult, OffloadJob, OnboardJob
from kvtier.connector.stock import Footing
from kvtier.policy.link import Load
from kvtier.policy.load_or_recompute import OnboardWish, Runs
from kvtier.types import TierName

# Token ids of block i of a request's chain. Called from the control thread, after the block's hash
# exists; whoever gives it vouches that its tokens alone make the hash.
TokensOf = Callable[[int], Sequence[int]]


class OnboardPhase(Enum):
    """How far a request's onboard has come since it was last (re)started from token 0."""

    WAITING = auto()  # Nothing asked yet.
    ASKED = auto()  # Acquire is queued or under way.
    LEASED = auto()  # A lease is held, and its blocks may be promised.
    LOADING = auto()  # Planned or handed to the workers.
    OVER = auto()  # Done, missed, failed or given up: nothing more is offered.


class Residency(Enum):
    """What is known of a request's chain in kvtier."""

    UNKNOWN = auto()
    ASKED = auto()
    KNOWN = auto()


@dataclass(slots=True, eq=False)
class Attempt:
    """One acquire; a lease that arrives for an abandoned attempt is released at once."""

    skip_count: int
    learned_count: int
    wait_until: float | None = None  # None: takes what is in memory now.
    asked_count: int = 0  # Blocks asked for; fewer than the prompt's after a failed load.
    lease: LeaseLike | None = None
    tiers: Sequence[tuple[TierName, int]] = ()  # Where the leased blocks were, in chain order.
    leased_count: int = 0  # Blocks from the first one on, never more than asked for.
    is_abandoned: bool = False
    block_count: int = 0  # Blocks it pins, or may come to pin.
    promotion: Load | None = None  # What it waits for.


@dataclass(slots=True, eq=False)
class Request:
    """Owned by the engine's thread; `flights` keep its device blocks in use."""

    request_id: str
    prompt: Sequence[bytes]
    tokens_of: TokensOf | None = None
    wish: OnboardWish = OnboardWish.AUTO
    number: int = field(default_factory=count().__next__)  # Those who came first have less.
    phase: OnboardPhase = OnboardPhase.WAITING
    first_attempt_at: float | None = None
    turn_since: float | None = None  # Waits for others' leases to end.
    is_counted: bool = False
    local_block_count: int = 0
    # No more than this head of the prompt is to be loaded; None: not decided yet.
    depth_limit: int | None = None
    waited_seconds: float = 0.0  # For answers.
    attempt: Attempt | None = None
    # The prefix whose device blocks hold computed KV, and how far it has been planned.
    chain: Sequence[bytes] = ()
    device_blocks: Sequence[int] = ()
    offload_index: int = 0
    residency: Residency = Residency.UNKNOWN
    matched_count: int = 0
    matched_at: float = float("-inf")
    match_limit: int = 0  # Blocks the last match was asked about: it knows better than we did.
    match_learned_count: int = 0
    # Blocks lower_first to lower_end may lie in lower tiers only, as far as is known.
    lower_first: int = 0
    lower_end: int = 0
    match_tiers: Runs = ()  # Where the matched blocks are, as the daemon said.
    rematch_count: int = 0
    open_block_count: int = 0  # Planned and not yet committed or dropped.
    may_offload: bool = True
    flights: dict[int, Flight] = field(default_factory=dict)
    hold_count: int = 0  # Held flights, and the linger: `released` announces the end of the last.
    is_finished: bool = False
    is_lingering: bool = False  # Finished; the engine keeps the device blocks for the planning.

    def lower_count(self, local_block_count: int) -> int:
        """Blocks behind the engine's own that may have to be promoted before they are onboarded."""
        end = self.lower_end if self.depth_limit is None else min(self.lower_end, self.depth_limit)
        return max(0, end - max(self.lower_first, local_block_count))

    @property
    def wanted(self) -> Sequence[bytes]:
        """The head of the prompt that may be loaded."""
        limit = self.depth_limit
        if limit is None or limit >= len(self.prompt):
            return self.prompt
        return self.prompt.until(limit) if isinstance(self.prompt, Head) else self.prompt[:limit]

    @property
    def left_count(self) -> int:
        """Blocks of the chain that are not planned."""
        return max(0, len(self.chain) - self.offload_index)

    def hold_flights(self, *, onboards_only: bool = False) -> bool:
        """The engine gives the device blocks up: whether flights still touch them."""
        for flight in self.flights.values():
            if onboards_only and not isinstance(flight, OnboardFlight):
                continue
            if not flight.is_held and not flight.is_disowned:
                flight.is_held = True
                self.hold_count += 1
        return self.hold_count > 0

    def forget_chain(self) -> None:
        self.chain = ()
        self.device_blocks = ()
        self.offload_index = 0


class BlockPhase(Enum):
    """An offloaded block on its way."""

    COPYING = auto()
    COPIED = auto()  # Waits until the commit of its parent is queued.
    COMMITTING = auto()


@dataclass(slots=True, eq=False)
class MovingBlock:
    """One block being offloaded: the owner of one reserved slot."""

    block_hash: bytes
    parent: bytes | None
    slot: int
    flight: OffloadFlight
    index: int  # In the request's chain.
    phase: BlockPhase = BlockPhase.COPYING
    checksum: int | None = None


@dataclass(slots=True, eq=False)
class Flight:
    """A job from its planning until every worker has reported it."""

    request: Request
    life: int
    is_planned: bool = False  # Stands in a plan: workers know of it.
    is_held: bool = False  # The engine keeps the device blocks until `released`.
    is_disowned: bool = False  # The engine has taken the device blocks away already.
    results: dict[tuple[int, int], JobResult] = field(default_factory=dict)  # By worker.

    def report(self, result: JobResult, *, worker_count: int) -> bool:
        """Whether this was the last worker's first report; repeated ones change nothing."""
        self.results.setdefault(result.worker, result)
        return len(self.results) >= worker_count

    @property
    def failure(self) -> FailReason | None:
        return next((r.failed for r in self.results.values() if r.failed is not None), None)

    @property
    def failed_index(self) -> int:
        return min(
            (r.failed_index for r in self.results.values() if r.failed is not None), default=0
        )

    @property
    def bytes_count(self) -> int:
        return sum(result.bytes_count for result in self.results.values())

    @property
    def copy_seconds(self) -> float:
        return max((result.seconds for result in self.results.values()), default=0.0)


@dataclass(slots=True, eq=False)
class OnboardFlight(Flight):
    job: OnboardJob = field(kw_only=True)
    attempt: Attempt = field(kw_only=True)
    first_index: int = field(kw_only=True)  # In the prompt, of the job's first block.
    sources: tuple[tuple[TierName, int], ...] = field(kw_only=True)  # Where its blocks came from.
    copy: Load = field(kw_only=True)


@dataclass(slots=True, eq=False)
class OffloadFlight(Flight):
    job_id: int = field(kw_only=True)
    footing: Footing = field(kw_only=True)
    job: OffloadJob | None = None
    blocks: list[MovingBlock] = field(default_factory=list)
    doomed: str = ""  # Why its bytes must not be committed.

    @property
    def session(self) -> Any:
        return self.footing.session
