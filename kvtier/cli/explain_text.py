"""What `kvtier explain` says, in words."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.types import Cut
from kvtier.v1 import kvtier_pb2 as pb

_REMOVED = {
    "room": "room was needed for other blocks",
    "slab": "its slab was withdrawn, for another namespace as a rule",
    "segment": "its segment was reused",
    "corrupt": "its bytes did not match their checksum",
    "read_failed": "it could not be read",
    "tier_off": "the tier was switched off",
    "evict": "an administrator evicted it",
    "parent": "a block before it had gone",
}
_REFUSED = {
    "no_parent": "the block before it was not resident",
    "void": "the namespace had been cleared meanwhile",
}
_CUTS = {
    Cut.MISS: "the next block was not resident",
    Cut.PIN_LIMIT: "leases would have pinned more than half the pool",
    Cut.DEADLINE: "the next block lay in a lower tier and did not come in time",
    Cut.NO_SPACE: "no slot in memory was free for a block of a lower tier",
    Cut.UNMAPPED: "the next block lay in a slab that the engine had not mapped yet",
    Cut.DRAINING: "the daemon was draining",
}
_MISSED = {cut.name.lower(): text for cut, text in _CUTS.items()}


def request_text(seen: pb.RequestSeen, *, is_latest: bool) -> str:
    who = f" by {seen.session_name}" if seen.session_name else ""
    head = f"{seen.call} of request {seen.request_id}, {ago_text(seen.seconds_ago)}{who}"
    place = f"session {seen.session_id}, namespace {seen.namespace_id} ({seen.model})"
    lines = [
        f"{head}: {place}, took {seen.seconds * 1e3:.1f} ms",
        f"  found then: {seen.found_count} of {seen.asked_count} blocks{_tiers_of(seen)}",
    ]
    cut = Cut(seen.cut)
    if cut is not Cut.NONE:
        lines.append(f"  ended there: {_CUTS[cut]}")
    if not is_latest:
        return "\n".join(lines)
    if seen.missed_hash:
        lines.append(f"  first block missed: {seen.missed_hash.hex()}")
    lines += ["  now:", *_run_lines(seen.runs), *_twin_lines(seen.twins)]
    return "\n".join(lines)


def places_text(about: str, answer: pb.ExplainResponse) -> str:
    parts = []
    for place in answer.places:
        lines = [f"namespace {place.namespace_id} ({place.model}, {place.fingerprint.hex()[:12]})"]
        if place.block_count:
            longer = ", the last ones of a longer prefix" if place.cut_off else ""
            lines.append(f"  resident: a prefix of {place.block_count} blocks{longer}")
            lines += _run_lines(place.runs)
        else:
            lines.append("  not resident")
        if not any(event.what == "removed" for event in place.events):
            lines.append(f"  never removed {_reach_text(answer)}")
        lines += [f"  {_event_text(event)}" for event in place.events]
        lines += _twin_lines(place.twins)
        parts.append("\n".join(lines))
    return "\n\n".join([f"block {about}", *parts])


def tiers_text(answer: pb.ExplainResponse) -> str:
    states = ", ".join(f"{one.tier} {one.state}" for one in answer.tiers)
    return f"tiers: {states}" + ("; the daemon is draining" if answer.draining else "")


def remembered_text(answer: pb.ExplainResponse) -> str:
    lines = [f"remembered: all removals {_reach_text(answer)}"]
    for one in answer.happenings[:8]:
        where = f" namespace {one.namespace_id}" if one.namespace_id else ""
        detail = f": {one.detail}" if one.detail else ""
        lines.append(f"  {ago_text(one.seconds_ago)}{where} {one.what}{detail}")
    return "\n".join(lines)


def ago_text(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s ago"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min ago"
    return f"{seconds / 3600:.1f} h ago"


def _reach_text(answer: pb.ExplainResponse) -> str:
    if answer.remembered_seconds >= answer.uptime_seconds:
        return "since the daemon started"
    return f"in the last {answer.remembered_seconds:.0f} s"


def _tiers_of(seen: pb.RequestSeen) -> str:
    told = ", ".join(f"{one.count} in {one.tier}" for one in seen.tiers)
    return f": {told}" if told else ""


def _run_lines(runs: Sequence[pb.PrefixRun]) -> list[str]:
    return [
        f"    blocks {run.first_index} to {run.first_index + run.block_count - 1}: {_run_text(run)}"
        for run in runs
    ]


def _run_text(run: pb.PrefixRun) -> str:
    if run.tiers:
        return "in " + " and ".join(run.tiers)
    if run.HasField("last"):
        return "not resident; " + _event_text(run.last)
    return "not resident; never stored, as far as is remembered"


def _event_text(event: pb.BlockEvent) -> str:
    when = ago_text(event.seconds_ago)
    if event.what == "removed":
        why = _REMOVED.get(event.why, event.why)
        return f"removed from {event.tier} {when}: {why}"
    if event.what == "refused":
        return f"offered and refused {when}: {_REFUSED.get(event.why, event.why)}"
    return f"asked for in vain {when}: {_MISSED.get(event.why, event.why)}"


def _twin_lines(twins: Sequence[pb.NamespaceTwin]) -> list[str]:
    lines = []
    for twin in twins:
        has = "has the missed block" if twin.has_block else "is much alike"
        lines.append(f"  namespace {twin.namespace_id} ({twin.model}) {has}; what differs:")
        lines += [
            f"    {fact.name}: {fact.here!r} here, {fact.there!r} there" for fact in twin.facts
        ]
    return lines
