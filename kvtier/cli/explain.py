"""`kvtier explain HASH|REQUEST`: where a prefix is, and why it is not elsewhere.

HASH is a whole block hash in hex: it names the prefix that ends with its block. REQUEST is an
engine's own id of a request. Exit codes: 0; 1 when the daemon knows neither; 3 when none answers.
"""

from __future__ import annotations

import argparse

from kvtier.cli.connect import add_socket_argument, connected, tool_settings
from kvtier.cli.explain_text import places_text, remembered_text, request_text, tiers_text
from kvtier.cli.output import add_json_argument, plain, print_json
from kvtier.v1 import kvtier_pb2 as pb

EXIT_UNKNOWN = 1
_HEX_MIN, _HEX_MAX = 32, 64  # Of a hash of 16 to 32 bytes.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "about", metavar="HASH|REQUEST", help="a whole block hash in hex, or an engine's request id"
    )
    add_socket_argument(parser)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    about: str = arguments.about
    block = hash_of(about)
    with connected(
        arguments.socket, name="kvtier explain", settings=tool_settings(arguments)
    ) as client:
        answer = client.explain(request_id=about)
        if block is not None and not answer.requests:  # An id may look like a hash.
            answer = client.explain(block=block)
    if arguments.json:
        print_json(plain(answer))
    else:
        print(text_of(about, block, answer))
    return 0 if answer.places or answer.requests else EXIT_UNKNOWN


def hash_of(text: str) -> bytes | None:
    """The hash that the words are, if they are one."""
    if not _HEX_MIN <= len(text) <= _HEX_MAX or len(text) % 2:
        return None
    try:
        return bytes.fromhex(text)
    except ValueError:
        return None


def text_of(about: str, block: bytes | None, answer: pb.ExplainResponse) -> str:
    """For people."""
    parts = [request_text(one, is_latest=not place) for place, one in enumerate(answer.requests)]
    if answer.places:
        parts.append(places_text(about, answer))
    if not parts:
        parts.append(_unknown_text(about, block, answer))
    parts += [tiers_text(answer), remembered_text(answer)]
    return "\n\n".join(part for part in parts if part)


def _unknown_text(about: str, block: bytes | None, answer: pb.ExplainResponse) -> str:
    if block is not None:
        return (
            f"no namespace knows {about}: no block under it was stored, evicted or asked for as "
            "far as is remembered. Is it the hash that this engine uses (algorithm, seed)?"
        )
    return (
        f"no request {about!r} is remembered, and it is no whole block hash ({_HEX_MIN} to "
        f"{_HEX_MAX} hex digits). Engines name their requests with Match and Acquire; the oldest "
        "are forgotten first (log.history_bytes)."
    )
