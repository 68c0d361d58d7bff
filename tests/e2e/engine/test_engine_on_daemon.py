"""The reference engine on a real daemon, with a tiny model so that only the path is tested."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.client import Client, ClientSettings
from kvtier.connector import ConnectorSettings
from kvtier.engine.config import EngineConfig, SamplingParams
from kvtier.engine.connect import ConnectedEngine, connected_engine
from kvtier.policy.load_or_recompute import OnboardWish
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.tiny_models import prompt_of, tiny_model, tokens_alone

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(tokens_max=6)
ONE_TOKEN = SamplingParams(tokens_max=1)
PROMPT = prompt_of(150, seed=11)
PROMPT_BLOCKS = 37
# A busy machine must not turn hits into misses here; that they do is tested elsewhere.
PATIENT = ConnectorSettings(
    onboard=OnboardWish.ALWAYS,  # However fast a tiny model computes.
    onboard_wait_seconds=10.0,
    finish_wait_seconds=10.0,
    raise_internal_errors=True,
)
# A request that computes at once, so that it is over before the daemon has said anything.
HASTY = replace(PATIENT, onboard_wait_seconds=0.0)
PATIENT_CLIENT = ClientSettings(timeout_seconds=5.0)
CONFIG = EngineConfig(block_tokens=4, device_block_count=96)


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(dram_bytes="16MiB", slab_bytes="4MiB") as running:
        running.wait_populated()
        yield running


@contextmanager
def engine_on(
    socket: Path, *, salt: str = "", settings: ConnectorSettings = PATIENT
) -> Iterator[ConnectedEngine]:
    client = Client(socket, settings=PATIENT_CLIENT)
    try:
        with connected_engine(
            tiny_model(), CONFIG, client, salt=salt, settings=settings
        ) as connected:
            assert connected.wait_ready(10.0)
            yield connected
    finally:
        client.close()


def fill(daemon: RunningDaemon) -> None:
    """One request of one step, over before the daemon has answered anything."""
    with engine_on(daemon.socket, settings=HASTY) as connected:
        daemon.stop()
        try:
            connected.engine.generate([PROMPT], ONE_TOKEN)
            assert connected.engine.scheduler.tables.kept_count == PROMPT_BLOCKS + 1
        finally:
            daemon.resume()
        assert connected.engine.wait_offloads(15.0)
        stats = connected.scheduler.stats()
        assert stats.committed_blocks == PROMPT_BLOCKS, stats
        assert connected.engine.scheduler.tables.kept_count == 0


def test_second_engine_gets_the_firsts_kv_and_the_same_tokens(daemon: RunningDaemon) -> None:
    fill(daemon)
    with engine_on(daemon.socket) as connected:
        result = connected.engine.generate([PROMPT], GREEDY)[0]
        assert result.token_ids == tokens_alone(PROMPT, GREEDY)
        assert result.kvtier_count == 4 * PROMPT_BLOCKS
        assert connected.engine.check_invariants() == []


def test_other_salt_matches_nothing(daemon: RunningDaemon) -> None:
    fill(daemon)
    with engine_on(daemon.socket, salt="other") as connected:
        result = connected.engine.generate([PROMPT], GREEDY)[0]
        assert result.token_ids == tokens_alone(PROMPT, GREEDY)
        assert result.kvtier_count == 0


def test_daemon_killed_in_mid_answer_changes_no_token(daemon: RunningDaemon) -> None:
    fill(daemon)
    with engine_on(daemon.socket) as connected:
        engine = connected.engine
        stream = engine.stream(PROMPT, GREEDY)
        first = next(stream)
        daemon.kill()
        tokens = [first.token_id, *(output.token_id for output in stream)]
        assert tuple(tokens) == tokens_alone(PROMPT, GREEDY)
        other = prompt_of(60, seed=12)
        assert engine.generate([other], GREEDY)[0].token_ids == tokens_alone(other, GREEDY)
        assert engine.check_invariants() == []


def test_engine_without_a_daemon_answers(socket_dir: Path) -> None:
    client = Client(socket_dir / "nobody.sock")
    try:
        with connected_engine(tiny_model(), CONFIG, client) as connected:
            assert not connected.wait_ready(0.01)
            result = connected.engine.generate([PROMPT], GREEDY)[0]
            assert result.token_ids == tokens_alone(PROMPT, GREEDY)
            assert result.kvtier_count == 0
    finally:
        client.close()
