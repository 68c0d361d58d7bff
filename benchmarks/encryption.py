"""What encryption costs the NVMe tier: two pools side by side, one of them sealed, round by round.

    python -m benchmarks.encryption DIRECTORY

Writes JSON: GB/s and processor time a block of 2 MiB, medians, and the ratio of sealed to plain in
each round.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

from kvtier.cli.bench_nvme import BLOCK_BYTES, NvmeBench
from kvtier.io.file import FileDriver
from kvtier.layout import SEGMENT_BYTES
from kvtier.pools.key_file import new_key
from kvtier.pools.nvme import MakeSealer, NvmePool
from kvtier.pools.nvme_paths import format_paths
from kvtier.pools.sealing import Sealer

SEGMENTS = 2
ROUNDS = 9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=tempfile.gettempdir())
    root = parser.parse_args().directory
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=root) as folder:
        plain = _bench(Path(folder) / "plain", None)
        sealed = _bench(Path(folder) / "sealed", partial(Sealer, [new_key([])]))
        try:
            figures = _measure({"plain": plain, "sealed": sealed})
        finally:
            for bench in (plain, sealed):
                bench.pool.close(clean=False)
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    return 0


def _bench(path: Path, make_sealer: MakeSealer | None) -> NvmeBench:
    format_paths(
        [path],
        SEGMENTS * SEGMENT_BYTES + SEGMENT_BYTES // 2,
        pool_id=os.urandom(16),
        generation=int.from_bytes(os.urandom(8), sys.byteorder),
    )
    bench = NvmeBench(NvmePool([FileDriver(path)], make_sealer=make_sealer))
    bench.write(bench.huge)
    return bench


def _measure(benches: dict[str, NvmeBench]) -> dict[str, object]:
    gbps: dict[str, list[float]] = {}
    cpu_us: dict[str, list[float]] = {}
    for number in range(ROUNDS):
        for side in ("write", "read"):
            for name in sorted(benches, reverse=bool(number % 2)):
                bench = benches[name]
                done = bench.run(bench.huge, side)
                count = bench.count
                key = f"{name}_{side}"
                gbps.setdefault(key, []).append(count * BLOCK_BYTES / done.seconds / 1e9)
                cpu_us.setdefault(key, []).append(1e6 * done.cpu_seconds / count)
        sys.stderr.write(f"round {number + 1} of {ROUNDS}\n")
    figures: dict[str, object] = {
        f"{side}_ratio": round(
            median(
                sealed / plain
                for sealed, plain in zip(gbps[f"sealed_{side}"], gbps[f"plain_{side}"], strict=True)
            ),
            3,
        )
        for side in ("write", "read")
    }
    figures |= {f"{key}_gbps": round(median(found), 2) for key, found in gbps.items()}
    figures |= {f"{key}_cpu_us": round(median(found)) for key, found in cpu_us.items()}
    return figures | {"rounds": ROUNDS, "load_average": os.getloadavg()[0]}


if __name__ == "__main__":
    sys.exit(main())
