"""An engine, its copies and the daemon's slots, in every order that streams and events allow.

What nothing orders is found by the fake's race checker, and what it cannot know of (slots, tokens)
by comparing bytes and tokens with those of an engine alone in host memory.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from kvtier.connector.jobs import JobResult
from kvtier.cuda.runtime import Event, Stream
from kvtier.engine.config import EngineConfig, SamplingParams
from kvtier.errors import BadRequest
from tests.support.forms import rounds
from tests.support.gpu_bench import GpuBench, WatchedClient
from tests.support.tiny_models import prompt_of, tiny_model, tokens_alone

# Few device blocks, and steps that compute parts of prompts: such a step waits for nothing, so its
# blocks are asked to be offloaded while they are still being computed.
CONFIG = EngineConfig(
    block_tokens=4, device_block_count=12, step_tokens_max=12, running_count_max=4
)
BY_LAYER = replace(CONFIG, device="cuda", layerwise_loading=True)
PARAMS = SamplingParams(tokens_max=3)
PREFIX = prompt_of(12, seed=50)
PROMPTS = [[*PREFIX, *prompt_of(count, seed=count)] for count in (9, 14, 6)]


class Bench(GpuBench):
    """Of the order that `seed` says."""

    config = CONFIG
    seed_first = 0

    def __init__(self, seed: int, client: WatchedClient | None = None) -> None:
        super().__init__(tiny_model(), self.config, seed=seed, client=client)


class LayerwiseBench(Bench):
    """Its engine computes beside loads."""

    config = BY_LAYER
    seed_first = 5000


def run_seed(seed: int, bench: type[Bench] = Bench) -> tuple[int, int]:
    """One engine fills the daemon, another one uses it; (blocks onboarded, preemptions)."""
    expected = [tokens_alone(prompt, PARAMS) for prompt in PROMPTS]
    first = bench(seed)
    results = first.engine.generate(PROMPTS, PARAMS)
    assert [result.token_ids for result in results] == expected
    first.close()
    second = bench(1000 + seed, first.client)
    second.engine.add_request("cancelled", PROMPTS[1], PARAMS)
    for _ in range(seed % 3):
        second.engine.step()
    if seed % 2:
        cancel(second)
    again = second.engine.generate(PROMPTS[::-1], PARAMS)
    assert [result.token_ids for result in again] == expected[::-1]
    if not seed % 2:
        cancel(second)
    second.close()
    onboarded_count = second.scheduler.stats().onboarded_blocks
    return onboarded_count, sum(result.preempted_count for result in [*results, *again])


def cancel(bench: GpuBench) -> None:
    with suppress(BadRequest):  # It may have been quick.
        bench.engine.cancel("cancelled")


@pytest.mark.slow
@pytest.mark.full_form
@pytest.mark.timeout(600)
@pytest.mark.parametrize("bench", [Bench, LayerwiseBench])
def test_tokens_and_bytes_are_right_in_every_order(bench: type[Bench]) -> None:
    seeds = range(bench.seed_first, bench.seed_first + rounds(short=50, full=1000))
    counts = [run_seed(seed, bench) for seed in seeds]
    assert all(onboarded_count > 0 for onboarded_count, _ in counts)
    assert any(preempted_count for _, preempted_count in counts)


# ------------------------------------------------------------------------------------ planted races


class PlantedBench(Bench):
    """Bytes are not compared: the race must be found, whether or not it did harm this time."""

    made: ClassVar[list[Bench]]

    def __init__(self, seed: int, client: WatchedClient | None = None) -> None:
        super().__init__(seed, client)
        self.made.append(self)

        def differing(result: JobResult) -> list[int]:
            return []

        self.worker.watch.differing = differing  # type: ignore[method-assign]


class StoresUnmarked(PlantedBench):
    """Copies wait for a stream on which nothing is computed."""

    made: ClassVar[list[Bench]] = []

    def __init__(self, seed: int, client: WatchedClient | None = None) -> None:
        super().__init__(seed, client)
        idle = self.cuda.create_stream(0)
        blocks = self.blocks
        blocks.mark = lambda: blocks.streams.mark(idle)  # type: ignore[method-assign]


class HastyRuntime:
    """Takes what is queued on one stream for done."""

    def __init__(self, runtime: Any, hasty: Stream) -> None:
        self._runtime = runtime
        self._hasty = hasty
        self._streams: dict[Event, Stream] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def record_event(self, event: Event, stream: Stream) -> None:
        self._streams[event] = stream
        self._runtime.record_event(event, stream)

    def is_event_done(self, event: Event) -> bool:
        return self._streams[event] == self._hasty or self._runtime.is_event_done(event)


class LoadsUnawaited(PlantedBench):
    """A load counts as ended when it is queued, and the engine computes on its blocks."""

    made: ClassVar[list[Bench]] = []

    def __init__(self, seed: int, client: WatchedClient | None = None) -> None:
        super().__init__(seed, client)
        streams = self.blocks.streams
        streams._runtime = HastyRuntime(self.cuda, streams._loads.stream)


class LayersUnfollowed(PlantedBench):
    """The engine computes beside a load, and its stream waits for no layer."""

    config = BY_LAYER
    made: ClassVar[list[Bench]] = []

    def __init__(self, seed: int, client: WatchedClient | None = None) -> None:
        super().__init__(seed, client)
        self.blocks.follow_layer = lambda layer: None  # type: ignore[method-assign]


class LayerBeforeFollowed(PlantedBench):
    """It waits for the layer before the one that it computes."""

    config = BY_LAYER
    made: ClassVar[list[Bench]] = []

    def __init__(self, seed: int, client: WatchedClient | None = None) -> None:
        super().__init__(seed, client)
        blocks, follow = self.blocks, self.blocks.follow_layer

        def follow_before(layer: int) -> None:
            follow(max(0, layer - 1))

        blocks.follow_layer = follow_before  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("bench", "race"),
    [
        (StoresUnmarked, "copy_batch and layer"),
        (LoadsUnawaited, "layer 0 and copy_batch"),
        (LayersUnfollowed, "layer 0 and copy_batch"),
        (LayerBeforeFollowed, "layer 1 and copy_batch"),
    ],
)
def test_planted_races_are_found(bench: type[PlantedBench], race: str) -> None:
    with pytest.raises(AssertionError):
        run_seed(1, bench)
    races = [found for made in bench.made for found in made.cuda.checker.races]
    assert any(race in found for found in races), races
