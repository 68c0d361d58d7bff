"""What differs in anything that changes the meaning of KV never meets it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvtier.engine.config import SamplingParams
from kvtier.engine.connect import ConnectedEngine
from kvtier.engine.model import LlamaModel
from kvtier.namespace import NamespaceSpec
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.engines import engine_on, hashes_of, offload_prompts, patient_client
from tests.support.tiny_models import TINY, prompt_of, random_model, tiny_model, tokens_alone

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(tokens_max=4)
PROMPT = prompt_of(61, seed=41)
FULL_BLOCKS = 15


@pytest.fixture(scope="module")
def filled() -> Iterator[tuple[RunningDaemon, ConnectedEngine]]:
    """A daemon that holds the prompt, and the engine that computed it."""
    with running_daemon(dram_bytes="48MiB", slab_bytes="2MiB") as daemon:
        daemon.wait_populated()
        with engine_on(patient_client(daemon.socket)) as connected:
            offload_prompts(connected, [PROMPT], GREEDY)
            yield daemon, connected


def test_same_facts_match(filled: tuple[RunningDaemon, ConnectedEngine]) -> None:
    assert matched_count(filled[0], filled[1].spec) == FULL_BLOCKS


@pytest.mark.parametrize(
    "change",
    [
        {"kv_dtype": "float16"},
        {"layout": "kv,layer,token,head,element"},
        {"weights": "sha256:other"},
        {"salt": "other"},
        {"model": "other"},
        {"hash_seed": "other"},
        {"extra": {"rope_base": "500000.0"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_one_fact_apart_matches_nothing(
    filled: tuple[RunningDaemon, ConnectedEngine], change: dict[str, object]
) -> None:
    daemon, connected = filled
    assert matched_count(daemon, replace(connected.spec, **change)) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "model",
    [random_model(TINY, 0, dtype=torch.bfloat16), tiny_model(1)],
    ids=["dtype", "weights"],
)
def test_engine_of_another_model_computes_everything(
    filled: tuple[RunningDaemon, ConnectedEngine], model: LlamaModel
) -> None:
    with engine_on(patient_client(filled[0].socket), model=model) as other:
        assert other.engine.generate([PROMPT], GREEDY)[0].kvtier_count == 0


def test_engine_with_another_salt_computes_everything_and_the_same_tokens(
    filled: tuple[RunningDaemon, ConnectedEngine],
) -> None:
    with engine_on(patient_client(filled[0].socket), salt="another") as other:
        result = other.engine.generate([PROMPT], GREEDY)[0]
    assert (result.kvtier_count, result.token_ids) == (0, tokens_alone(PROMPT, GREEDY))


def matched_count(daemon: RunningDaemon, spec: NamespaceSpec) -> int:
    with patient_client(daemon.socket) as client:
        assert client.wait_connected(10.0)
        namespace = client.open_namespace(spec)
        assert client.wait_namespace(namespace, 10.0)
        return client.match(namespace, hashes_of(PROMPT)).matched_count
