"""Requests of a trace, engines that serve them, and the daemon's core: discrete events, virtual
time.

A request acquires what is resident, waits for what comes from NVMe, onboards, has the rest of its
prompt computed when its engine gets to it (that is its first token), and offloads what is new.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtier.core.instructions import LeaseGranted
from kvtier.policy.eviction import PolicyMaker
from kvtier.sim.machine import Lane, Machine
from kvtier.sim.traces import Trace, TracedRequest
from kvtier.sim.virtual_daemon import HASH_BYTES, Agenda, VirtualDaemon
from kvtier.types import BlockHash, PackedHashes, TierName

PERCENTILES = (50, 90, 99)
SECONDS_A_DAY = 86_400.0
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(slots=True)
class SimulationResult:
    """What came of it; times in seconds, of the simulated clock."""

    requests: int = 0
    asked_blocks: int = 0
    hits: Counter[TierName] = field(default_factory=Counter)  # Blocks, by where they were found.
    ttft_seconds: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    onboarded_bytes: int = 0
    offloaded_bytes: int = 0
    nvme_read_bytes: int = 0
    nvme_written_bytes: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0  # All engines together.
    engine_count: int = 1

    def hit_ratio(self, *tiers: TierName) -> float:
        count = sum(self.hits[tier] for tier in tiers or tuple(TierName))
        return count / self.asked_blocks if self.asked_blocks else 0.0

    def ttft(self, percent: float) -> float:
        return float(np.percentile(self.ttft_seconds, percent)) if self.ttft_seconds else 0.0

    def values(self) -> dict[str, Any]:
        """For JSON."""
        seconds = max(self.seconds, 1e-9)
        return {
            "requests": self.requests,
            "asked_blocks": self.asked_blocks,
            "hit_ratio": round(self.hit_ratio(), 4),
            "hit_ratio_by_tier": {
                str(tier): round(self.hit_ratio(tier), 4) for tier in TierName if self.hits[tier]
            },
            "ttft_seconds": {
                **{f"p{one}": round(self.ttft(one), 4) for one in PERCENTILES},
                "mean": round(float(np.mean(self.ttft_seconds or [0.0])), 4),
            },
            "onboarded_bytes": self.onboarded_bytes,
            "offloaded_bytes": self.offloaded_bytes,
            "nvme_read_bytes": self.nvme_read_bytes,
            "nvme_written_bytes": self.nvme_written_bytes,
            "nvme_written_bytes_per_day": round(self.nvme_written_bytes / seconds * SECONDS_A_DAY),
            "prompt_tokens_per_second": round(self.prompt_tokens / seconds, 1),
            "output_tokens_per_second": round(self.output_tokens / seconds, 1),
            "computed_tokens": self.computed_tokens,
            "prefill_busy_ratio": round(self.prefill_seconds / seconds / self.engine_count, 4),
            "simulated_seconds": round(self.seconds, 3),
        }


def simulate(
    trace: Trace,
    machine: Machine,
    make_policy: PolicyMaker,
    on_progress: Callable[[int], None] = lambda count: None,
) -> SimulationResult:
    """`on_progress` is told of how many requests have come."""
    return _Simulation(trace, machine, make_policy, on_progress).run()


class _Simulation:
    def __init__(
        self,
        trace: Trace,
        machine: Machine,
        make_policy: PolicyMaker,
        on_progress: Callable[[int], None],
    ) -> None:
        self._trace, self._machine, self._tell = trace, machine, on_progress
        self._agenda = Agenda()
        self._daemon = VirtualDaemon(machine, trace.block_tokens, make_policy, self._agenda)
        self._link = Lane(machine.dram_bytes_per_second, machine.dram_delay_seconds)
        self._back = Lane(machine.dram_bytes_per_second, machine.dram_delay_seconds)
        self._engines_free_at = [0.0] * machine.engine_count
        numbers = np.arange(trace.unique_count, dtype=np.uint64)
        self._names = np.stack([numbers * _MIX, numbers], axis=1)
        self.result = SimulationResult(engine_count=machine.engine_count)
        self._next = 0

    def run(self) -> SimulationResult:
        self._arrive_later()
        self._daemon.tick()
        while len(self._agenda):
            self._agenda.step()
        result, daemon = self.result, self._daemon
        result.onboarded_bytes = self._link.moved_bytes
        result.offloaded_bytes = self._back.moved_bytes
        result.nvme_read_bytes = daemon.read.moved_bytes
        result.nvme_written_bytes = daemon.write.moved_bytes
        return result

    def _arrive_later(self) -> None:
        if self._next < len(self._trace.requests):
            self._agenda.at(self._trace.requests[self._next].at, self._arrive)

    def _arrive(self) -> None:
        number = self._next
        self._next += 1
        self._arrive_later()
        self._tell(number)
        request = self._trace.requests[number]
        result = self.result
        result.requests += 1
        result.asked_blocks += len(request.blocks)
        result.prompt_tokens += request.input_tokens
        result.output_tokens += request.output_tokens
        engine = number % self._machine.engine_count
        if not len(request.blocks):
            self._compute(request, engine, 0)
            return
        hashes = PackedHashes(self._names[request.blocks].tobytes(), HASH_BYTES)
        wait = self._machine.wait_seconds_max if self._machine.nvme_bytes else 0.0
        self._daemon.acquire(hashes, wait, lambda granted: self._onboard(request, engine, granted))

    def _onboard(self, request: TracedRequest, engine: int, granted: LeaseGranted) -> None:
        for tier, count in granted.tiers:
            self.result.hits[tier] += count
        length = granted.leased_count * self._daemon.block_bytes

        def done() -> None:
            self._daemon.release(granted)
            self._compute(request, engine, granted.leased_count)

        self._agenda.at(self._link.move(self._agenda.now, length), done)

    def _compute(self, request: TracedRequest, engine: int, hit_count: int) -> None:
        # The last token's block is never complete before it is computed: one token at least.
        tokens = max(1, request.input_tokens - hit_count * self._trace.block_tokens)
        seconds = tokens / self._machine.prefill_tokens_per_second
        end = max(self._agenda.now, self._engines_free_at[engine]) + seconds
        self._engines_free_at[engine] = end
        result = self.result
        result.computed_tokens += tokens
        result.prefill_seconds += seconds
        self._agenda.at(end, lambda: self._first_token(request))

    def _first_token(self, request: TracedRequest) -> None:
        now, result = self._agenda.now, self.result
        result.ttft_seconds.append(now - request.at)
        end = now + request.output_tokens / self._machine.decode_tokens_per_second
        result.seconds = max(result.seconds, end)
        packed = self._names[request.blocks].tobytes()
        known = self._daemon.match(packed) if packed else 0
        count = len(request.blocks) - known
        if count:
            length = count * self._daemon.block_bytes
            self._agenda.at(self._back.move(now, length), lambda: self._offload(packed, known))

    def _offload(self, packed: bytes, known: int) -> None:
        hashes = PackedHashes(packed, HASH_BYTES)
        done, count = known, len(hashes)
        while done < count:  # Ends: without slots the rest is not offloaded.
            slots = self._daemon.reserve(count - done)
            if not len(slots):
                return
            parent: BlockHash | None = hashes[done - 1] if done else None
            part = hashes[done : done + len(slots)]
            self._daemon.commit(part, slots, parent)
            done += len(slots)
