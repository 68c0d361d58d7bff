"""The closed sets that label values come from."""

from __future__ import annotations

from kvtier.types import TierName

METHODS = [
    "Greet",
    "Match",
    "Acquire",
    "Release",
    "Reserve",
    "Commit",
    "Abort",
    "Prefetch",
    "Put",
    "Get",
    "Hint",
    "Evict",
    "Pin",
    "Clear",
    "Purge",
    "Drain",
    "Check",
    "Explain",
    "List",
    "Stats",
    "Watch",
]
LIMITS = (
    *("sessions", "namespaces", "watchers", "puts", "calls", "leases_per_session"),
    *("leased_bytes", "file_descriptors", "namespace_names"),
)
SLOT_STATES = ["free", "ready", "reserved", "quarantined", "pinned", "held"]
# How policies that learn evict at the moment (kvtier/policy/eviction.py).
EVICTION_ORDERS = ("learned", "by_age", "unguarded")
SHADOW_ORDERS = ("learned", "by_age")
SESSION_STATES = ["live", "lost", "ended", "dead"]
BLOCK_CALLS = ("match", "acquire", "get")
# Why the first block that a call did not get was no hit; those behind it share its fate.
MISS_REASONS = (
    *("unseen", "evicted", "doubt", "pin_limit", "deadline", "no_space", "unmapped", "draining"),
)
ACQUIRE_WAITS = ("no", "yes")
DIRECTIONS = ("put", "get")
TRANSFERS = ("demote", "promote")
TRANSFER_OUTCOMES = ("done", "corrupt", "failed", "refused")
NVME_STATES = ("absent", "recovering", "on", "read_only", "off")
OUTCOMES = [
    "ok",
    "cancelled",
    "failed",
    "BadRequest",
    "BadFrame",
    "ProtocolMismatch",
    "Unauthenticated",
    "Forbidden",
    "UnknownNamespace",
    "NotReserved",
    "TierFull",
    "LimitExceeded",
    "Draining",
    "Unavailable",
    "CorruptReplica",
]
FRAME_ERRORS = [
    "BadFrame",
    "BadRequest",
    "ProtocolMismatch",
    "ClockUncertain",
    "Unauthenticated",
    "Forbidden",
    "LimitExceeded",
    "UnknownNamespace",
    "Draining",
    "other",
]
# Why TLS connections were refused.
TLS_REFUSALS = ("handshake", "late", "crowd", "certificate", "unknown", "room")
TIERS = tuple(str(tier) for tier in TierName)
BREAKER_STATES = ("absent", "closed", "open", "half_open")
# Why a call to a remote engine was trouble, or a value was not believed.
REMOTE_TROUBLES = (
    *("timed_out", "unreachable", "full", "refused", "busy", "failed"),
    *("unsealed", "key", "seal"),
    *("short", "magic", "version", "torn_header", "namespace", "epoch", "hash", "shape", "length"),
    *("torn", "codec", "checksum"),
)
CXL_STATES = ("absent", "populating", "on", "off")
BUILT_TIERS = tuple(str(tier) for tier in TierName)
