"""Which NUMA node memory lies on: bind a mapping to one, and ask the kernel where its pages are.

Straight system calls: no libnuma is needed. Each lets go of the GIL.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Mapping as Dict

import numpy as np

from kvtier.memory import Mapping

ABSENT = -1
"""Stands for pages that nobody has touched yet, among nodes."""

_MPOL_BIND = 2
# The node is meant by its number in the whole machine, whatever a cpuset allows us later.
_MPOL_F_STATIC_NODES = 1 << 15
_MASK_BITS = 64
_NUMBERS = {
    "x86_64": {"mbind": 237, "move_pages": 279},
    "aarch64": {"mbind": 235, "move_pages": 239},
}

_libc = ctypes.CDLL(None, use_errno=True)


class WrongNode(OSError):
    """Pages do not lie on the node that they were bound to; the message says where they are."""


def bind_to_node(mapping: Mapping, node: int) -> None:
    """Have all pages of the mapping that do not exist yet come from this node, or not at all.

    The rule belongs to the file, if it is a memfd: whoever touches a page of it first, from
    whatever process, gets one of this node. Raises OSError.
    """
    words = node // _MASK_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _MASK_BITS] = 1 << node % _MASK_BITS
    done = _libc.syscall(
        ctypes.c_long(_number("mbind")),
        ctypes.c_void_p(mapping.address),
        ctypes.c_ulong(mapping.length_bytes),
        ctypes.c_int(_MPOL_BIND | _MPOL_F_STATIC_NODES),
        mask,
        ctypes.c_ulong(words * _MASK_BITS + 1),  # The kernel takes one off.
        ctypes.c_uint(0),
    )
    if done != 0:
        number = ctypes.get_errno()
        reason = os.strerror(number)
        if number == errno.EINVAL:
            reason = "no such node, none with memory, or none that our cpuset allows"
        raise OSError(number, f"binding memory to node {node}: {reason}")


def count_pages_by_node(
    mapping: Mapping, first: int = 0, length_bytes: int | None = None, *, step_bytes: int = 0
) -> dict[int, int]:
    """How many pages of the range lie on which node, ABSENT for those that do not exist.

    Every page is asked for, or the one at each `step_bytes`. Raises OSError.
    """
    length = mapping.length_bytes - first if length_bytes is None else length_bytes
    assert 0 <= first <= mapping.length_bytes - length, "outside the mapping"
    start = mapping.address + first
    pages = np.arange(start, start + length, step_bytes or mmap.PAGESIZE, dtype=np.uint64)
    nodes = np.full(len(pages), ABSENT, dtype=np.int32)
    done = _libc.syscall(
        ctypes.c_long(_number("move_pages")),
        ctypes.c_int(0),  # Of this process.
        ctypes.c_ulong(len(pages)),
        ctypes.c_void_p(pages.ctypes.data),
        None,  # Nowhere to move them: only ask.
        ctypes.c_void_p(nodes.ctypes.data),
        ctypes.c_int(0),
    )
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"asking where pages lie: {os.strerror(number)}")
    counts = np.bincount(np.maximum(nodes, ABSENT) - ABSENT)  # Far faster than `unique`.
    return {node + ABSENT: int(counts[node]) for node in np.flatnonzero(counts).tolist()}


def verify_on_node(
    mapping: Mapping,
    node: int,
    first: int = 0,
    length_bytes: int | None = None,
    *,
    step_bytes: int = 0,
) -> None:
    """Raise WrongNode unless every page asked for lies on the node."""
    counts = count_pages_by_node(mapping, first, length_bytes, step_bytes=step_bytes)
    if text := elsewhere_text(counts, node):
        raise WrongNode(errno.EXDEV, text)


def elsewhere_text(counts: Dict[int, int], node: int) -> str:
    """What to say of pages that are not on the node; empty when all are."""
    others = [
        f"{count} {'do not exist' if where == ABSENT else f'lie on node {where}'}"
        for where, count in sorted(counts.items())
        if where != node
    ]
    if not others:
        return ""
    total = sum(counts.values())
    return f"of {total} pages asked for, which should lie on node {node}, {', '.join(others)}"


def _number(call: str) -> int:
    machine = os.uname().machine
    if machine not in _NUMBERS:
        raise OSError(errno.ENOSYS, f"no {call} on {machine}: memory cannot be bound to a node")
    return _NUMBERS[machine][call]
