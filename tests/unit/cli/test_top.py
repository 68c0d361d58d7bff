"""The parts of `kvtier top` that need neither terminal nor daemon."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvtier.cli.top_rates import Rates, Sample
from kvtier.cli.top_screen import KEYS, View, frame, shared_rows
from kvtier.cli.top_terminal import keys_of
from kvtier.v1 import kvtier_pb2 as pb

MATCH = '{call="match"}'


def stats(
    seconds: float, *, asked: float = 0, missed: float = 0, **fields: object
) -> pb.StatsResponse:
    counters = {
        f"kvtier_asked_blocks_total{MATCH}": asked,
        f"kvtier_miss_blocks_total{MATCH}": missed,
    }
    return pb.StatsResponse(
        generation=7,
        uptime_seconds=seconds,
        counters=counters,
        tiers=[pb.TierStats(tier="dram", budget_bytes=1 << 30)],
        **fields,  # type: ignore[arg-type]
    )


def crowded(count: int) -> pb.StatsResponse:
    return stats(
        9.0,
        namespaces=[
            pb.NamespaceStats(namespace_id=one, model=f"model-{one:03}", block_count=one)
            for one in range(count)
        ],
        sessions=[pb.SessionStats(session_id=one, name=f"client-{one:03}") for one in range(count)],
        slow_calls=[pb.SlowCall(call="Acquire", request_id=f"slow-{one}") for one in range(count)],
    )


def drawn(view: View, *, width: int = 80, height: int | None = 24) -> list[str]:
    console = Console(width=width, file=io.StringIO(), no_color=True)
    with console.capture() as captured:
        console.print(frame(view, height=height, now=100.0))
    return captured.get().splitlines()


def test_rates_are_what_grew_by_the_time_in_between() -> None:
    rates = Rates(
        Sample(10.0, stats(5.0, asked=100, missed=50)),
        Sample(12.0, stats(7.0, asked=140, missed=60)),
    )
    assert rates.per_second(f"kvtier_asked_blocks_total{MATCH}") == 20.0
    assert rates.hit_share("match") == 0.75
    assert rates.per_second("kvtier_unknown_total") is None


def test_a_daemon_that_began_anew_has_no_rates_yet() -> None:
    rates = Rates(Sample(10.0, stats(500.0, asked=100)), Sample(12.0, stats(1.0, asked=3)))
    assert rates.per_second(f"kvtier_asked_blocks_total{MATCH}") is None
    assert Rates(None, Sample(1.0, stats(1.0))).hit_share("match") is None


def test_the_focus_has_what_the_others_leave() -> None:
    assert shared_rows([9, 9, 9], 100, 0) == [9, 9, 9]
    assert shared_rows([9, 9, 9], 10, 2) == [2, 2, 6]
    assert shared_rows([9, 0, 1], 8, 1) == [7, 0, 1]
    assert shared_rows([9, 9, 9], 1, 1) == [0, 1, 0]
    assert shared_rows([9, 9, 9], -5, 0) == [0, 0, 0]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (80, 12), (40, 24)])
@pytest.mark.parametrize("focus", [0, 1, 2])
def test_a_frame_fits_its_terminal_however_much_there_is(
    width: int, height: int, focus: int
) -> None:
    view = View("/run/kvtier.sock", 1.0, sample=Sample(1.0, crowded(300)), focus=focus)
    lines = drawn(view, width=width, height=height)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)


def test_scrolling_ends_with_the_last_row() -> None:
    view = View("x", 1.0, sample=Sample(1.0, crowded(300)), focus=1, offset=299, order=2)
    assert any("client-299" in line for line in drawn(view))


def test_namespaces_are_sorted_by_size_name_or_number_and_back() -> None:
    view = View("x", 1.0, sample=Sample(1.0, crowded(5)))

    def first() -> str:
        return next(line for line in drawn(view) if "model-" in line)

    view.sample.stats.namespaces[0].block_bytes = 1  # type: ignore[union-attr]
    for one in view.sample.stats.namespaces:  # type: ignore[union-attr]
        one.block_bytes = 10
    assert "model-004" in first()
    view.order = 1
    assert "model-000" in first()
    view.is_reversed = True
    assert "model-004" in first()


def test_a_name_that_a_client_gave_itself_moves_no_cursor() -> None:
    bad = stats(1.0, sessions=[pb.SessionStats(session_id=1, name="\x1b[2J[red]evil")])
    text = "\n".join(drawn(View("x", 1.0, sample=Sample(1.0, bad))))
    assert "\x1b" not in text
    assert "[red]evil" in text


def test_a_frame_for_scripts_has_every_row() -> None:
    view = View("x", 1.0, sample=Sample(1.0, crowded(300)))
    lines = drawn(view, height=None)
    assert sum("client-" in line for line in lines) == 300
    assert not any("quit" in line for line in lines)


def test_the_help_names_every_key() -> None:
    text = "\n".join(drawn(View("x", 1.0, shows_help=True)))
    assert all(meaning.split(":")[0] in text for _, meaning in KEYS)


def test_keys_are_read_and_unknown_sequences_are_none() -> None:
    assert keys_of(b"qp \t") == ["q", "p", " ", "tab"]
    assert keys_of(b"\x1b[A\x1b[Bj") == ["up", "down", "j"]
    assert keys_of(b"\x1b[15~s\x1b[1;5Cq") == ["s", "q"]
