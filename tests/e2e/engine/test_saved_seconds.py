"""The time that kvtier says it saves is what an A/B run of the engine measures."""

from __future__ import annotations

import random

import pytest

from kvtier.client import Client
from kvtier.engine.config import EngineConfig, SamplingParams
from kvtier.engine.connect import connected_engine
from kvtier.engine.files.smollm2 import load_smollm2
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.engines import PATIENT, PATIENT_CLIENT
from tests.support.forms import is_torture, rounds, state_finding
from tests.support.processes import eventually

ONE_TOKEN = SamplingParams(tokens_max=1)
TOKENS = 320
# Two rounds beside other tests tell a factor of two; thirty on their own tell a fifth.
DIFFERENCE_MAX = 0.2 if is_torture() else 0.5


def told(daemon: RunningDaemon) -> float:
    found = daemon.metrics()
    return found["kvtier_saved_seconds_total"] - found["kvtier_lost_seconds_total"]


@pytest.mark.slow
@pytest.mark.full_form
def test_the_time_said_to_be_saved_is_what_is_measured() -> None:
    chance = random.Random(7)
    with running_daemon(dram_bytes="256MiB", slab_bytes="64MiB") as daemon:
        daemon.wait_populated()
        model, _ = load_smollm2()
        client = Client(daemon.socket, settings=PATIENT_CLIENT)
        config = EngineConfig(device_block_count=64)
        with connected_engine(model, config, client, settings=PATIENT) as connected:
            assert connected.wait_ready(10.0)
            engine = connected.engine
            measured = 0.0
            # One round more, of which nothing is counted: the first one warms the engine up.
            for number in range(rounds(full=30, short=2) + 1):
                prompt = [chance.randrange(model.config.vocab_size) for _ in range(TOKENS)]
                engine.forget_cached()
                cold = engine.generate([prompt], ONE_TOKEN)[0]
                assert cold.kvtier_count == 0
                assert engine.wait_offloads(15.0)
                engine.forget_cached()
                hot = engine.generate([prompt], ONE_TOKEN)[0]
                assert hot.kvtier_count >= TOKENS - config.block_tokens
                assert engine.wait_offloads(15.0)
                eventually(lambda: daemon.metrics()["kvtier_leases"] == 0, "the release")
                if number == 0:
                    before = told(daemon)
                    continue
                measured += cold.ttft_seconds - hot.ttft_seconds
        client.close()
        said = told(daemon) - before
    state_finding(f"{said:.3f} s said to be saved, {measured:.3f} s measured")
    assert abs(said - measured) <= DIFFERENCE_MAX * measured
