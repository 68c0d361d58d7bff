"""Two engines at once on one daemon: a prefix is computed by one of them only."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.engine.config import SamplingParams
from kvtier.engine.connect import ConnectedEngine
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.engines import (
    CONFIG,
    device_bytes,
    engine_on,
    hashes_of,
    offload_prompts,
    patient_client,
)
from tests.support.tiny_models import prompt_of, tokens_alone

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(tokens_max=6)
LONG = SamplingParams(tokens_max=60)
SHARED = prompt_of(160, seed=21)  # A whole number of blocks.
Pair = tuple[ConnectedEngine, ConnectedEngine]


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(dram_bytes="32MiB", slab_bytes="4MiB") as running:
        running.wait_populated()
        yield running


@pytest.fixture
def pair(daemon: RunningDaemon) -> Iterator[Pair]:
    with (
        engine_on(patient_client(daemon.socket)) as one,
        engine_on(patient_client(daemon.socket)) as other,
    ):
        yield one, other


def test_second_computes_none_of_the_shared_full_blocks(pair: Pair) -> None:
    one, other = pair
    offload_prompts(one, [[*SHARED, 1, 2, 3]], GREEDY)
    stream = one.engine.stream(prompt_of(30, seed=22), LONG)
    next(stream)  # The first engine is still answering somebody.
    prompt = [*SHARED, 4, 5, 6, 7, 8]
    result = other.engine.generate([prompt], GREEDY)[0]
    assert result.kvtier_count == len(SHARED)
    assert result.computed_count == 5
    assert result.token_ids == tokens_alone(prompt, GREEDY)
    assert [output.token_id for output in stream]
    assert one.engine.check_invariants() == other.engine.check_invariants() == []


def test_onboarded_bytes_are_those_offloaded(pair: Pair) -> None:
    one, other = pair
    prompt = prompt_of(161, seed=23)
    offload_prompts(one, [prompt], GREEDY)
    assert other.engine.generate([prompt], GREEDY)[0].kvtier_count == 160
    ours, theirs = device_bytes(one, prompt), device_bytes(other, prompt)
    assert len(ours) == 40
    assert ours == theirs
    namespace = other.client.open_namespace(other.spec)
    assert [bytes(block) for block in other.client.get(namespace, hashes_of(prompt))] == ours


def test_blocks_of_an_answer_are_served_to_the_other_engine(pair: Pair) -> None:
    one, other = pair
    prompt = prompt_of(41, seed=24)
    answer = offload_prompts(one, [prompt], LONG)[0]
    assert answer == tokens_alone(prompt, LONG)
    chat = [*prompt, *answer, *prompt_of(9, seed=25)]
    result = other.engine.generate([chat], GREEDY)[0]
    computed = len(prompt) + len(answer) - 1  # Of the last token no KV was ever computed.
    assert result.kvtier_count == computed // CONFIG.block_tokens * CONFIG.block_tokens
    assert result.token_ids == tokens_alone(chat, GREEDY)


def test_engines_that_race_for_a_prefix_answer_right(pair: Pair) -> None:
    """Both offload the same blocks at once: one commits, the other is told they are present."""
    prompts = [[*prompt_of(80, seed=30 + i // 2), i] for i in range(8)]

    def run(connected: ConnectedEngine) -> list[tuple[int, ...]]:
        engine = connected.engine
        tokens = [engine.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
        assert engine.wait_offloads(5.0)
        return tokens

    with ThreadPoolExecutor(max_workers=2) as pool:
        answers = list(pool.map(run, pair))
    expected = [tokens_alone(prompt, GREEDY) for prompt in prompts]
    assert answers == [expected, expected]
    assert [one.engine.check_invariants() for one in pair] == [[], []]
    assert [list(one.client.check().violations) for one in pair] == [[], []]
