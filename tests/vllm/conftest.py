"""Real vLLM on a CPU, in this process: engines are made one after the other, 3 s each.

Without vLLM (in `make test`) nothing here is collected.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAS_VLLM else ["test_*.py"]

# Before vLLM is imported. Scheduler and worker in this process; no spinning OpenMP threads on cores
# that the daemon needs; no network.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Llama whose outputs depend on all of its KV."""
    from tests.vllm.models import write_tiny_llama

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    write_tiny_llama(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Gemma: layers that see everything, and layers of a window."""
    from tests.vllm.models import write_tiny_gemma

    folder = tmp_path_factory.mktemp("models") / "tiny-gemma"
    write_tiny_gemma(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random DeepSeek: one latent for all heads."""
    from tests.vllm.models import write_tiny_deepseek

    folder = tmp_path_factory.mktemp("models") / "tiny-deepseek"
    write_tiny_deepseek(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of SmolLM2-135M, out of the package that the reference engine uses."""
    from tests.vllm.models import write_smollm2

    folder = tmp_path_factory.mktemp("models") / "smollm2"
    write_smollm2(folder)
    return folder


@pytest.fixture
def daemon() -> Iterator[object]:
    from tests.support.daemon import running_daemon

    with running_daemon(dram_bytes="64MiB", slab_bytes="16MiB") as running:
        yield running
