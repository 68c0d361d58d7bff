"""One process offloads the KV of a prompt, another onboards it: the calls that an engine makes.

With a daemon at $KVTIER_SOCKET: python examples/offload_onboard.py offload
             in another process: python examples/offload_onboard.py onboard
"""

from __future__ import annotations

import hashlib
import sys
import time

import numpy as np

from kvtier.client import Client, Namespace
from kvtier.errors import KVTierError
from kvtier.namespace import NamespaceSpec

BLOCK_TOKENS, BLOCK_BYTES = 16, 64 << 10
SPEC = NamespaceSpec(  # What must agree for KV to be reusable; `extra` takes further facts.
    model="example",
    weights="sha256:none",  # A digest of the weights: the same name may get others.
    kv_dtype="uint8",
    layout="plain",
    block_tokens=BLOCK_TOKENS,
    shard_bytes=BLOCK_BYTES,
)
PROMPT = list(range(10 * BLOCK_TOKENS))


def chained_hashes(tokens: list[int]) -> list[bytes]:
    """One of each full block; it names the whole prefix up to and including that block."""
    hashes = [b""]
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = np.array(tokens[start : start + BLOCK_TOKENS], dtype="<u4")
        hashes.append(hashlib.sha256(hashes[-1] + block.tobytes()).digest())
    return hashes[1:]


def computed_kv(block_hash: bytes) -> np.ndarray:
    """Stands for what a model computes: bytes that follow from the prefix."""
    return np.frombuffer(hashlib.shake_128(block_hash).digest(BLOCK_BYTES), np.uint8)


def offload(client: Client, namespace: Namespace, hashes: list[bytes]) -> str:
    reserved = client.reserve(namespace, len(hashes))
    hashes = hashes[: len(reserved.slots)]  # Perhaps fewer slots than asked for.
    if not hashes:
        return "offloaded nothing: no room"
    with client.arena(namespace).hold(reserved.slots, reserved.session) as views:
        for block_hash, view in zip(hashes, views, strict=True):
            np.copyto(view, computed_kv(block_hash))
    outcomes = client.commit(  # READY, or PRESENT: somebody else had brought it.
        namespace, hashes, reserved.slots, session=reserved.session, epoch=reserved.epoch
    )
    return f"offloaded {len(hashes)} blocks: {sorted({one.name for one in outcomes})}"


def onboard(client: Client, namespace: Namespace, hashes: list[bytes]) -> str:
    lease = client.acquire(namespace, hashes)  # The longest resident prefix, pinned.
    if lease.lease_id is None:
        return f"onboarded nothing: {lease.cut.name}"
    with client.arena(namespace).hold(lease.slots, lease.session) as views:
        blocks = [view.copy() for view in views]
    in_time = time.monotonic_ns() < lease.deadline_ns  # A copy that ended later is a miss.
    client.release([lease])
    count = len(blocks) if in_time else 0  # The rest of the prompt is computed.
    equal = sum(np.array_equal(blocks[i], computed_kv(hashes[i])) for i in range(count))
    return f"onboarded {count} of {len(hashes)} blocks, {equal} equal"


if __name__ == "__main__":
    with Client(name="example") as client:  # Connects in the background; neither waits nor raises.
        namespace = client.open_namespace(SPEC)
        client.wait_namespace(namespace, timeout_seconds=2.0)  # An engine does not wait.
        try:
            act = {"offload": offload, "onboard": onboard}[sys.argv[1]]
            print(act(client, namespace, chained_hashes(PROMPT)))
        except KVTierError as error:  # Law 2: whatever is wrong with kvtier, compute.
            print(f"without kvtier: {type(error).__name__}: {error}")
