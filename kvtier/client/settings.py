"""What a client may be told; every bound has its reason beside it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kvtier.client.tls import ClientTls
from kvtier.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Deadlines and limits of one client. All durations are seconds."""

    # match, acquire, release, reserve, commit, abort, prefetch, hint: an engine waits for these.
    timeout_seconds: float = 0.05
    # put and get: the bytes travel by value. More than the 10 s that the daemon itself may wait for
    # blocks of a get that are on NVMe.
    stream_timeout_seconds: float = 20.0
    admin_timeout_seconds: float = 2.0  # clear, evict, pin, stats, check, drain: a person waits.
    lease_seconds: float = 30.0  # How long an acquired prefix is ours when the caller says nothing.
    connect_timeout_seconds: float = 2.0  # Each step of opening a session; nobody waits for it.
    # A hung daemon answers a waiting probe the moment it goes on, so probes wait long.
    probe_timeout_seconds: float = 1.0
    # The first retry finds a restarted daemon within one step of an engine; the last one keeps a
    # node with many engines and no daemon idle.
    retry_seconds_min: float = 0.05
    retry_seconds_max: float = 2.0
    # By-value sessions end after 60 s unused: ask three times within that.
    keepalive_seconds: float = 20.0
    # For tcp://HOST:PORT of a daemon that asks for certificates.
    tls: ClientTls | None = None
    jitter: random.Random = field(default_factory=random.Random, compare=False)

    def __post_init__(self) -> None:
        for name in (
            "timeout_seconds",
            "stream_timeout_seconds",
            "admin_timeout_seconds",
            "lease_seconds",
            "connect_timeout_seconds",
            "probe_timeout_seconds",
            "retry_seconds_min",
            "keepalive_seconds",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be above 0")
        if self.retry_seconds_max < self.retry_seconds_min:
            raise ConfigError("retry_seconds_max is below retry_seconds_min")
