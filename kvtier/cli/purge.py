"""`kvtier purge`: make an end of all that a tenant or a namespace has, in every tier, for good.

It goes on in the daemon whether or not this command waits, and after a crash; asked for once more
it tells of the one that is under way. Exit codes: 0 done, 1 some of it could not be done (the
report says what, and why), 3 no daemon answers.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from kvtier.cli.connect import add_socket_argument, connected, tool_settings
from kvtier.cli.output import add_json_argument, bytes_text, print_json, say, table
from kvtier.client.client import Client
from kvtier.errors import BadRequest
from kvtier.v1 import kvtier_pb2 as pb

EXIT_INCOMPLETE = 1
POLL_SECONDS = 0.2
FINGERPRINT_CHARS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--tenant", metavar="NAME", help="all namespaces of this tenant")
    what.add_argument(
        "--namespace",
        metavar="ID",
        help="one namespace: its number in `kvtier stats`, or its fingerprint of 32 hex digits, "
        "which also names one that is not open now",
    )
    parser.add_argument("--no-wait", action="store_true", help="begin it and return")
    add_socket_argument(parser)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    request = _request(arguments)
    with connected(
        arguments.socket, name="kvtier purge", settings=tool_settings(arguments)
    ) as client:
        answer = client.purge(request)
        say(f"purge {answer.purge} is {answer.state}")
        if arguments.no_wait:
            return 0
        answer = _wait(client, answer)
    report = json.loads(answer.report)
    if arguments.json:
        print_json(report)
    else:
        print(report_text(report))
    return 0 if answer.state == "done" else EXIT_INCOMPLETE


def _request(arguments: argparse.Namespace) -> pb.PurgeRequest:
    if arguments.tenant is not None:
        return pb.PurgeRequest(tenant=arguments.tenant)
    name: str = arguments.namespace
    try:
        if len(name) == FINGERPRINT_CHARS:
            return pb.PurgeRequest(fingerprint=bytes.fromhex(name))
        return pb.PurgeRequest(namespace_id=int(name))
    except ValueError:
        raise BadRequest(
            f"--namespace {name}: give its number in `kvtier stats`, or 32 hex digits"
        ) from None


def _wait(client: Client, answer: pb.PurgeResponse) -> pb.PurgeResponse:
    """Until it has ended; each step, and what it waits for, is one line."""
    told = ""
    while not answer.report:
        line = f"{answer.step}: {answer.waits}" if answer.waits else answer.step
        if line != told:
            say(f"{line} ({bytes_text(answer.done_bytes)} erased so far)")
            told = line
        time.sleep(POLL_SECONDS)
        answer = client.purge(pb.PurgeRequest(purge=answer.purge))
    return answer


def report_text(report: dict[str, Any]) -> str:
    """For people."""
    seconds = report["ended_at"] - report["begun_at"]
    whose = f"tenant {report['tenant']}" if report["tenant"] else "one namespace"
    rows = [
        (
            tier,
            "?" if one["blocks"] is None else one["blocks"],
            one["places"],
            bytes_text(one["bytes"]) if one["bytes"] else "-",
        )
        for tier, one in report["tiers"].items()
    ]
    lines = [
        f"purge {report['id']} of {whose}: {report['state']} after {seconds:.1f} s",
        f"{len(report['fingerprints'])} namespaces, {report['begun_count']} lives of the daemon",
        table(("tier", "blocks", "places", "erased"), rows),
        *(f"removed besides: {one}" for one in report["books"]),
        *(f"NOT DONE: {one}" for one in report["not_done"]),
        *(f"not reached: {one}" for one in report["kept"]),
    ]
    return "\n".join(lines)
