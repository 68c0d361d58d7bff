"""A vLLM server in processes of its own, as users start it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

START_SECONDS_MAX = 180.0


@dataclass
class Server:
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics: "name{labels}" -> value."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def sum(self, name: str, *labels: str) -> float:
        """The metric over all its series that have these labels."""
        return sum(
            value
            for key, value in self.metrics().items()
            if key.partition("{")[0] == name and all(label in key for label in labels)
        )


@contextlib.contextmanager
def vllm_server(
    model: Path, daemon_socket: Path, log: Path, *, processes: bool = False
) -> Iterator[Server]:
    """Ready when entered. `processes`: scheduler and worker in processes of their own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    transfer = {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.connector.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "kvtier.socket": str(daemon_socket),
            "kvtier.onboard": "always",
            "kvtier.onboard_wait_seconds": 2.0,
        },
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--enforce-eager", "--max-model-len", "512"]
    command += ["--block-size", "32", "--max-num-seqs", "4", "--max-num-batched-tokens", "512"]
    command += ["--dtype", "bfloat16", "--kv-cache-memory-bytes", str(32 << 20)]
    command += ["--kv-transfer-config", json.dumps(transfer), "--enable-prompt-tokens-details"]
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if processes else "0",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=environment, start_new_session=True
        )
    server = Server(port, log)
    try:
        _wait_ready(server, process)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _wait_ready(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    while True:
        assert process.poll() is None, server.log.read_text()[-4000:]
        assert time.monotonic() < deadline, server.log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.3)
