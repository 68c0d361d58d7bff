"""The call lane: the calls of engines over a plain Unix stream, beside gRPC; shared by both sides.

gRPC costs 0.6 ms a call on the machine we measure on, ten times what the calls themselves cost
(docs/decisions/0008). The lane carries the same messages with the same tokens, statuses and
meanings. One connection, one call at a time:

    request   4 bytes  payload length, little-endian    1 byte  call number     payload
    answer    4 bytes  payload length, little-endian    1 byte  gRPC status     payload

The payload of an answer is the message when the status is 0 (OK), else the text of the error.
A connection that is closed in mid-call cancels the call. A daemon that has no room for a connection
answers its first call with REFUSED, runs nothing and closes; the client then uses gRPC.
"""

from __future__ import annotations

import struct

HEAD = struct.Struct("<IB")
PAYLOAD_BYTES_MAX = 4 << 20  # As gRPC's here: the largest message is a Match of 1 MiB of hashes.

REFUSED = 255
"""In the place of the status: nothing was run."""

LANE_CALLS = ("Match", "Acquire", "Release", "Reserve", "Commit", "Abort")
"""Index: the call number. Only appended to. An Acquire has one answer here, the final one."""


def pack(number: int, payload: bytes) -> bytes:
    """One frame, of either direction."""
    return HEAD.pack(len(payload), number) + payload
