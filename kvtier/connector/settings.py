"""Limits and waits of the connector, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.errors import ConfigError
from kvtier.policy.load_or_recompute import OnboardWish


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """How far the connector goes on behalf of one engine; seconds, blocks or requests."""

    # How long a request may wait for its answer, from the first scheduling attempt on. Beyond it
    # computing is cheaper than waiting on a daemon that may be gone.
    onboard_wait_seconds: float = 0.05
    # Whether resident blocks are loaded: where that should take less time than to compute them,
    # always, or never. A request may say otherwise.
    onboard: OnboardWish = OnboardWish.AUTO
    # Fewer blocks than this are recomputed: a copy has fixed costs.
    onboard_blocks_min: int = 1
    # Acquires under way plus leases held. A thousand waiting requests must not pin the pool, and
    # the daemon allows 256 leases a session.
    acquires_in_flight_max: int = 64
    # The blocks that these may pin at once; one lease may always be held. An engine that knows how
    # many device blocks it has sets this to their number: it cannot load more.
    leased_blocks_max: int = 65_536
    # How long a request may wait for its turn, where these limits are reached, with nobody in front
    # of it getting on. Its time to wait for an answer begins after it: others are being loaded
    # meanwhile, so the daemon is well.
    turn_wait_seconds: float = 2.0
    # Where blocks lie on NVMe only, a request may wait longer: by twice the time that reading them
    # takes at the rate measured lately, because others read as well, and at most by the maximum. A
    # maximum of 0 onboards only what is in memory already. This rate is believed until one is
    # measured.
    nvme_bytes_per_second: float = 1e9
    # No shorter than this, however few the bytes: there are queues on the way, and a namespace may
    # have to grow by a slab first.
    nvme_wait_seconds_min: float = 0.1
    nvme_wait_seconds_max: float = 2.0
    # Acquires that wait for such blocks at once. Each takes a thread, and in the daemon slots for
    # all it waits for; a few keep every disk busy.
    waiting_acquires_max: int = 8
    lease_seconds: float = 30.0
    # A lease with less time than this left is exchanged for a new one before it is promised.
    lease_slack_seconds: float = 1.0
    # A match that said "miss" is believed for this long; after it acquire asks anew.
    match_fresh_seconds: float = 0.5
    # Matches waiting for the control thread; more are dropped and asked for when needed.
    matches_queued_max: int = 1024
    # How long a hash whose load failed is not offered again, and how many are remembered.
    failed_seconds: float = 60.0
    failed_hashes_max: int = 1024
    # Hashes remembered as resident, so that requests sharing a prefix offload it once; ~100 B each.
    resident_hashes_max: int = 65_536
    # Whether the engine offloads at all; else no slots are kept from others for it.
    may_offload: bool = True
    # Slots reserved ahead, and the most that a shortage may raise it to.
    stock_blocks: int = 256
    stock_blocks_max: int = 2048
    # How long after an empty answer, and after a recall, until slots are asked for again.
    reserve_retry_seconds: float = 0.05
    recall_pause_seconds: float = 1.0
    # Blocks between planned and committed, and blocks one plan may add: bounds slots and hook time.
    offload_blocks_max: int = 2048
    offload_blocks_per_plan: int = 256
    # How often a request's residency is asked anew after surprises before it stops offloading.
    rematches_max: int = 3
    # How long a finished request's device blocks are kept for what is not planned yet. A match and
    # a reserve each answer within 0.05 s or fail, and an empty reserve is repeated after 0.05 s:
    # that is a few tries. What is short for longer is not worth the engine's memory.
    finish_wait_seconds: float = 0.5
    # The most requests, and device blocks, kept so at once: they are memory that the engine cannot
    # use. Flights may hold as many blocks again.
    lingering_requests_max: int = 64
    lingering_blocks_max: int = 2048
    # Workers that report each job.
    worker_count: int = 1
    # Answers one hook may handle: bounds its time.
    answers_per_hook_max: int = 64
    # Whether the engine keeps a preempted request's device blocks when on_preempted says True.
    # Otherwise what was being offloaded from them is thrown away: it may be overwritten already.
    holds_preempted_blocks: bool = False
    # Workers compute the xxh3-64 of what they offloaded; else the daemon does, in the background.
    worker_checksums: bool = False
    # Workers verify one in this many onboarded blocks against their own offload; 0 is never.
    verify_one_in: int = 0
    # Device blocks copied out between two looks for a waiting onboard.
    offload_slice_blocks: int = 16
    # How much longer a step of the engine may take for offloads beside it, on a device; 0 lets them
    # go as fast as they can.
    offload_stretch_max: float = 0.05
    close_seconds: float = 1.0
    # For tests: an internal error is raised, instead of the engine going on without kvtier.
    raise_internal_errors: bool = False

    def __post_init__(self) -> None:
        at_least_one = (
            "onboard_blocks_min", "acquires_in_flight_max", "leased_blocks_max",
            "waiting_acquires_max", "matches_queued_max",
            "failed_hashes_max", "resident_hashes_max", "stock_blocks", "stock_blocks_max",
            "offload_blocks_max", "offload_blocks_per_plan", "worker_count",
            "answers_per_hook_max", "offload_slice_blocks",
        )  # fmt: skip
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least 1")
        not_negative = (
            "onboard_wait_seconds", "turn_wait_seconds", "nvme_wait_seconds_min",
            "nvme_wait_seconds_max", "failed_seconds", "rematches_max",
            "verify_one_in", "lease_slack_seconds", "match_fresh_seconds", "close_seconds",
            "reserve_retry_seconds", "recall_pause_seconds", "finish_wait_seconds",
            "lingering_requests_max", "lingering_blocks_max",
            "offload_stretch_max",
        )  # fmt: skip
        for name in not_negative:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must not be negative")
        if self.nvme_bytes_per_second <= 0:
            raise ConfigError(
                f"nvme_bytes_per_second is {self.nvme_bytes_per_second}: it must be above 0"
            )
        if self.lease_seconds <= self.lease_slack_seconds:
            raise ConfigError(
                f"lease_seconds is {self.lease_seconds}: it must exceed lease_slack_seconds"
            )
