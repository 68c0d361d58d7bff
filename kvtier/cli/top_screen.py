"""One frame of `kvtier top`: everything that is told, cut to the size of the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtier.cli.output import bytes_text
from kvtier.cli.top_rates import Rates, Sample
from kvtier.v1 import kvtier_pb2 as pb

KEYS = (
    ("q", "quit"),
    ("?, h", "show and leave this help"),
    ("p, space", "pause: the picture stands still, the daemon does not"),
    ("s", "sort namespaces and clients by size, name or number"),
    ("r", "reverse that order"),
    ("tab", "give the room to namespaces, clients or slow operations"),
    ("up, down, k, j", "scroll that list"),
    ("+, -", "ask more or less often"),
)
ORDERS = ("size", "name", "number")
LISTS = ("namespaces", "clients", "slow operations")
_FRAME_ROWS = 4  # Two lines of head, one of keys, one between.


@dataclass(slots=True)
class View:
    """What the keys have chosen, and what is known of the daemon."""

    address: str
    interval_seconds: float
    sample: Sample | None = None
    before: Sample | None = None
    trouble: str = ""  # Why the daemon does not answer; empty while it does.
    trouble_since: float = 0.0
    is_paused: bool = False
    shows_help: bool = False
    order: int = 0
    is_reversed: bool = False
    focus: int = 0  # In LISTS.
    offset: int = 0  # Rows of that list that lie above its first one.


@dataclass(frozen=True, slots=True)
class Listing:
    """A table with as many rows as there are, before it is cut."""

    headings: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    stretched: int = 0  # The column that gives way.


def frame(view: View, *, height: int | None, now: float) -> RenderableType:
    """`height` None: all of it, however long."""
    if view.shows_help:
        return _help()
    parts: list[RenderableType] = [*_head(view, now)]
    sample = view.sample
    if sample is None:
        return Group(*parts)
    rates = Rates(view.before, sample)
    tiers = _tiers(sample.stats, rates)
    lists = [_namespaces(view, sample.stats), _clients(view, sample.stats), _slow(sample.stats)]
    wanted = [len(one.rows) for one in lists]
    if height is None:
        room = wanted
    else:
        left = height - _FRAME_ROWS - len(tiers.rows) - 1
        room = shared_rows(wanted, left - 2 * len(lists), view.focus)
    parts.append(_table(tiers, 0, len(tiers.rows)))
    for number, (listing, count) in enumerate(zip(lists, room, strict=True)):
        is_focus = number == view.focus and height is not None
        offset = min(view.offset, len(listing.rows) - count) if is_focus else 0
        if height is None or count or is_focus:
            parts += _section(LISTS[number], listing, offset, count, is_focus=is_focus)
    if height is not None:
        parts += ["", _foot(view)]
    return Group(*parts)


def shared_rows(wanted: Sequence[int], left: int, focus: int) -> list[int]:
    """Rows for each list: two for each that has them, what is left for the focus, then for all."""
    left = max(0, left)
    given = [0] * len(wanted)
    for limit, numbers in (
        (1, [focus]),
        (2, range(len(wanted))),
        (None, [focus]),
        (None, range(len(wanted))),
    ):
        for number in numbers:
            most = wanted[number] if limit is None else min(limit, wanted[number])
            more = min(max(0, most - given[number]), left)
            given[number] += more
            left -= more
    return given


# ------------------------------------------------------------------------------------------ parts


def _head(view: View, now: float) -> list[RenderableType]:
    line = Text(no_wrap=True, overflow="ellipsis")
    sample = view.sample
    if view.trouble:
        seconds = now - view.trouble_since
        line.append(f"no answer for {seconds:.0f} s, trying again: ", "bold red")
        line.append(view.trouble, "red")
    elif sample is None:
        line.append(f"asking the daemon at {view.address}", "bold")
    else:
        stats = sample.stats
        state = "draining" if stats.draining else "ready"
        line.append(f"kvtier {stats.daemon_version} ", "bold")
        line.append(state, "yellow" if stats.draining else "green")
        line.append(f", up {duration_text(stats.uptime_seconds)}, {view.address}")
    if view.is_paused:
        line.append("  PAUSED", "bold yellow")
    return [line, _rates_line(view)]


def _rates_line(view: View) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    if view.sample is None:
        return line
    rates = Rates(view.before, view.sample)
    share = rates.hit_share("match")
    ready = 'kvtier_committed_blocks_total{outcome="ready"}'
    lag = rates.mean("kvtier_loop_lag_seconds")
    told = (
        ("calls/s", _rate(rates.sum_per_second("kvtier_calls_total"))),
        ("blocks/s matched", _rate(rates.per_second('kvtier_asked_blocks_total{call="match"}'))),
        ("hit", "-" if share is None else f"{100 * share:.0f} %"),
        ("stored", _rate(rates.per_second(ready))),
        ("evicted", _rate(rates.per_second("kvtier_evicted_blocks_total"))),
        ("late", "-" if lag is None else f"{1e3 * lag:.1f} ms"),
    )
    for name, value in told:
        line.append(f"{name} ", "dim")
        line.append(f"{value}  ")
    return line


def _tiers(stats: pb.StatsResponse, rates: Rates) -> Listing:
    return Listing(
        ("tier", "budget", "there", "blocks", "free", "reserved", "pinned", "hits/s", "state"),
        [
            (
                one.tier,
                bytes_text(one.budget_bytes),
                bytes_text(one.populated_bytes),
                f"{one.ready_count}",
                f"{one.free_count}" if one.tier == "dram" else "-",
                f"{one.reserved_count}",
                f"{one.pinned_count}",
                _rate(rates.hits_per_second(one.tier)),
                _state_of(stats, one.tier) or one.page_kind or "-",
            )
            for one in stats.tiers
        ],
        stretched=8,
    )


def _state_of(stats: pb.StatsResponse, tier: str) -> str:
    """As the metrics tell it: `kvtier_nvme_state{state="on"}` is 1."""
    prefix = f"kvtier_{tier}_state{{"
    found = [name for name, value in stats.counters.items() if value and name.startswith(prefix)]
    states = [name.rpartition('state="')[2].partition('"')[0] for name in sorted(found)]
    return " ".join(dict.fromkeys(states))


def _namespaces(view: View, stats: pb.StatsResponse) -> Listing:
    keys: tuple[Callable[[pb.NamespaceStats], float | str], ...] = (
        lambda one: -one.block_count * one.block_bytes,
        lambda one: one.model,
        lambda one: one.namespace_id,
    )
    chosen = sorted(stats.namespaces, key=keys[view.order], reverse=view.is_reversed)
    return Listing(
        ("no.", "model", "fingerprint", "blocks", "bytes", "slots", "free"),
        [
            (
                f"{one.namespace_id}",
                one.model,
                one.fingerprint.hex()[:12],
                f"{one.block_count}",
                bytes_text(one.block_count * one.block_bytes),
                f"{one.slot_count}",
                f"{one.free_count}",
            )
            for one in chosen
        ],
        stretched=1,
    )


def _clients(view: View, stats: pb.StatsResponse) -> Listing:
    keys: tuple[Callable[[pb.SessionStats], float | str], ...] = (
        lambda one: -one.reserved_count - one.lease_count,
        lambda one: one.name,
        lambda one: one.session_id,
    )
    chosen = sorted(stats.sessions, key=keys[view.order], reverse=view.is_reversed)
    return Listing(
        ("session", "client", "role", "state", "reserved", "leases", "engine"),
        [
            (
                f"{one.session_id}",
                one.name or "-",
                one.role + (" by value" if one.by_value else ""),
                one.state,
                f"{one.reserved_count}",
                f"{one.lease_count}",
                one.engine_id.hex()[:8],
            )
            for one in chosen
        ],
        stretched=1,
    )


def _slow(stats: pb.StatsResponse) -> Listing:
    return Listing(
        ("ago", "call", "took", "blocks", "outcome", "session", "request"),
        [
            (
                duration_text(one.seconds_ago),
                one.call,
                f"{one.seconds:.3f} s",
                f"{one.block_count}",
                one.outcome,
                f"{one.session_id or '-'}",
                one.request_id or "-",
            )
            for one in stats.slow_calls
        ],
        stretched=6,
    )


def _section(
    name: str, listing: Listing, offset: int, count: int, *, is_focus: bool
) -> list[RenderableType]:
    total = len(listing.rows)
    title = Text(f"{name} ({total})", "bold cyan" if is_focus else "cyan", no_wrap=True)
    if count < total:
        title.append(f", {offset + 1} to {offset + count} shown", "dim")
    return [title, _table(listing, offset, count)]


def _table(listing: Listing, offset: int, count: int) -> Table:
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="dim", show_edge=False)
    for column, heading in enumerate(listing.headings):
        cells = [row[column] for row in listing.rows]
        is_number = bool(cells) and all(cell[:1].isdigit() or cell == "-" for cell in cells)
        table.add_column(
            heading,
            justify="right" if is_number and column != listing.stretched else "left",
            ratio=1 if column == listing.stretched else None,
            no_wrap=True,
            overflow="ellipsis",
        )
    for row in listing.rows[offset : offset + count]:
        table.add_row(*map(_cell, row))
    return table


def _cell(text: str) -> Text:
    """Names come from clients: nothing in them is markup, or moves the cursor."""
    return Text("".join(sign if sign.isprintable() else "�" for sign in text))


def _foot(view: View) -> Text:
    order = ORDERS[view.order] + (" reversed" if view.is_reversed else "")
    return Text(
        f"q quit  ? help  p pause  s sort: {order}  tab list  every {view.interval_seconds:g} s",
        "dim",
        no_wrap=True,
        overflow="ellipsis",
    )


def _help() -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for keys, meaning in KEYS:
        table.add_row(Text(keys, "bold"), meaning)
    head = Text("kvtier top: what the keys do\n", "bold")
    told = (
        "\nRates are of the time between the last two answers. A hit is a block that was asked "
        "for and\nfound; `late` is how long the daemon's event loop is behind."
    )
    return Group(head, table, Text(told, "dim"))


def duration_text(seconds: float) -> str:
    """`75` -> "1 min"."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 10 or value == 0 else f"{value:.1f}"
