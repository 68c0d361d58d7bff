"""One engine in a process of its own: JSON lines in, JSON lines out, until the input ends.

in   load, ask, checksums, gap
out  ready, token (many for one ask), answer, checksums, gap
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from kvtier.checksum import shard_checksum
from kvtier.demo.handbook import HANDBOOK
from kvtier.engine.attention import plan_attention
from kvtier.engine.config import EngineConfig, SamplingParams
from kvtier.engine.engine import Engine
from kvtier.engine.files.gguf_file import BadModelFile
from kvtier.engine.files.smollm2 import load_smollm2
from kvtier.engine.files.tokenizer import Tokenizer
from kvtier.engine.hashing import HashChain
from kvtier.engine.kv_cache import make_kv_cache
from kvtier.engine.prefix_index import Prefix

if TYPE_CHECKING:
    from kvtier.connector import ConnectorStats
    from kvtier.engine.connect import ConnectedEngine

Message = dict[str, object]

CONFIG = EngineConfig(device_block_count=160)
WARM_TOKENS_MAX = 4
# Has nothing in common with what is asked later.
WARM_TEXT = "Count from one to twenty, then back again, and say which numbers you liked best. " * 3
READY_SECONDS_MAX = 10.0
# A cold prefill takes seconds here, so waiting this long for its KV pays, on a busy machine too.
ONBOARD_WAIT_SECONDS = 1.0
# Likewise for what is on NVMe, on a slow disk too.
NVME_BYTES_PER_SECOND = 50e6
NVME_WAIT_SECONDS_MAX = 4.0
CALL_SECONDS_MAX = 0.5
OFFLOAD_SECONDS_MAX = 10.0


class EngineWorker:
    """Answers the demo's orders with one engine."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, connected: ConnectedEngine | None):
        self._engine = engine
        self._tokenizer = tokenizer
        self._connected = connected

    def warm_up(self) -> None:
        """Imports, thread pools and first touches of memory are no part of any TTFT."""
        self._engine.kv_cache.zero_()
        params = SamplingParams(tokens_max=WARM_TOKENS_MAX)
        self._engine.generate([self._tokenizer.encode(WARM_TEXT)], params)
        self._engine.wait_offloads(OFFLOAD_SECONDS_MAX)

    def ready(self, seconds: float) -> Message:
        count = len(self._tokenizer.encode(HANDBOOK))
        return {"what": "ready", "seconds": seconds, "document_token_count": count}

    def ask(self, order: Message) -> Iterator[Message]:
        """The tokens as they come, then the answer with its account."""
        prompt = [*_numbers(order["history"]), *self._tokenizer.encode_chat(str(order["text"]))]
        params = SamplingParams(
            tokens_max=cast(int, order["tokens_max"]),
            stop_token_ids=frozenset([self._tokenizer.end_id]),
        )
        before = self._stats()
        decoder = self._tokenizer.stream_decoder()
        result = None
        for output in self._engine.stream(prompt, params):
            yield {"what": "token", "text": decoder.feed(output.token_id)}
            result = output.result or result
        assert result is not None, "the last token comes with the result"
        self._engine.wait_offloads(OFFLOAD_SECONDS_MAX)
        text = self._tokenizer.decode(
            token for token in result.token_ids if token != self._tokenizer.end_id
        )
        yield {
            "what": "answer",
            "history": [*prompt, *result.token_ids],
            "is_ended": result.token_ids[-1] == self._tokenizer.end_id,
            "engine_cache_count": result.engine_cache_count,
            "kvtier_count": result.kvtier_count,
            "computed_count": result.computed_count,
            "prompt_count": result.prompt_count,
            "ttft_seconds": result.ttft_seconds,
            "seconds": result.seconds,
            "token_ids": list(result.token_ids),
            "text": text.strip(),
            **self._connector_facts(before),
        }

    def checksums(self, order: Message) -> Message:
        """xxh3-64 of each device block that holds a full block of these tokens."""
        config = self._engine.config
        chain = HashChain(seed=config.hash_seed, block_tokens=config.block_tokens)
        token_ids = _numbers(order["token_ids"])
        chain.extend(token_ids)
        index = self._engine.scheduler.pool.index
        device_blocks = index.match(Prefix(token_ids, chain.hashes))
        found = {}
        for block_hash, device_block in zip(chain.hashes, device_blocks, strict=False):
            data = self._engine.kv_cache[device_block].view(torch.uint8).numpy()
            found[block_hash.hex()] = f"{shard_checksum(data):016x}"
        return {"what": "checksums", "blocks": found}

    def gap(self, order: Message) -> Message:
        """How far apart the logits of two tokens are after a context, computed cold."""
        context, (one, other) = _numbers(order["token_ids"]), _numbers(order["pair"])
        config = self._engine.config
        table = list(range(-(-len(context) // config.block_tokens)))
        logits = self._engine.model.forward(
            torch.tensor(context),
            make_kv_cache(self._engine.model, config),
            plan_attention([table], [(0, len(context))], config.block_tokens),
            torch.tensor([len(context) - 1]),
        )[0]
        return {"what": "gap", "gap": abs(float(logits[one] - logits[other]))}

    def handle(self, order: Message) -> Iterator[Message]:
        match order["what"]:
            case "ask":
                yield from self.ask(order)
            case "checksums":
                yield self.checksums(order)
            case "gap":
                yield self.gap(order)

    def _stats(self) -> ConnectorStats | None:
        return None if self._connected is None else self._connected.scheduler.stats()

    def _connector_facts(self, before: ConnectorStats | None) -> Message:
        """What the connector did since `before`; nothing without kvtier."""
        after = self._stats()
        if self._connected is None or before is None or after is None:
            return {"connected": False}
        return {
            "tier_blocks": dict(after.onboarded_tier_blocks - before.onboarded_tier_blocks),
            "onboarded_bytes": after.onboarded_bytes - before.onboarded_bytes,
            "onboard_seconds": after.onboard_copy_seconds - before.onboard_copy_seconds,
            "offloaded_bytes": after.offloaded_bytes - before.offloaded_bytes,
            "hook_seconds_max": after.hook_seconds_max,
            "connected": self._connected.client.connected,
        }


@contextmanager
def loaded_worker(socket: str | None) -> Iterator[EngineWorker]:
    """With kvtier when there is a socket; the comparison runs the same code without one."""
    model, tokenizer = load_smollm2()
    if socket is None:
        yield EngineWorker(Engine(model, CONFIG), tokenizer, None)
        return
    from kvtier.client import Client, ClientSettings
    from kvtier.connector import ConnectorSettings
    from kvtier.engine.connect import connected_engine
    from kvtier.policy.load_or_recompute import OnboardWish

    patience = ClientSettings(timeout_seconds=CALL_SECONDS_MAX)
    settings = ConnectorSettings(
        onboard=OnboardWish.ALWAYS,  # To be seen.
        onboard_wait_seconds=ONBOARD_WAIT_SECONDS,
        nvme_bytes_per_second=NVME_BYTES_PER_SECOND,
        nvme_wait_seconds_max=NVME_WAIT_SECONDS_MAX,
    )
    with ExitStack() as stack:
        client = stack.enter_context(Client(Path(socket), settings=patience))
        connected = stack.enter_context(connected_engine(model, CONFIG, client, settings=settings))
        if not connected.wait_ready(READY_SECONDS_MAX):
            raise TimeoutError(f"the daemon did not open the namespace in {READY_SECONDS_MAX} s")
        yield EngineWorker(connected.engine, tokenizer, connected)


def main() -> int:
    torch.set_num_threads(min(2, torch.get_num_threads()))
    orders = (cast(Message, json.loads(line)) for line in sys.stdin)
    load = next(orders, None)
    if load is None:
        return 0
    started = time.monotonic()
    try:
        with loaded_worker(cast("str | None", load["socket"])) as worker:
            worker.warm_up()
            _tell(worker.ready(time.monotonic() - started))
            for order in orders:
                for message in worker.handle(order):
                    _tell(message)
    except (BadModelFile, TimeoutError) as error:
        sys.stderr.write(f"kvtier demo: {error}\n")
        return 1
    except (BrokenPipeError, KeyboardInterrupt):
        return 1  # The demo is gone.
    return 0


def _tell(message: Message) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _numbers(value: object) -> list[int]:
    return cast("list[int]", value)


if __name__ == "__main__":
    sys.exit(main())
