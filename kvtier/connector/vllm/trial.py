"""One engine of `kvtier selftest vllm`: the vLLM of this Python, told by lines of JSON what to do.

    python -m kvtier.connector.vllm.trial FD

Orders come on standard input, answers go to the file descriptor FD; what vLLM prints is left where
it goes. The first order says how to start the engine and is answered with what it is; each later
one is answered when it is done. The program ends with its input, and its engine with it.

Only what vLLM has had since 0.28 is used: an engine made of command-line arguments, requests, steps
and its own metrics.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from kvtier.clock import SystemClock

EXIT_NOT_STARTED = 3
CLOCK = SystemClock()
# Besides what is kvtier's own: the counts that a report shows.
_COUNTS = ("vllm:external_prefix_cache_hits", "vllm:prefix_cache_hits", "vllm:num_preemptions")
_LABELS = ("tier", "reason", "error")


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    with os.fdopen(int(words[0]), "w") as answers:
        try:
            engine = TrialEngine(json.loads(sys.stdin.readline()))
        except Exception as error:  # noqa: BLE001  Whatever it is, whoever reads FD is told.
            traceback.print_exc()
            _tell(answers, {"error": f"{type(error).__name__}: {error}"})
            return EXIT_NOT_STARTED
        _tell(answers, engine.facts())
        for line in sys.stdin:
            try:
                answer = engine.obey(json.loads(line))
            except Exception as error:  # noqa: BLE001
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            _tell(answers, answer)
        engine.close()
    return 0


class TrialEngine:
    """vLLM's engine, stepped here."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        parser = EngineArgs.add_cli_args(_argument_parser())
        words = list(order["arguments"])
        if order["transfer"] is not None:
            words += ["--kv-transfer-config", json.dumps(order["transfer"])]
        started = CLOCK.now()
        arguments = EngineArgs.from_cli_args(parser.parse_args(words))
        self._engine: Any = LLMEngine.from_engine_args(arguments)
        self._start_seconds = CLOCK.now() - started
        self._count = 0

    def facts(self) -> dict[str, Any]:
        """What it is, for the report."""
        import torch
        import vllm
        from vllm.platforms import current_platform

        config = self._engine.vllm_config
        model, cache = config.model_config, config.cache_config
        return {
            "vllm": str(vllm.__version__),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "device": f"{current_platform.device_type}: {current_platform.get_device_name()}",
            "model": str(model.model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "kv_dtype": str(cache.cache_dtype),
            "quantization": str(model.quantization or ""),
            "block_tokens": int(cache.block_size),
            "model_tokens_max": int(model.max_model_len),
            "vocabulary": int(model.get_vocab_size()),
            "start_seconds": self._start_seconds,
        }

    def obey(self, order: Mapping[str, Any]) -> dict[str, Any]:
        if order["do"] == "counts":
            return {"counts": self._counts()}
        assert order["do"] == "generate", order
        prompts, tokens = order["prompts"], order["tokens"]
        started = CLOCK.now()
        if order["together"]:
            answers = self._generate(prompts, tokens)
        else:
            answers = [self._generate([prompt], tokens)[0] for prompt in prompts]
        return {"answers": answers, "seconds": CLOCK.now() - started}

    def close(self) -> None:
        core = self._engine.engine_core
        if hasattr(core, "shutdown"):
            core.shutdown()

    def _generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[dict[str, Any]]:
        """All at once; the time to each one's first token counts from here."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=2, detokenize=False
        )
        names = []
        started = CLOCK.now()
        for prompt in prompts:
            self._count += 1
            names.append(f"selftest-{self._count}")
            self._engine.add_request(names[-1], {"prompt_token_ids": list(prompt)}, params)
        first: dict[str, float] = {}
        done: dict[str, Any] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.outputs and output.outputs[0].token_ids:
                    first.setdefault(output.request_id, CLOCK.now() - started)
                if output.finished:
                    done[output.request_id] = output
        return [_answer(done[name], first.get(name, 0.0)) for name in names]

    def _counts(self) -> dict[str, float]:
        from kvtier.connector.vllm.metrics import PREFIX

        counts: dict[str, float] = {}
        for metric in self._engine.get_metrics():
            value = getattr(metric, "value", None)
            is_ours = metric.name.startswith(PREFIX) and not metric.name.endswith("_seconds")
            if value is None or not (is_ours or metric.name in _COUNTS):
                continue  # vLLM gives whole numbers here: of seconds too little is left.
            names = [metric.name]  # Over all labels, and by each of ours.
            labels = metric.labels.items()
            names += [f'{metric.name}{{{k}="{v}"}}' for k, v in labels if k in _LABELS]
            for name in names:
                counts[name] = counts.get(name, 0.0) + value
        return counts


def _answer(output: Any, first_seconds: float) -> dict[str, Any]:
    said = output.outputs[0]
    likely = [
        sorted(((int(t), float(one.logprob)) for t, one in at.items()), key=lambda pair: -pair[1])
        for at in said.logprobs or ()
    ]
    return {
        "tokens": [int(token) for token in said.token_ids],
        "likely": likely,
        "hit_tokens": int(output.num_cached_tokens or 0),
        "first_seconds": first_seconds,
        "finish": str(said.finish_reason),
    }


def _argument_parser() -> Any:
    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:  # Where older versions have it.
        from vllm.utils import FlexibleArgumentParser
    return FlexibleArgumentParser(prog="vLLM's arguments")


def _tell(answers: TextIO, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
