"""Law 2 with a whole engine: a daemon that hangs costs answers nothing but their hits."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvtier.client import Client, ClientSettings
from kvtier.connector import ConnectorSettings
from kvtier.engine.config import SamplingParams
from kvtier.engine.connect import ConnectedEngine
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.engines import engine_on, offload_prompts, patient_client, wait_until
from tests.support.forms import is_torture
from tests.support.timed_client import TimedClient, measured_jitter
from tests.support.tiny_models import prompt_of, tokens_alone

pytestmark = [pytest.mark.slow, pytest.mark.full_form]

GREEDY = SamplingParams(tokens_max=6)
DEADLINE_SECONDS = 0.05
SLACK_SECONDS = 0.02
REQUESTS_MIN = 24


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    options = {"lease.grace_seconds": "0.1"}
    with running_daemon(dram_bytes="32MiB", slab_bytes="4MiB", options=options) as running:
        running.wait_populated()
        yield running


def ask_while_hung(connected: ConnectedEngine, seconds: float) -> int:
    """New and known prompts, spread over the time; how many were answered, all of them right."""
    started, count = time.monotonic(), 0
    while count < REQUESTS_MIN or time.monotonic() - started < seconds:
        if count % 3 == 0:
            connected.engine.forget_cached()  # So that the connector is asked for known ones.
        prompt = prompt_of(60, seed=count % 12 + 6)
        answer = connected.engine.generate([prompt], GREEDY)[0].token_ids
        assert answer == tokens_alone(prompt, GREEDY)
        count += 1
        rest = started + count * seconds / REQUESTS_MIN - time.monotonic()
        time.sleep(max(0.0, min(rest, seconds / REQUESTS_MIN)))
    return count


def test_hung_daemon_delays_nobody_and_is_used_again(daemon: RunningDaemon) -> None:
    known = [prompt_of(60, seed=seed) for seed in range(12)]
    with engine_on(patient_client(daemon.socket)) as filler:
        offload_prompts(filler, known, GREEDY)
    client = TimedClient(daemon.socket, settings=ClientSettings(timeout_seconds=DEADLINE_SECONDS))
    with (
        engine_on(client, settings=ConnectorSettings()) as connected,
        measured_jitter() as jitter,
    ):
        assert wait_until(lambda: is_hit(connected, known[0]) and has_stock(connected), 20.0)
        session = client.session
        daemon.stop()
        try:
            count = ask_while_hung(connected, 30.0 if is_torture() else 3.0)
        finally:
            daemon.resume()
        assert count >= REQUESTS_MIN
        assert wait_until(lambda: is_hit(connected, known[0]), 20.0), "kvtier is not used again"
        # Its effect unknown, a call that timed out ends the session; its slots are withheld until
        # the engine is quiet about it.
        assert client.session != session
        assert wait_until(lambda: quarantined_count(client) == 0, 20.0), "slots stay withheld"
        assert session is not None
        assert session.session_id not in {one.session_id for one in client.stats().sessions}
        assert list(client.check().violations) == []
        assert connected.engine.check_invariants() == []
        assert connected.scheduler.check_invariants() == []
    limit = DEADLINE_SECONDS + SLACK_SECONDS + jitter.seconds_max
    assert client.longest[0] <= limit, f"{client.longest}, jitter {jitter.seconds_max:.3f}"
    hook_seconds = connected.scheduler.stats().hook_seconds_max
    assert hook_seconds <= SLACK_SECONDS + jitter.seconds_max


def is_hit(connected: ConnectedEngine, prompt: list[int]) -> bool:
    connected.engine.forget_cached()
    result = connected.engine.generate([prompt], GREEDY)[0]
    assert result.token_ids == tokens_alone(prompt, GREEDY)
    return result.kvtier_count > 0


def has_stock(connected: ConnectedEngine) -> bool:
    """Slots that are withheld when the session is lost."""
    return connected.scheduler.stock_count > 0


def quarantined_count(client: Client) -> int:
    return sum(tier.quarantined_count for tier in client.stats().tiers)
