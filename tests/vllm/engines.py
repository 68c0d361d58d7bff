"""Real engines in this process, and what they generate."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory

from kvtier.connector.vllm import KVTierConnector
from tests.vllm.identity import Said

BLOCK_TOKENS = 32  # The least that vLLM's CPU attention takes.
WAIT_SECONDS = 20.0


@dataclass(frozen=True)
class Generated(Said):
    cached_count: int  # Prompt tokens that were not computed, local hits included.
    finish_reason: str


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=5)


def generated(output: Any) -> Generated:
    said = output.outputs[0]
    likely = ({token: found.logprob for token, found in at.items()} for at in said.logprobs or ())
    return Generated(
        tuple(said.token_ids),
        tuple(likely),
        output.num_cached_tokens or 0,
        str(said.finish_reason),
    )


class VllmEngine:
    """One LLM whose steps this process makes."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.connector: KVTierConnector | None = self.scheduler.connector

    def generate(self, prompts: Sequence[Sequence[int]], *, tokens: int = 8) -> list[Generated]:
        params = greedy(tokens)
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False
        )
        return [generated(output) for output in outputs]

    @property
    def stats(self) -> Any:
        """Counts of the connector's scheduler side."""
        assert self.connector is not None
        return self.connector._scheduler._core.stats()

    def settle(self) -> None:
        """Step until copies and commits have ended: what an idle engine process does by itself."""
        self.step_until(lambda: not self.scheduler.has_requests())

    def step_until(self, condition: Any) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.stats
            self.core.step_fn()
            time.sleep(0.001)

    def wait_ready(self) -> None:
        """Until kvtier would answer: scheduler and worker have their sessions and slabs."""
        side = self.connector._scheduler
        worker = self.connector_of_worker()._worker
        deadline = time.monotonic() + WAIT_SECONDS
        grouped = getattr(worker, "_clients", None)
        specs = worker._specs if grouped else [worker._spec]
        arenas = [
            client.arena(client.open_namespace(spec))
            for client, spec in zip(grouped or [worker._client], specs, strict=True)
        ]
        while side._core._desk.session() is None or not all(a.mapped_slot_count for a in arenas):
            assert time.monotonic() < deadline, "kvtier did not get ready"
            time.sleep(0.002)

    def connector_of_worker(self) -> KVTierConnector:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        assert isinstance(connector, KVTierConnector)
        return connector

    def left_behind(self) -> list[str]:
        """What is still kept for requests although all have ended; nothing should be."""
        side, scheduler = self.connector._scheduler, self.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        found = {
            "requests of vLLM": len(scheduler.requests),
            "device blocks": used,
            "loads": len(side._loading),
            "requests of the adapter": len(side._requests),
            "requests of the planning": side._core.request_count,
            "leases": side._core.lease_count,
            "watched blocks": int(not side._reuse.is_idle),
        }
        return [f"{count} {name}" for name, count in found.items() if count]

    def forget_own_cache(self) -> None:
        assert self.llm.reset_prefix_cache()


def transfer_config(socket: Path, **extra: Any) -> KVTransferConfig:
    """What a user would pass, and the socket."""
    return KVTransferConfig(
        kv_connector="KVTierConnector",
        kv_connector_module_path="kvtier.connector.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"kvtier.socket": str(socket), "kvtier.onboard": "always"}
        | {f"kvtier.{name}": value for name, value in extra.items()},
    )


@contextmanager
def vllm_engine(
    model: Path, transfer: KVTransferConfig | None = None, **options: Any
) -> Iterator[VllmEngine]:
    """An engine of blocks of 32 tokens; with kvtier it is ready when the bracket is entered."""
    settings = {
        "enforce_eager": True,
        "max_model_len": 512,
        "block_size": BLOCK_TOKENS,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
        "dtype": "bfloat16",
        "seed": 0,
        "kv_cache_memory_bytes": 32 << 20,
        "disable_log_stats": False,
        "skip_tokenizer_init": True,
    }
    llm = LLM(str(model), kv_transfer_config=transfer, **(settings | options))
    engine = VllmEngine(llm)
    try:
        yield engine
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def prompt_of(token_count: int, *, seed: int = 0, shared: int = 0) -> list[int]:
    """Equal first `shared` tokens for all seeds."""
    return [
        4 + (index * 37 + (seed * 101 if index >= shared else 0)) % 500
        for index in range(token_count)
    ]
