"""Refuses what could never run to its end alone."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.engine.config import EngineConfig, ModelConfig, SamplingParams
from kvtier.errors import BadRequest


def check_request(
    prompt_ids: Sequence[int], params: SamplingParams, config: EngineConfig, model: ModelConfig
) -> None:
    """Raises BadRequest that says why."""
    if not prompt_ids:
        raise BadRequest("the prompt is empty: give at least one token")
    if min(prompt_ids) < 0 or max(prompt_ids) >= model.vocab_size:
        raise BadRequest(f"the prompt has a token id outside 0 .. {model.vocab_size - 1}")
    token_count = len(prompt_ids) + params.tokens_max
    room = min(model.context_tokens_max, config.device_block_count * config.block_tokens)
    if token_count > room:
        raise BadRequest(
            f"prompt and tokens_max are {token_count} tokens: there is room for {room}"
        )
    _check_branches(len(prompt_ids), params, config)


def _check_branches(prompt_count: int, params: SamplingParams, config: EngineConfig) -> None:
    """Of several samples the blocks of the prompt are shared, by way of the prefix cache also after
    a preemption."""
    width = params.branch_count
    shared_count = prompt_count // config.block_tokens if config.prefix_caching else 0
    block_count = -(-(prompt_count + params.tokens_max) // config.block_tokens)
    needed = shared_count + width * (block_count - shared_count)
    if width > config.running_count_max:
        raise BadRequest(
            f"{width} samples at once are more than running_count_max {config.running_count_max}"
        )
    if needed > config.device_block_count:
        raise BadRequest(
            f"{width} samples may need {needed} device blocks, there are "
            f"{config.device_block_count}: ask for fewer, or for fewer tokens"
        )
