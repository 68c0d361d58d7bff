"""Stage: how much longer compute takes beside copies, and what the throttle makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.kv import BLOCKS_OUTSIDE, HEADS_OUTSIDE, Kv, Shape
from benchmarks.gpu.rig import Rig
from kvtier.cuda.runtime import Stream
from kvtier.cuda.streams import CopyTicket
from kvtier.policy.store_throttle import StoreThrottle

STRETCH_MAX = 0.05
_STEP_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    shape: Shape = Shape(block_count=256)
    gemm_count: int = 60
    step_count: int = 200
    # From 1 GB/s to the speed of a link the throttle takes some forty looks of 16 steps.
    throttled_step_count: int = 1200
    judged_step_count: int = 400


class _Gate:
    """Open, until it is given a throttle."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.throttle: StoreThrottle | None = None

    def may_store(self, bytes_count: int) -> bool:
        return self.throttle is None or self.throttle.may_send(bytes_count, self._rig.now())


@dataclass(frozen=True, slots=True)
class Steps:
    """Device seconds of each, and the bytes copied meanwhile."""

    seconds: list[float]
    copied_bytes: int

    @property
    def middle(self) -> float:
        return median(self.seconds)

    @property
    def p99(self) -> float:
        return sorted(self.seconds)[min(len(self.seconds) - 1, int(0.99 * len(self.seconds)))]


def measure(rig: Rig, findings: Findings, sizes: Sizes = Sizes()) -> None:
    kernels = rig.make_kernels()
    alone: dict[str, Steps] = {}
    works = {
        "gemm": (rig.work.gemm, sizes.gemm_count),
        "decode": (rig.work.decode_step, sizes.step_count),
    }
    for order in (BLOCKS_OUTSIDE, HEADS_OUTSIDE):
        gate = _Gate(rig)
        kv = Kv(rig, sizes.shape, order, kernels=kernels, may_store=gate.may_store)
        try:
            for name, (queue, count) in works.items():
                if name not in alone:
                    run(rig, kv, (queue, 8))  # Warm: clocks, and whatever torch makes at first use.
                    alone[name] = run(rig, kv, (queue, count))
                    findings.add("alone", {"work": name, **_in_words(alone[name])})
                for copies in (kv.onboard, kv.offload):
                    if rig.is_late(25.0):
                        findings.cut_short(f"{name} beside {copies.__name__} {order}")
                        continue
                    beside = run(rig, kv, (queue, count), copies)
                    row = {"work": name, "copies": copies.__name__, "order": order}
                    findings.add("beside", {**row, **_compared(beside, alone[name])})
            if order == BLOCKS_OUTSIDE:
                gate.throttle = throttle = StoreThrottle(stretch_max=STRETCH_MAX)
                _measure_throttled(rig, findings, (kv, throttle, alone["decode"]), sizes)
        finally:
            kv.close()


def run(
    rig: Rig,
    kv: Kv,
    work: tuple[Callable[[Stream], None], int],
    copies: Callable[[list[int]], CopyTicket] | None = None,
    note_step: Callable[[float, int], None] = lambda _seconds, _bytes: None,
) -> Steps:
    """Steps one after the other, with copies under way all the time."""
    runtime, (queue, count) = rig.runtime, work
    start, end = (runtime.create_event(with_timing=True) for _ in range(2))
    moved_bytes = 0
    under_way: list[CopyTicket] = []

    def keep_copying() -> None:
        nonlocal moved_bytes
        ended = kv.streams.poll()
        moved_bytes += sum(ticket.bytes_count for ticket in ended)
        under_way[:] = [ticket for ticket in under_way if not ticket.is_ended]
        if copies is not None and len(under_way) < 2 and not rig.is_late():
            under_way.append(copies(kv.blocks))

    times = []
    for _ in range(count):
        keep_copying()
        begun, before = rig.now(), kv.streams.stored_bytes
        runtime.record_event(start, kv.compute)
        queue(kv.compute)
        runtime.record_event(end, kv.compute)
        rig.wait_done(end, keep_copying)
        times.append(runtime.elapsed_seconds(start, end))
        note_step(rig.now() - begun, kv.streams.stored_bytes - before)
    moved_bytes += sum(ticket.bytes_count for ticket in under_way)
    for ticket in under_way:
        kv.streams.withdraw(ticket)
    kv.finish()
    for event in (start, end):
        runtime.destroy_event(event)
    return Steps(times, moved_bytes)


def _measure_throttled(
    rig: Rig, findings: Findings, parts: tuple[Kv, StoreThrottle, Steps], sizes: Sizes
) -> None:
    kv, throttle, alone = parts
    if rig.is_late(15.0):
        findings.cut_short("the throttle")
        return
    rates = []

    def note_step(seconds: float, copied_bytes: int) -> None:
        throttle.note_step(seconds, _STEP_TOKENS, copied_bytes)
        rates.append(throttle.bytes_per_second)

    # As in service: some steps without copies first, or there is nothing to compare with.
    run(rig, kv, (rig.work.decode_step, 32), None, note_step)
    steps = (rig.work.decode_step, sizes.throttled_step_count)
    beside = run(rig, kv, steps, kv.offload, note_step)
    judged = Steps(beside.seconds[-sizes.judged_step_count :], 0)
    findings.add(
        "throttled",
        {
            **_compared(judged, alone),
            "copied_gigabytes_per_second": _compared(beside, alone)["copied_gigabytes_per_second"],
            "last_rate_gigabytes_per_second": round(rates[-1] / 1e9, 2),
        },
    )
    findings.target(
        "decode p99 beside throttled offload, against alone",
        judged.p99 / alone.p99,
        most=1 + STRETCH_MAX,
    )


def _in_words(steps: Steps) -> dict[str, float]:
    return {"p50_seconds": round(steps.middle, 7), "p99_seconds": round(steps.p99, 7)}


def _compared(beside: Steps, alone: Steps) -> dict[str, float]:
    return {
        **_in_words(beside),
        "p50_of_alone": round(beside.middle / alone.middle, 4),
        "p99_of_alone": round(beside.p99 / alone.p99, 4),
        "copied_gigabytes_per_second": round(
            beside.copied_bytes / max(sum(beside.seconds), 1e-9) / 1e9, 4
        ),
    }
