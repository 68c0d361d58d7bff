"""Stage: kill -9 of a process whose copies are under way, and what becomes of the shared memory.

The daemon takes a vanished engine's slots back once the process is gone and a quarantine is over:
here is seen whether anything lands later, and how long the driver takes to let the process go.
The other process lives in real time, also where this one's device is a stand-in.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.rig import Rig
from benchmarks.gpu.slabs import Slab
from benchmarks.gpu.verified import ROOT
from kvtier.cuda.runtime import Direction

COPYING = b"copying\n"
_GUARD = 0x77


@dataclass(frozen=True, slots=True)
class Sizes:
    half_bytes: int = 256 << 20  # Copied into; as much again must stay as it is.
    start_seconds: float = 20.0  # For the other process to import and to open the device.
    copying_seconds: float = 5.0  # For a look that sees it copying.
    quiet_seconds: float = 2.0


def measure(rig: Rig, findings: Findings, sizes: Sizes = Sizes()) -> None:
    slab = Slab(2 * sizes.half_bytes)
    slab.array[sizes.half_bytes :] = _GUARD
    process = _start(rig, slab, sizes)
    try:
        findings.claim("the other process copies", _has_begun(process, sizes.start_seconds))
        findings.claim("bytes are on their way when it is killed", _is_changing(slab, sizes))
        start = time.monotonic()
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=sizes.start_seconds)
        findings.note("seconds_from_kill_to_gone", round(time.monotonic() - start, 4))
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    late = _last_change(slab, sizes)
    findings.note("seconds_from_gone_to_last_byte", late)
    findings.claim("no byte lands once the process is gone", late is None)
    findings.claim(
        "and none outside of its slots", bool((slab.array[sizes.half_bytes :] == _GUARD).all())
    )
    findings.claim("the memory pins and copies for others", _is_usable(rig, slab, sizes))
    slab.close()


def _start(rig: Rig, slab: Slab, sizes: Sizes) -> subprocess.Popen[bytes]:
    words = ["-m", "benchmarks.gpu.kill_child", str(slab.fd), str(sizes.half_bytes)]
    return subprocess.Popen(
        [sys.executable, *words, *(["--stand-in"] if rig.stand_in else [])],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        pass_fds=[slab.fd],
        stdout=subprocess.PIPE,
    )


def _has_begun(process: subprocess.Popen[bytes], seconds: float) -> bool:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    return bool(ready) and process.stdout.readline() == COPYING


def _is_changing(slab: Slab, sizes: Sizes) -> bool:
    """Two looks may see the same bytes: the other process writes one of two patterns in turn."""
    before, start = _hash(slab, sizes), time.monotonic()
    while time.monotonic() - start < sizes.copying_seconds:
        if _hash(slab, sizes) != before:
            return True
    return False


def _last_change(slab: Slab, sizes: Sizes) -> float | None:
    """Seconds from now to the last look that saw other bytes; None if none did."""
    start, seen, changed = time.monotonic(), _hash(slab, sizes), None
    while time.monotonic() - start < sizes.quiet_seconds:
        time.sleep(sizes.quiet_seconds / 20)
        now_seen = _hash(slab, sizes)
        if now_seen != seen:
            seen, changed = now_seen, round(time.monotonic() - start, 3)
    return changed


def _is_usable(rig: Rig, slab: Slab, sizes: Sizes) -> bool:
    """Up from one half, down into the other."""
    runtime, half = rig.runtime, sizes.half_bytes
    stream = runtime.create_stream(0)
    device = runtime.allocate_device(half)
    slab.array[:half] = 0x3C
    runtime.register_host(slab.address, slab.length_bytes)
    runtime.copy(device, slab.address, half, Direction.HOST_TO_DEVICE, stream)
    runtime.copy(slab.address + half, device, half, Direction.DEVICE_TO_HOST, stream)
    runtime.synchronize_stream(stream)
    runtime.unregister_host(slab.address)
    runtime.free_device(device)
    runtime.destroy_stream(stream)
    return bool((slab.array[half:] == 0x3C).all())


def _hash(slab: Slab, sizes: Sizes) -> int:
    return zlib.crc32(slab.array[: sizes.half_bytes])
