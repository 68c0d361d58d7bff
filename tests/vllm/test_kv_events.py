"""The daemon's events, read as vLLM reads its own, are about the blocks that vLLM means."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import BlockStored, KVEventBatch
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from kvtier.connector.vllm.plain import tokens_of
from tests.support.daemon import running_daemon
from tests.vllm.engines import prompt_of
from tests.vllm.test_engine import kvtier_engine
from tests.vllm.versions import needs_engine

pytestmark = [pytest.mark.vllm, needs_engine, pytest.mark.timeout(300)]


def test_vllm_reads_them_and_finds_its_own_hashes(tiny_llama: Path, socket_dir: Path) -> None:
    options = {"kv_events.bind": f"ipc://{socket_dir}/events", "kv_events.node": "n1"}
    decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
    with (
        running_daemon(dram_bytes="64MiB", slab_bytes="16MiB", options=options) as daemon,
        zmq.Context() as context,
        context.socket(zmq.SUB) as socket,
    ):
        socket.connect(f"ipc://{socket_dir}/events")
        socket.setsockopt_string(zmq.SUBSCRIBE, "kv@n1@")
        with kvtier_engine(tiny_llama, daemon) as engine:
            cache = engine.llm.llm_engine.vllm_config.cache_config
            hashed = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
            engine.generate([prompt_of(100), prompt_of(170, seed=2)])
            engine.settle()
        stored: list[BlockStored] = []
        sequence = 0
        while socket.poll(500):
            _, number, payload = socket.recv_multipart()
            assert int.from_bytes(number, "big") == sequence
            sequence += 1
            stored += [e for e in decoder.decode(payload).events if isinstance(e, BlockStored)]
    known: set[bytes] = set()
    for event in stored:
        assert event.medium == "CPU"
        assert len(event.token_ids) == event.block_size * len(event.block_hashes)
        before = event.parent_block_hash
        assert before is None or before in known
        for place, named in enumerate(event.block_hashes):
            tokens = event.token_ids[place * event.block_size : (place + 1) * event.block_size]
            assert kv_cache_utils.hash_block_tokens(hashed, before, tokens, None) == named
            known.add(named)
            before = named
    assert len(known) >= 3 + 5


@pytest.mark.parametrize(
    "extra",
    [
        {"lora_request": object()},
        {"mm_features": [object()]},
        {"cache_salt": "s"},
        {"prompt_embeds": object()},
    ],
)
def test_hash_of_more_than_tokens_is_told_alone(extra: dict[str, object]) -> None:
    plain = {"lora_request": None, "mm_features": [], "cache_salt": None, "prompt_embeds": None}
    ids = list(range(64))
    found = tokens_of(SimpleNamespace(all_token_ids=ids, **plain), 32)
    assert found is not None
    assert found(1) == ids[32:]
    assert tokens_of(SimpleNamespace(all_token_ids=ids, **{**plain, **extra}), 32) is None
