"""A router works out the hashes of what the daemon announces, from the tokens in the events."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.engine.config import SamplingParams
from kvtier.engine.hashing import block_hash, root_hash
from tests.e2e.engine.test_engine_on_daemon import CONFIG, PROMPT, PROMPT_BLOCKS, engine_on
from tests.support.daemon import running_daemon
from tests.support.kv_subscriber import Subscriber

pytestmark = pytest.mark.slow


def test_hashes_follow_from_the_tokens_that_engines_send(socket_dir: Path) -> None:
    options = {
        "kv_events.bind": f"ipc://{socket_dir}/events",
        "kv_events.replay_bind": f"ipc://{socket_dir}/replay",
    }
    with (
        running_daemon(dram_bytes="16MiB", slab_bytes="4MiB", options=options) as daemon,
        Subscriber(f"ipc://{socket_dir}/events", f"ipc://{socket_dir}/replay") as reader,
        engine_on(daemon.socket) as connected,
    ):
        connected.engine.generate([PROMPT], SamplingParams(tokens_max=1))
        salted = SamplingParams(tokens_max=1)
        list(connected.engine.stream(PROMPT[:40], salted, cache_salt="s"))
        assert connected.engine.wait_offloads(15.0)
        reader.read(0.3)
        assert len(reader.books["CPU", "LOCAL"]) > PROMPT_BLOCKS  # The salted ones too …
        known: dict[bytes, bytes | None] = {}
        for event in reader.stored.values():
            size, tokens = event["block_size"], event["token_ids"]
            before = event["parent_block_hash"]
            for place, named in enumerate(event["block_hashes"]):
                root = root_hash(CONFIG.hash_seed) if before is None else before
                assert block_hash(root, tokens[place * size : (place + 1) * size]) == named
                known[named] = before
                before = named
        assert len(known) == PROMPT_BLOCKS  # … which are told by hash alone.
