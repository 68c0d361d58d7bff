"""Stage: the reference engine with an 8B model's shape: first tokens, and decoding beside offloads.

Weights are random. A prompt of 8 K tokens is computed, then onboarded as a whole before its rest is
computed, then layer by layer beside it; tokens are decoded alone and beside offloads without end.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.findings import Findings, gigabytes_per_second
from benchmarks.gpu.rig import Rig

if TYPE_CHECKING:
    from benchmarks.gpu.engine_rig import EngineRig

OFFLOAD_SECONDS_MAX = 20.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """The model's are those of Llama-3-8B."""

    model: dict[str, Any] = field(
        default_factory=lambda: {
            "layer_count": 32,
            "hidden_size": 4096,
            "ffn_size": 14336,
            "head_count": 32,
            "kv_head_count": 8,
            "head_size": 128,
            "vocab_size": 128_256,
            "rope_base": 500_000.0,
            "context_tokens_max": 16_384,
        }
    )
    block_tokens: int = 16
    prompt_tokens: int = 8192
    rest_tokens: int = 64  # What a new turn adds.
    decode_requests: int = 32
    decode_prompt_tokens: int = 512
    decode_steps: int = 150

    @property
    def prompt_blocks(self) -> int:
        return self.prompt_tokens // self.block_tokens

    @property
    def device_block_count(self) -> int:
        """For two long prompts, or all that decode."""
        tokens = self.decode_requests * (self.decode_prompt_tokens + 2 * self.decode_steps + 16)
        return 2 * self.prompt_blocks + 16 + tokens // self.block_tokens


def measure(rig: Rig, findings: Findings, sizes: Sizes = Sizes()) -> None:
    try:
        from benchmarks.gpu.engine_rig import EngineRig, random_weights
        from kvtier.engine.config import EngineConfig, ModelConfig
    except ImportError as error:  # xxhash and protobuf, which the other stages do without.
        findings.note("engine", f"not run: {error}")
        return
    model = random_weights(ModelConfig(**sizes.model), "cpu" if rig.stand_in else "cuda")
    # (layer by layer, how much longer offloads may make a step; 0 for any).
    for is_by_layer, stretch_max in ((False, 0.0), (True, 0.05)):
        name = "layer by layer" if is_by_layer else "whole"
        if rig.is_late(15.0):
            findings.cut_short(f"engine, {name}")
            continue
        config = EngineConfig(
            device_block_count=sizes.device_block_count,
            block_tokens=sizes.block_tokens,
            # A prompt in one step: torch's attention of a part has a mask, and is slower by far.
            step_tokens_max=sizes.prompt_tokens + sizes.rest_tokens,
            device="cuda",
            layerwise_loading=is_by_layer,
        )
        engine_rig = EngineRig(
            rig,
            model,
            config,
            slot_count=sizes.device_block_count,
            offload_stretch_max=stretch_max,
        )
        try:
            findings.note("attention", engine_rig.attention)
            first_tokens(engine_rig, findings, name, sizes)
            decode(rig, engine_rig, findings, (stretch_max, sizes))
        finally:
            engine_rig.close()


def first_tokens(engine_rig: EngineRig, findings: Findings, name: str, sizes: Sizes) -> None:
    """Cold, and with all but the last tokens onboarded."""
    from kvtier.engine.config import SamplingParams

    engine, params = engine_rig.engine, SamplingParams(tokens_max=1)
    draw = random.Random(1)
    vocab = range(engine.model.config.vocab_size)
    prompt = draw.choices(vocab, k=sizes.prompt_tokens)
    turns = [[*prompt, *draw.choices(vocab, k=sizes.rest_tokens)] for _ in range(3)]
    # Torch chooses its kernels in the first run, and the first copy pins the slab.
    engine.generate([draw.choices(vocab, k=sizes.prompt_tokens)], params)
    findings.claim(
        f"{name}: what was computed is offloaded in time", engine.wait_offloads(OFFLOAD_SECONDS_MAX)
    )
    cold = engine.generate([turns[0]], params)[0]
    engine.wait_offloads(OFFLOAD_SECONDS_MAX)
    found = []
    for turn in turns[1:]:
        engine.forget_cached()
        found.append(engine.generate([turn], params)[0])
        findings.claim(
            f"{name}: the prefix is onboarded, not computed",
            found[-1].kvtier_count == sizes.prompt_blocks * sizes.block_tokens,
        )
    chain = _hashes_of(engine_rig, prompt)
    findings.claim(
        f"{name}: blocks on the device are those of their slots", engine_rig.are_bytes_right(chain)
    )
    seconds = min(result.ttft_seconds for result in found)
    findings.add(
        "first_token",
        {
            "load": name,
            "tokens": sizes.prompt_tokens + sizes.rest_tokens,
            "cold_seconds": round(cold.ttft_seconds, 6),
            "onboarded_seconds": round(seconds, 6),
            "times_faster": round(cold.ttft_seconds / max(seconds, 1e-9), 2),
        },
    )


def decode(rig: Rig, engine_rig: EngineRig, findings: Findings, how: tuple[float, Sizes]) -> None:
    """Steps of many requests: alone, then beside offloads that never cease."""
    from kvtier.engine.config import SamplingParams

    stretch_max, sizes = how
    engine, draw = engine_rig.engine, random.Random(2)
    engine.forget_cached()
    vocab = range(engine.model.config.vocab_size)
    params = SamplingParams(tokens_max=2 * sizes.decode_steps + 8)
    for number in range(sizes.decode_requests):
        prompt = draw.choices(vocab, k=sizes.decode_prompt_tokens)
        engine.add_request(f"decode-{number}", prompt, params)
    while len({output.request_id for output in engine.step()}) < sizes.decode_requests:
        if rig.is_late(5.0):
            findings.cut_short("decoding")
            return
    engine.wait_offloads(OFFLOAD_SECONDS_MAX)
    alone = _step_seconds(rig, engine_rig, sizes.decode_steps)
    engine_rig.begin_background()
    copied_bytes, begun = engine_rig.worker.copied_bytes, rig.now()
    beside = _step_seconds(rig, engine_rig, sizes.decode_steps)
    copied_bytes = engine_rig.worker.copied_bytes - copied_bytes
    rate = gigabytes_per_second(copied_bytes, rig.now() - begun)
    engine_rig.end_background()
    for number in range(sizes.decode_requests):
        engine.cancel(f"decode-{number}")
    findings.add(
        "decode",
        {
            "stretch_max": stretch_max,
            "alone_p50_seconds": round(_share(alone, 0.5), 6),
            "alone_p99_seconds": round(_share(alone, 0.99), 6),
            "beside_p50_seconds": round(_share(beside, 0.5), 6),
            "beside_p99_seconds": round(_share(beside, 0.99), 6),
            "p99_of_alone": round(_share(beside, 0.99) / max(_share(alone, 0.99), 1e-9), 3),
            "offloaded_gigabytes_per_second": rate,
        },
    )


def _step_seconds(rig: Rig, engine_rig: EngineRig, count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        begun = rig.now()
        engine_rig.engine.step()
        seconds.append(rig.now() - begun)
        if rig.is_late(3.0):
            break
    return seconds


def _share(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _hashes_of(engine_rig: EngineRig, token_ids: list[int]) -> list[Any]:
    from kvtier.engine.hashing import HashChain

    config = engine_rig.engine.config
    chain = HashChain(seed=config.hash_seed, block_tokens=config.block_tokens)
    chain.extend(token_ids)
    return list(chain.hashes)
