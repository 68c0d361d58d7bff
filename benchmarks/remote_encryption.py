"""What encryption costs the remote tier: plain and sealed sides by turns, on a folder and on Redis.

    python -m benchmarks.remote_encryption DIRECTORY

Redis where it is installed, on this machine. No codec. Writes JSON: GB/s and processor time of this
process a block of 2 MiB, medians, and the ratio of sealed to plain in each round.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np

from kvtier.cli.bench_servers import redis_binary, redis_server
from kvtier.cli.bench_tiers_remote import FINGERPRINT, MakeEngine, RemoteSide
from kvtier.cli.environment import describe
from kvtier.memory import Bytes
from kvtier.pools.key_file import new_key
from kvtier.pools.remote.files import FilesEngine, FilesSettings, prepare_root
from kvtier.pools.remote.redis import RedisEngine, RedisSettings
from kvtier.pools.remote.sealing import ValueSealer

BLOCK_BYTES = 2 << 20
BLOCK_COUNT = 16
ROUNDS = 9
CAPACITY_BYTES = 16 << 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=tempfile.gettempdir())
    root = parser.parse_args().directory
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=root) as folder:
        share = Path(folder) / "share"
        prepare_root(share)
        settings = FilesSettings(share, CAPACITY_BYTES)
        figures["files"] = _measure(
            lambda buffers: FilesEngine(settings, unique="bench", buffers=buffers)
        )
        binary = redis_binary()
        if binary is not None:
            with redis_server(binary, Path(folder)) as port:
                address = RedisSettings((("127.0.0.1", port),))
                figures["redis"] = _measure(lambda buffers: RedisEngine(address, buffers=buffers))
    figures |= {"rounds": ROUNDS, "environment": describe()}
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    return 0


def _measure(make_engine: MakeEngine) -> dict[str, float]:
    chance = np.random.default_rng(1)
    sources = [_block(chance) for _ in range(BLOCK_COUNT)]
    targets = [np.zeros(BLOCK_BYTES, np.uint8) for _ in range(BLOCK_COUNT)]
    sealer = ValueSealer([new_key([])], FINGERPRINT)
    seconds: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    with ExitStack() as opened:
        sides = {
            "plain": RemoteSide(make_engine, sources=sources, targets=targets),
            "sealed": RemoteSide(make_engine, sealer, sources=sources, targets=targets),
        }
        for side in sides.values():
            opened.callback(side.close)
        numbers = range(BLOCK_COUNT)
        for number in range(ROUNDS + 1):  # The first one warms up, and does not count.
            for name in sorted(sides, reverse=bool(number % 2)):
                # One after the other: both use the same names.
                for way, call in (("put", sides[name].put), ("get", sides[name].get)):
                    began, began_cpu = time.perf_counter(), time.process_time()
                    call(numbers)
                    if number:
                        key = f"{name}_{way}"
                        seconds.setdefault(key, []).append(time.perf_counter() - began)
                        cpu.setdefault(key, []).append(time.process_time() - began_cpu)
                sides[name].forget(numbers)
            sys.stderr.write(f"round {number} of {ROUNDS}\n")
    return _figures(seconds, cpu)


def _figures(seconds: dict[str, list[float]], cpu: dict[str, list[float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for way in ("put", "get"):
        ratios = [
            plain / sealed
            for plain, sealed in zip(seconds[f"plain_{way}"], seconds[f"sealed_{way}"], strict=True)
        ]
        found[f"{way}_ratio"] = round(median(ratios), 3)
    total_bytes = BLOCK_COUNT * BLOCK_BYTES
    for key, its in seconds.items():
        found[f"{key}_gbps"] = round(total_bytes / median(its) / 1e9, 2)
        found[f"{key}_cpu_us"] = round(1e6 * median(cpu[key]) / BLOCK_COUNT)
    return found


def _block(chance: np.random.Generator) -> Bytes:
    return chance.integers(0, 256, BLOCK_BYTES, np.uint8)


if __name__ == "__main__":
    sys.exit(main())
