"""Every line that the daemon may write: its name, and the fields that it may have.

Names and fields are stable: alerts may be built on them. docs/operations.md has them as a table
(`python -m kvtier.server.log_events`), and tests hold code and document to it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogEvent:
    level: str
    meaning: str
    fields: tuple[str, ...] = ()


_SESSION = ("session", "tenant", "uid", "role", "client", "by_value", "replaces")
_CALL = (
    *("request", "call", "session", "namespace", "asked", "found", "tiers", "cut", "missed"),
    "seconds",
)

# A line that is written while a call of a request is worked off has `request` besides.
EVENTS: dict[str, LogEvent] = {
    "daemon ready": LogEvent(
        "info",
        "the sockets answer",
        ("socket", "pages", "budget", "slab", "generation", "admin", "tcp"),
    ),
    "draining": LogEvent("info", "a signal came: no new work", ("signal",)),
    "drained": LogEvent("info", "nothing is held any more, or the time is over", ("held",)),
    "second signal, ending at once": LogEvent("warning", "without waiting", ("signal",)),
    "daemon ended": LogEvent("info", "the last line of an orderly end"),
    "daemon failed": LogEvent("critical", "a mistake of kvtier's own; the traceback follows"),
    "callback failed": LogEvent("error", "in a library", ("reason", "error")),
    "lines left out": LogEvent(
        "warning",
        "of one event and tenant, beyond log.lines_max in ten seconds",
        ("of", "count", "tenant"),
    ),
    "session opened": LogEvent("info", "a process connected", _SESSION),
    "session ended": LogEvent("info", "in order", _SESSION),
    "session lost": LogEvent("warning", "its connection broke", _SESSION),
    "process died": LogEvent("info", "proven; its slots return", _SESSION),
    "session frame refused": LogEvent(
        "info", "its error went to the client", ("session", "tenant", "uid", "error", "reason")
    ),
    "session closed after bad frames": LogEvent(
        "warning", "the client is broken", ("session", "tenant")
    ),
    "connection refused": LogEvent(
        "warning",
        "not one of the tenant's users, a Hello that was wrong or late, or a limit",
        ("tenant", "uid", "error", "reason"),
    ),
    "tls connection refused": LogEvent(
        "warning",
        "at grpc.tcp: no certificate that counts, a handshake that was late, or a limit",
        ("address", "reason"),
    ),
    "gRPC has ended, it begins anew": LogEvent(
        "warning",
        "a client sent what its library cannot take; calls under way were cut",
        ("path",),
    ),
    "tls files read again": LogEvent("info", "they had changed", ("path",)),
    "tls files cannot be used": LogEvent(
        "warning", "they had changed; the former ones go on to serve", ("reason",)
    ),
    "certificate expired": LogEvent(
        "info",
        "of a client that was connected: its connection ends",
        ("address", "tenant", "certificate"),
    ),
    "certificate listed otherwise": LogEvent(
        "info",
        "or no more, since the lists were read again: its connection ends",
        ("address", "tenant", "certificate"),
    ),
    "lists of certificates read again": LogEvent(
        "info",
        "upon SIGHUP; `restart`: what else has changed, and needs one",
        ("names", "restart"),
    ),
    "configuration cannot be used": LogEvent(
        "warning", "upon SIGHUP; the former lists of certificates go on to count", ("reason",)
    ),
    "cannot accept": LogEvent("warning", "no descriptor is left, as a rule", ("reason",)),
    "too many lane connections": LogEvent(
        "warning", "the oldest idle ones close", ("max", "tenant", "uid")
    ),
    "lane frame before the answer was read": LogEvent(
        "warning", "the client is broken", ("tenant", "uid")
    ),
    "lane frame refused": LogEvent("warning", "too large", ("bytes", "tenant", "uid")),
    "lane frame too slow": LogEvent(
        "warning", "it was not whole in time", ("bytes", "tenant", "uid")
    ),
    "purge begins": LogEvent(
        "info",
        "or begins again, after a crash; `begun` says how often",
        ("purge", "tenant", "namespaces", "begun"),
    ),
    "purge ended": LogEvent(
        "info",
        "with state `incomplete`: for this reason some of it could not be done",
        ("purge", "state", "bytes", "reason"),
    ),
    "purge record unreadable": LogEvent(
        "warning", "if it was of a purge under way, ask for that again", ("path", "reason")
    ),
    "purge report not written": LogEvent("warning", "the next life purges once more", ("reason",)),
    "call refused": LogEvent(
        "info",
        "its error went to the client",
        ("request", "call", "session", "tenant", "uid", "certificate", "error", "reason"),
    ),
    "call slow": LogEvent(
        "warning",
        "longer than log.slow_call_seconds",
        ("request", "call", "session", "seconds", "blocks", "outcome"),
    ),
    "acquire cut": LogEvent(
        "info",
        "a lease ended before its prefix, for another reason than a miss",
        _CALL,
    ),
    "request asked": LogEvent("debug", "each Match and Acquire that names one", _CALL),
    "block corrupt in memory, dropped": LogEvent(
        "error", "its checksum did not match", ("reason",)
    ),
    "memory of the former life taken over": LogEvent(
        "info", "its blocks count from now on", ("sets", "blocks", "seconds")
    ),
    "memory of the former life is let go": LogEvent("warning", "DRAM begins empty", ("reason",)),
    "slab set not taken over": LogEvent("warning", "its blocks are lost", ("first", "reason")),
    "namespace not taken over": LogEvent("warning", "its blocks are lost", ("reason",)),
    "memory will not outlive this daemon": LogEvent(
        "warning", "the next one begins empty", ("reason",)
    ),
    "first slab populated": LogEvent("info", "which pages there are", ("pages", "source")),
    "pool populated": LogEvent("info", "all of dram.bytes is there", ("bytes", "huge_bytes")),
    "slab refused, the pool is smaller for now": LogEvent(
        "warning", "no memory, or the wrong node; tried again", ("reason",)
    ),
    "epoch record unreadable": LogEvent("warning", "a new epoch begins", ("path", "reason")),
    "epoch record damaged, a new epoch begins": LogEvent("warning", "blocks are void", ("path",)),
    "tenant not recorded": LogEvent(
        "warning",
        "after a restart its NVMe segments are nobody's until it is back",
        ("path", "reason"),
    ),
    "recording begins": LogEvent("info", "with [recorder] folder", ("path",)),
    "recording ended": LogEvent(
        "warning", "the disk failed, or was too slow; the daemon goes on", ("reason",)
    ),
    "kv events dropped, all will be announced anew": LogEvent(
        "warning", "their readers are too slow", ("topic", "waiting")
    ),
    "replay request not understood": LogEvent("warning", "of KV events", ("frames",)),
    "making nvme pool": LogEvent("info", "the first start", ("paths", "bytes")),
    "nvme pool opened": LogEvent("info", "", ("paths", "bytes", "was_clean", "key_id")),
    "nvme pool read": LogEvent(
        "info",
        "its blocks count from now on",
        ("blocks", "namespaces", "seconds", "locked_segments"),
    ),
    "nvme path is buffered: slower, and its pages take memory": LogEvent(
        "warning", "no O_DIRECT there", ("path", "reason")
    ),
    "nvme tier is worse off": LogEvent("error", "read only, or off", ("state", "reason")),
    "nvme transfers are under way still": LogEvent("warning", "at the end", ("promote", "demote")),
    "nvme pool closed": LogEvent("info", "", ("clean", "returned")),
    "cxl memory opened": LogEvent("info", "", ("memory", "slabs")),
    "the cxl tier is emulated: it is ordinary memory, slowed down": LogEvent("warning", "as asked"),
    "cxl slab refused": LogEvent("warning", "no memory there", ("reason",)),
    "cxl tier opened": LogEvent(
        "info",
        "what one thread copies from it, to it, and within DRAM; how blocks reach engines",
        ("memory", "bytes", "read", "write", "dram", "onboard", "why"),
    ),
    "segment refused by a client": LogEvent(
        "warning",
        "an engine could not map a part of the CXL tier: its blocks come through DRAM",
        ("client", "session", "reason"),
    ),
    "the cxl tier is off: it has no memory": LogEvent("error", "", ("memory",)),
    "remote engine opened": LogEvent("info", "", ("engine", "codec")),
    "remote.engine is off: the other options of [remote] have no effect": LogEvent(
        "warning", "", ("options",)
    ),
    "remote breaker changed": LogEvent(
        "warning",
        "to open: the engine is left alone for `open_seconds`; otherwise info",
        ("engine", "side", "before", "after", "reason", "open_seconds"),
    ),
    "remote engine is told nothing of our end": LogEvent(
        "warning", "it did not answer", ("engine",)
    ),
    "blocks are too large for remote.known_bytes, the tier is off for their namespace": LogEvent(
        "warning", "a block may take a 64th of it", ("namespace", "bytes")
    ),
    "remote clear is owed from an earlier life, the tier is off for its namespace": LogEvent(
        "warning", "the engine was not told; it is tried again", ("namespace", "engine")
    ),
    "remote clear that was owed is done": LogEvent("info", "", ("namespace", "engine")),
    "owed clears are unreadable": LogEvent(
        "warning", "in state_dir; one is taken to be owed", ("reason",)
    ),
    "owed clear cannot be forgotten": LogEvent(
        "warning", "in state_dir; it is done again at the next start", ("reason",)
    ),
    "remote share answers again": LogEvent("info", "", ("path",)),
    "remote share is evicted from by this daemon": LogEvent("info", "it owns that now", ("path",)),
    "remote share cannot be used": LogEvent("warning", "", ("path", "why")),
}


def documentation() -> str:
    """The table of docs/operations.md."""
    lines = ["| event | level | meaning | fields |", "| --- | --- | --- | --- |"]
    for name, event in EVENTS.items():
        fields = ", ".join(f"`{field}`" for field in event.fields) or "–"
        lines.append(f"| `{name}` | {event.level} | {event.meaning or '–'} | {fields} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(documentation())
