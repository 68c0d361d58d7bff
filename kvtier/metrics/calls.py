"""Calls, frames, and the event loop they share."""

from __future__ import annotations

from kvtier.metrics.labels import ACQUIRE_WAITS, FRAME_ERRORS, METHODS, OUTCOMES, TLS_REFUSALS
from kvtier.metrics.registry import Registry

_SLICE_SECONDS_MAX = 0.005


class CallMetrics:
    """Calls, frames, and the event loop they share."""

    def __init__(self, registry: Registry) -> None:
        self.calls = registry.counter(
            "kvtier_calls_total",
            "gRPC calls ended, by method and outcome (the error's name, or ok).",
            {"method": METHODS, "outcome": OUTCOMES},
            prefill=False,
        )
        self.unread_calls = registry.gauge(
            "kvtier_grpc_unread_calls_count",
            "gRPC calls that began and whose message was never read, as of now: too large for gRPC "
            "(more than 8 MiB), or broken off before it was whole. When it rises, look for a "
            "client whose calls end in RESOURCE_EXHAUSTED.",
            {},
        )
        seconds = registry.histogram(
            "kvtier_call_seconds",
            "Time in the daemon of gRPC calls, by method.",
            {"method": METHODS},
        )
        self.call_seconds = {method: seconds.labels(method) for method in METHODS}
        acquire_seconds = registry.histogram(
            "kvtier_acquire_seconds",
            "Of these, Acquire: answered from what is in memory, or after a wait for more of it.",
            {"waited": ACQUIRE_WAITS},
        )
        self.acquire_seconds = {one: acquire_seconds.labels(one) for one in ACQUIRE_WAITS}
        self.loop_lag_seconds = registry.histogram(
            "kvtier_loop_lag_seconds",
            "How late the event loop is, ten times a second: what a call waits for before the "
            "daemon looks at it.",
            {},
        )
        self.slice_seconds = registry.histogram(
            "kvtier_core_slice_seconds", "Time one slice of the core held the event loop.", {}
        )
        self.long_slices = registry.counter(
            "kvtier_core_long_slices_total", "Slices of the core over 5 ms.", {}
        )
        self.frame_errors = registry.counter(
            "kvtier_frame_errors_total",
            "Frames of the session socket answered with an error, by its name.",
            {"error": FRAME_ERRORS},
        )
        self.refused_connections = registry.counter(
            "kvtier_tls_refused_connections_total",
            "Connections to grpc.tcp refused: a handshake that failed, was late or was one too "
            "many; a certificate that is missing, expired or of a wrong authority; that is in no "
            "list; no room for its tenant.",
            {"reason": TLS_REFUSALS},
        )
        self.watch_lost_events = registry.counter(
            "kvtier_watch_lost_events_total", "Events dropped because a watcher was slow.", {}
        )

    def note_slice(self, seconds: float) -> None:
        self.slice_seconds.observe(seconds)
        if seconds > _SLICE_SECONDS_MAX:
            self.long_slices.inc()

    def note_call(self, method: str, outcome: str, seconds: float) -> None:
        self.calls.labels(method, outcome).inc()
        self.call_seconds[method].observe(seconds)
