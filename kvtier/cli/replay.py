"""`kvtier replay`: make the decisions of a recorded daemon again, and compare them."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from kvtier.cli.output import add_json_argument, print_json, say
from kvtier.cli.progress import Progress
from kvtier.core.instructions import Instruction
from kvtier.errors import BadRequest
from kvtier.recording.replaying import Difference, Replay, Replayed, recorded_batches
from kvtier.server.policies import policy_named

TEXT_MAX = 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", type=Path, help="first file of a recording ([recorder] in the configuration)"
    )
    parser.add_argument("--policy", help="another eviction policy: where decisions first differ")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """0: every decision is the same; 1: one is not, or the recording is damaged from there on."""
    replay: Replay | None = None
    began = time.monotonic()
    damage = ""
    progress = Progress("events")
    try:
        for header, batch in recorded_batches(arguments.file):
            if replay is None:
                replay = Replay(header, policy_named(arguments.policy or header.policy))
            if batch is not None and replay.run(batch) is not None:
                break
            progress.show(replay.state.event_count)
    except BadRequest as error:
        if replay is None:
            raise
        damage = str(error)
    progress.end()
    assert replay is not None, "a recording has a header"
    violations = replay.manager.check_invariants()
    took = time.monotonic() - began
    _tell(arguments, replay.state, [damage] if damage else violations, took)
    return 1 if damage or violations or replay.state.difference else 0


def _tell(arguments: argparse.Namespace, state: Replayed, wrong: list[str], took: float) -> None:
    count = state.event_count - (state.difference is not None)
    if arguments.json:
        print_json(
            {
                "events": count,
                "recorded_seconds": state.seconds,
                "replay_seconds": took,
                "difference": None if state.difference is None else _told(state.difference),
                "wrong": wrong,
            }
        )
    else:
        sys.stdout.write(
            f"{count:,} events of {state.seconds:.1f} s led to the decisions recorded "
            f"({took:.1f} s, {count / max(took, 1e-9):,.0f} events/s)\n"
        )
    if state.difference is not None:
        for line in _told(state.difference).values():
            say(f"kvtier: {line}")
    for line in wrong:
        say(f"kvtier: {line}")


def _told(difference: Difference) -> dict[str, str]:
    return {
        "first": f"event {difference.number} is the first that led to something else: "
        + _short(difference.event),
        "recorded": "recorded: "
        + (
            f"refused with {difference.refused}"
            if difference.refused
            else "not refused; of its instructions there is only a digest"
        ),
        "now": "now: "
        + (
            f"refused with {difference.refused_now}"
            if difference.refused_now
            else "; ".join(map(_short, difference.found)) or "no instructions"
        ),
    }


def _short(value: object | Instruction) -> str:
    text = repr(value)
    return text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]}…"
