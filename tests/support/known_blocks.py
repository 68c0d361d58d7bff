"""Blocks whose bytes follow from their hash, so that any process can tell right ones from wrong.

Owns the offloading and onboarding of such blocks through a real client's arena.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvtier.client import Client, Namespace, Reservation
from kvtier.client.values import Lease
from kvtier.memory import Bytes
from kvtier.namespace import NamespaceSpec
from kvtier.types import CommitOutcome

SHARD_BYTES = 128 << 10
PIECES = 8
RESERVE_SECONDS_MAX = 20.0


class WrongBytes(AssertionError):
    """A block's bytes are not those of its hash: the one thing that may never happen."""


def spec_of(salt: str = "", shard_bytes: int = SHARD_BYTES) -> NamespaceSpec:
    return NamespaceSpec("crash", "v1", "bfloat16", "nhd", 16, shard_bytes, salt=salt)


def chain_hashes(label: str, count: int) -> list[bytes]:
    """The block hashes of one prefix; another label shares none of them."""
    return [hashlib.sha256(f"{label}/{place}".encode()).digest() for place in range(count)]


def payload_of(block_hash: bytes, count_bytes: int = SHARD_BYTES) -> Bytes:
    """Different at every place, so that a torn or shifted block is not right by chance."""
    words = np.random.SFC64(int.from_bytes(block_hash, "big")).random_raw(count_bytes // 8)
    return np.asarray(words, np.uint64).view(np.uint8)


def check_payload(block_hash: bytes, found: Bytes | bytes, where: str) -> None:
    right = payload_of(block_hash, len(found))
    if not np.array_equal(np.frombuffer(found, np.uint8), right):
        count = int(np.count_nonzero(np.frombuffer(found, np.uint8) != right))
        raise WrongBytes(f"{where}: {count} of {len(found)} bytes are not those of the hash")


def copy_in_pieces(view: Bytes, payload: Bytes, pause: Callable[[], None]) -> None:
    """A copy that can be interrupted between its pieces, as DMA can."""
    step = len(view) // PIECES
    for start in range(0, len(view), step):
        view[start : start + step] = payload[start : start + step]
        pause()


def reserve(client: Client, namespace: Namespace, count: int) -> Reservation:
    """At least one slot and at most `count`; TimeoutError when there is none for long."""
    deadline = time.monotonic() + RESERVE_SECONDS_MAX
    while time.monotonic() < deadline:
        reservation = client.reserve(namespace, count)
        if len(reservation.slots):
            return reservation
        time.sleep(0.01)
    raise TimeoutError(f"no slot was given in {RESERVE_SECONDS_MAX} s")


def offload(
    client: Client,
    namespace: Namespace,
    hashes: Sequence[bytes],
    *,
    pause: Callable[[], None] = lambda: None,
    acknowledge: Callable[[int], None] = lambda count: None,
) -> int:
    """Reserve, copy and commit; how many blocks of the chain are resident by the daemon's word.

    `acknowledge(count)` is called after each commit.
    """
    done = 0
    while done < len(hashes):
        given = reserve(client, namespace, len(hashes) - done)
        now = hashes[done : done + len(given.slots)]
        with client.arena(namespace).hold(given.slots, given.session) as views:
            for view, one in zip(views, now, strict=True):
                copy_in_pieces(view, payload_of(one, len(view)), pause)
        parent = hashes[done - 1] if done else None
        outcomes = client.commit(
            namespace, now, given.slots, parent=parent, session=given.session, epoch=given.epoch
        )
        good = [CommitOutcome.READY, CommitOutcome.PRESENT]
        fresh = next((at for at, one in enumerate(outcomes) if one not in good), len(outcomes))
        done += fresh
        acknowledge(done)
        if fresh < len(outcomes):
            return done
    return done


def read_leased(client: Client, namespace: Namespace, lease: Lease) -> list[bytes] | None:
    """The leased bytes; None when the read ended too late to count."""
    with client.arena(namespace).hold(lease.slots, lease.session) as views:
        found = [view.tobytes() for view in views]
    return found if time.monotonic_ns() < lease.deadline_ns else None


def onboard(
    client: Client, namespace: Namespace, hashes: Sequence[bytes], *, wait_seconds: float = 0.0
) -> int:
    """Acquire, compare and release; how many leading blocks were hits. Raises WrongBytes."""
    lease = client.acquire(namespace, hashes, wait_seconds=wait_seconds)
    try:
        found = read_leased(client, namespace, lease)
    finally:
        client.release([lease])
    if found is None:
        return 0
    for one, data in zip(hashes, found, strict=False):
        check_payload(one, data, "onboarded through the arena")
    return len(found)
