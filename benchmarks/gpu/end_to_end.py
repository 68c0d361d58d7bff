"""Stage: the KV of 8 K tokens of an 8B model out and back, beside what computing it again costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.gpu.findings import Findings, gigabytes_per_second
from benchmarks.gpu.kv import BLOCKS_OUTSIDE, VLLM, Kv, Shape
from benchmarks.gpu.rig import Rig, Stopwatch
from kvtier.cuda.runtime import Stream
from kvtier.memory import Bytes

TIMES_FASTER_LEAST = 10.0


@dataclass(frozen=True, slots=True)
class Sizes:
    shape: Shape = Shape()
    rest_tokens: int = 64  # What a new turn adds, and is computed in either case.

    @property
    def token_count(self) -> int:
        return self.shape.block_count * self.shape.block_tokens


def measure(rig: Rig, findings: Findings, sizes: Sizes = Sizes()) -> None:
    kernels = rig.make_kernels()
    prefill = _prefill_seconds(rig, sizes.token_count)
    findings.note("prefill_seconds", round(prefill, 6))
    for order in (BLOCKS_OUTSIDE, VLLM):
        if rig.is_late(6.0):
            findings.cut_short(f"end to end, {order}")
            continue
        kv = Kv(rig, sizes.shape, order, kernels=kernels)
        try:
            _there_and_back(rig, findings, (kv, order, prefill), sizes)
        finally:
            kv.close()


def _prefill_seconds(rig: Rig, token_count: int) -> float:
    """Device time, warm; GEMMs and attention only, so that a real prefill takes longer."""
    stream: Stream = rig.runtime.create_stream(0)
    watch = Stopwatch(rig, stream)
    rig.work.prefill(stream, token_count)
    rig.runtime.synchronize_stream(stream)
    seconds = watch.seconds(lambda: rig.work.prefill(stream, token_count), repeat_count=3)
    watch.close()
    rig.runtime.destroy_stream(stream)
    return seconds


def _there_and_back(
    rig: Rig, findings: Findings, what: tuple[Kv, str, float], sizes: Sizes
) -> None:
    kv, order, prefill = what
    kv.fill_device(13)
    expected = kv.device_bytes()
    kv.slab.array[:] = 0x5A
    offload = kv.seconds_of(lambda: kv.offload(kv.blocks))
    findings.claim(
        f"{order}: offload leaves the device as it was", _are_equal(kv.device_bytes(), expected)
    )
    _overwrite(kv)
    findings.claim(
        f"{order}: the device held other bytes", not _are_equal(kv.device_bytes(), expected)
    )
    # Beside the prefill of another request, which is how an engine meets it.
    rig.work.prefill(kv.compute, sizes.rest_tokens)
    onboard = kv.seconds_of(lambda: kv.onboard(kv.blocks))
    findings.claim(
        f"{order}: onboard gives every byte back", _are_equal(kv.device_bytes(), expected)
    )
    findings.add(
        "end_to_end",
        {
            "order": order,
            "tokens": sizes.token_count,
            "offload_seconds": round(offload, 6),
            "onboard_seconds": round(onboard, 6),
            "onboard_gigabytes_per_second": gigabytes_per_second(kv.length_bytes, onboard),
            "times_faster_than_prefill": round(prefill / onboard, 2),
        },
    )
    if order == BLOCKS_OUTSIDE:
        findings.target(
            f"onboard of {sizes.token_count} tokens: times faster than prefill",
            prefill / onboard,
            least=TIMES_FASTER_LEAST,
        )


def _overwrite(kv: Kv) -> None:
    """Other bytes in all device blocks; the slots keep theirs."""
    held = kv.slab.array[: kv.length_bytes].copy()
    kv.fill_device(14)
    np.copyto(kv.slab.array[: kv.length_bytes], held)


def _are_equal(one: Bytes, other: Bytes) -> bool:
    return bool(np.array_equal(one, other))
