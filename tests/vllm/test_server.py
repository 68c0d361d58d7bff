"""The OpenAI server with kvtier, driven by the OpenAI client; two of them share one daemon."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from openai import OpenAI

from kvtier.connector.vllm.metrics import METRICS, PREFIX
from tests.support.daemon import RunningDaemon
from tests.vllm.engines import prompt_of
from tests.vllm.serving import Server, vllm_server
from tests.vllm.versions import HAS_HIT_SOURCES, needs_engine

pytestmark = [pytest.mark.vllm, needs_engine, pytest.mark.timeout(600)]


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "session_hints.py"


def words_of(token_ids: list[int]) -> str:
    return " ".join(f"w{token}" for token in token_ids)


def ask(server: Server, prompt: str) -> tuple[str, int]:
    """The answer, and how many of the prompt's tokens were not computed."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    answer = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=16, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    cached = 0 if details is None else details.cached_tokens or 0
    return answer.choices[0].text, cached


def eventually(condition: object) -> None:
    deadline = time.monotonic() + 30
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_two_servers_share_a_daemon_and_their_metrics_agree_with_its(
    tiny_llama: Path, daemon: RunningDaemon, tmp_path: Path
) -> None:
    """The first one as users have it: API, scheduler and worker are processes of their own."""
    prompts = [words_of(prompt_of(100, seed=seed)) for seed in range(3)]
    with vllm_server(tiny_llama, daemon.socket, tmp_path / "a.log", processes=True) as first:
        said = [ask(first, prompt)[0] for prompt in prompts]
        # Nothing is asked any more: an idle engine goes on until all is offloaded. 116 tokens are
        # three full blocks.
        eventually(lambda: daemon.metrics()["kvtier_resident_blocks"] == 9)
        with vllm_server(tiny_llama, daemon.socket, tmp_path / "b.log") as second:
            answers = [ask(second, prompt) for prompt in prompts]
            ask(second, prompts[0])  # Counts travel with steps.
            assert [text for text, _ in answers] == said
            assert [cached for _, cached in answers] == [96, 96, 96]
            names = set(second.metrics())
            for metric in METRICS:
                suffix = "_count" if metric.is_histogram else "_total"
                shown = any(n.startswith(PREFIX + metric.name + suffix) for n in names)
                assert shown or metric.label, metric.name
            loaded = second.sum(PREFIX + "onboarded_blocks_total", 'tier="dram"')
            assert loaded == 9
            hits = 'kvtier_hit_blocks_total{call="acquire",tier="dram"}'
            assert daemon.metrics()[hits] == loaded
            assert second.sum("vllm:external_prefix_cache_hits_total") == 9 * 32
            if HAS_HIT_SOURCES:
                by_source = "vllm:prompt_tokens_cached_by_source_total"
                assert second.sum(by_source, 'source="host"') == 9 * 32
            ask(first, prompts[0])  # Idle since: its last counts wait for a step.
            eventually(lambda: first.sum(PREFIX + "offloaded_blocks_total") == 9)
            words = [str(EXAMPLE), f"{second.url}/v1", "tiny"]
            subprocess.run([sys.executable, *words], check=True, timeout=120)
            hints = 'kvtier_calls_total{method="Hint",outcome="ok"}'
            eventually(lambda: daemon.metrics().get(hints, 0) == 4)  # Two a turn.
