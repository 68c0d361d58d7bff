"""The reference engine with a tiny model, on a daemon's socket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from kvtier.client import Client, ClientSettings
from kvtier.connector import ConnectorSettings
from kvtier.engine.config import EngineConfig, SamplingParams
from kvtier.engine.connect import ConnectedEngine, connected_engine
from kvtier.engine.hashing import HashChain
from kvtier.engine.model import LlamaModel
from kvtier.engine.prefix_index import Prefix
from kvtier.policy.load_or_recompute import OnboardWish
from kvtier.types import BlockHash
from tests.support.tiny_models import tiny_model

CONFIG = EngineConfig(block_tokens=4, device_block_count=160)
# A busy machine must not turn hits into misses, where a test is about bytes and not about waits.
PATIENT = ConnectorSettings(
    onboard=OnboardWish.ALWAYS,  # However fast a tiny model computes.
    onboard_wait_seconds=10.0,
    finish_wait_seconds=10.0,
    raise_internal_errors=True,
)
PATIENT_CLIENT = ClientSettings(timeout_seconds=5.0)


@contextmanager
def engine_on(
    client: Client,
    *,
    model: LlamaModel | None = None,
    salt: str = "",
    settings: ConnectorSettings = PATIENT,
) -> Iterator[ConnectedEngine]:
    """Connected, with its namespace open; closes the client as well."""
    try:
        with connected_engine(
            model or tiny_model(), CONFIG, client, salt=salt, settings=settings
        ) as connected:
            assert connected.wait_ready(10.0)
            yield connected
    finally:
        client.close()


def patient_client(socket: Path) -> Client:
    return Client(socket, settings=PATIENT_CLIENT)


def offload_prompts(
    connected: ConnectedEngine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[tuple[int, ...]]:
    """Run the prompts, and see that kvtier has all their full blocks; the tokens they gave.

    One after another: together they may need more device blocks than there are, and an engine that
    runs short of them does not wait for offloads.
    """
    namespace = connected.client.open_namespace(connected.spec)
    chains = [hashes_of(prompt) for prompt in prompts]
    results = []
    for prompt in prompts:
        results.extend(connected.engine.generate([prompt], params))
        assert connected.engine.wait_offloads(15.0)
    matched = [connected.client.match(namespace, hashes).matched_count for hashes in chains]
    assert matched == [len(hashes) for hashes in chains], connected.scheduler.stats()
    return [result.token_ids for result in results]


def hashes_of(token_ids: Sequence[int]) -> list[BlockHash]:
    """The block hashes under which the engine of `CONFIG` knows these tokens."""
    chain = HashChain(seed=CONFIG.hash_seed, block_tokens=CONFIG.block_tokens)
    chain.extend(token_ids)
    return chain.hashes


def device_bytes(connected: ConnectedEngine, token_ids: Sequence[int]) -> list[bytes]:
    """The bytes of the device blocks that hold the tokens' full blocks."""
    engine = connected.engine
    device_blocks = engine.scheduler.pool.index.match(Prefix(token_ids, hashes_of(token_ids)))
    return [engine.kv_cache[block].view(torch.uint8).numpy().tobytes() for block in device_blocks]


def wait_until(is_so: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if is_so():
            return True
        time.sleep(0.02)
    return is_so()
