"""`kvtier selftest vllm --model MODEL`: your own vLLM, on whatever it runs on, with and without us.

Starts vLLM's engine several times, one after the other, and a private daemon beside it (or uses the
one that --socket names). Exit codes: 0 when every check holds; 1 when one does not; 2 for a mistake
in the arguments; 3 when vLLM cannot be imported or started, or no daemon answers.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtier.cli.connect import connected
from kvtier.cli.output import add_json_argument, print_json, say
from kvtier.cli.private_daemon import PrivateDaemon, private_daemon
from kvtier.cli.selftest_engine import EngineStarter
from kvtier.cli.selftest_judge import Limits, judge
from kvtier.cli.selftest_play import Play, PlayOptions
from kvtier.cli.selftest_report import Report
from kvtier.cli.sizes import positive, size
from kvtier.errors import ConfigError
from kvtier.paths import default_socket_path

EXIT_CHECK_FAILED = 1
_TOKENS_MIN = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engines = parser.add_subparsers(dest="engine", metavar="ENGINE", required=True)
    child = engines.add_parser("vllm", help="vLLM", description=__doc__.split("\n", maxsplit=1)[0])
    child.add_argument("--model", required=True, metavar="MODEL", help="as for `vllm serve`")
    child.add_argument(
        "--vllm-arg",
        action="append",
        default=[],
        metavar="ARGS",
        help="what else your engine is started with, such as --vllm-arg='--max-model-len 8192'; "
        "may be given several times",
    )
    child.add_argument(
        "--connector-option",
        action="append",
        default=[],
        type=_option,
        metavar="NAME=VALUE",
        help="for kv_connector_extra_config, such as kvtier.onboard_wait_seconds=0.2",
    )
    child.add_argument(
        "--python", default=sys.executable, metavar="PATH", help="vLLM's Python (this one)"
    )
    child.add_argument("--socket", metavar="PATH", help="a running daemon's; else one is started")
    child.add_argument(
        "--dram-bytes", type=size, default=2 << 30, help="of the daemon that is started (2GiB)"
    )
    _add_limit_arguments(child)
    child.add_argument("--report", type=Path, metavar="FILE", help="for the report in Markdown")
    add_json_argument(child)


def _add_limit_arguments(child: argparse.ArgumentParser) -> None:
    child.add_argument("--tokens", type=positive, default=1500, help="of each prompt (1500)")
    child.add_argument("--prompts", type=positive, default=4, help="prompts asked for again (4)")
    child.add_argument("--output-tokens", type=positive, default=32, help="of each answer (32)")
    child.add_argument(
        "--rounds", type=positive, default=2, help="engines without and with kvtier, in turns (2)"
    )
    child.add_argument("--requests", type=positive, default=16, help="of each load of misses (16)")
    child.add_argument(
        "--warm-ratio-max",
        type=_positive_number,
        default=0.5,
        help="the most that a hit's time to first token may be of a cold one's (0.5)",
    )
    child.add_argument(
        "--overhead-max",
        type=_positive_number,
        default=0.1,
        help="the most that a load of misses may take longer (0.1)",
    )
    child.add_argument(
        "--start-seconds", type=positive, default=1800, help="the longest start of vLLM (1800)"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.tokens < _TOKENS_MIN:
        raise ConfigError(f"--tokens is {arguments.tokens}: at least {_TOKENS_MIN} are needed")
    if arguments.report is not None:
        _check_writable(arguments.report)
    starter = EngineStarter(
        python=arguments.python,
        arguments=["--model", arguments.model, *_words(arguments.vllm_arg)],
        start_seconds=float(arguments.start_seconds),
        environment=os.environ,
    )
    starter.check()
    options = PlayOptions(
        tokens=arguments.tokens,
        prompt_count=arguments.prompts,
        output_tokens=arguments.output_tokens,
        rounds=arguments.rounds,
        request_count=arguments.requests,
        seed=secrets.randbits(32),
    )
    with _daemon(arguments) as (socket, daemon):
        transfer = transfer_of(socket, dict(arguments.connector_option))
        play = Play(options, lambda with_kvtier: starter(transfer if with_kvtier else None), daemon)
        seen = play.run()
    limits = Limits(arguments.warm_ratio_max, arguments.overhead_max)
    report = Report(options, limits, seen, judge(seen, limits), tuple(starter.arguments))
    return _tell(report, arguments)


def _tell(report: Report, arguments: argparse.Namespace) -> int:
    if arguments.report is not None:
        arguments.report.write_text(report.markdown(), encoding="utf-8")
        say(f"report: {arguments.report}")
    if arguments.json:
        print_json(report.facts())
    elif arguments.report is None:
        print(report.markdown())
    for verdict in report.verdicts:
        say(f"{verdict.mark} {verdict.claim}: {verdict.detail}")
    return 0 if report.holds else EXIT_CHECK_FAILED


def transfer_of(socket: Path, options: dict[str, Any]) -> dict[str, Any]:
    """What a user passes as --kv-transfer-config."""
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.connector.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        # A small model may compute faster than it loads; whether loads are right is asked here.
        "kv_connector_extra_config": {
            "kvtier.socket": str(socket),
            "kvtier.onboard": "always",
            **options,
        },
    }


@contextmanager
def _daemon(arguments: argparse.Namespace) -> Iterator[tuple[Path, PrivateDaemon | None]]:
    """Its socket; and the daemon itself where it is ours to kill."""
    if arguments.socket is not None:
        with connected(arguments.socket, name="kvtier selftest"):
            pass  # It is there.
        yield Path(arguments.socket or default_socket_path()), None
        return
    with private_daemon({"dram.bytes": str(arguments.dram_bytes)}) as daemon:
        yield daemon.socket, daemon


def _check_writable(path: Path) -> None:
    """Before minutes are spent."""
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(f"--report {path}: {error.strerror}") from error


def _words(texts: list[str]) -> list[str]:
    try:
        words = [word for text in texts for word in shlex.split(text)]
    except ValueError as error:
        raise ConfigError(f"--vllm-arg: {error}") from error
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if name in ("--model", "--kv-transfer-config", "--no-enable-prefix-caching"):
            raise ConfigError(f"--vllm-arg {name}: this is set by the self-test; leave it away")
    return words


def _option(text: str) -> tuple[str, object]:
    """For argparse: a value is JSON where it can be read so, else a text."""
    name, sign, value = text.partition("=")
    if not sign or not name.startswith("kvtier."):
        raise argparse.ArgumentTypeError(f"{text!r}: write kvtier.NAME=VALUE, see docs/vllm.md")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _positive_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number
