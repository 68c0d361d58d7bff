"""Segments of the CXL tier, offered to engines that copy from it themselves; whether they may.

Each is offered once in a session's life. A process that has mapped it says so, and the core leases
slots in it to an engine all of whose workers have. Who cannot map one says why, and is served
through DRAM, as are clients that do not know such offers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.config_cxl import CxlConfig
from kvtier.core.events import SegmentsMapped
from kvtier.errors import BadFrame
from kvtier.pools.cxl import ClientSlab, CxlMemory, MeasuredSpeed
from kvtier.pools.slabs import Slab
from kvtier.server.core_loop import CoreLoop
from kvtier.server.sessions import SessionRecord, Sessions
from kvtier.types import Role
from kvtier.v1 import kvtier_pb2 as pb

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Onboarding:
    """How blocks reach engines from the tier, and why."""

    is_direct: bool
    why: str


class Offers(Protocol):
    """What the tier's keeper asks of them."""

    def open(
        self, slabs: Sequence[Slab], row_count_max: int, speed: MeasuredSpeed
    ) -> Onboarding: ...

    def close(self) -> None: ...


class SegmentOffers:
    """Lives on the event loop; owns the descriptors that it passes on."""

    def __init__(
        self,
        core: CoreLoop,
        sessions: Sessions,
        memory: CxlMemory | None,
        config: CxlConfig,
    ) -> None:
        self._core = core
        self._sessions = sessions
        self._memory = memory
        self._config = config
        self._segments: list[tuple[ClientSlab, pb.SegmentOffered]] = []

    def open(self, slabs: Sequence[Slab], row_count_max: int, speed: MeasuredSpeed) -> Onboarding:
        """The tier opens: decide, and offer it to everybody who is there. Segment s is slab s."""
        found = decide(self._config, speed)
        if not found.is_direct or self._memory is None:
            return found
        for segment, slab in enumerate(slabs):
            opened = self._memory.open_for_client(slab)
            if opened is None:
                self.close()
                return Onboarding(False, "this memory is not for engines")
            offer = pb.SegmentOffered(
                segment=segment,
                offset=opened.offset,
                length=slab.length_bytes,
                row_count_max=row_count_max,
            )
            self._segments.append((opened, offer))
        for record in self._sessions.live():
            self.offer(record)
        return found

    def offer(self, record: SessionRecord) -> None:
        """To a session that has just been opened, or was before the tier."""
        maps = record.role in (Role.WORKER, Role.BOTH) and not record.by_value
        if not (maps and record.knows_segments):
            return
        for opened, offer in self._segments:
            record.segments.add(offer.segment)
            self._sessions.send(record.id, pb.DaemonFrame(segment_offered=offer), opened.fd)

    def on_mapped(self, record: SessionRecord, frame: pb.ClientFrame) -> None:
        answer = frame.segment_mapped
        if answer.segment not in record.segments:
            raise BadFrame(f"segment {answer.segment} was not offered to this session")
        record.segments.discard(answer.segment)  # It is answered once.
        if answer.refused:
            log.warning(
                "segment refused by a client",
                extra={"client": record.name, "session": record.id, "reason": answer.refused},
            )
            return
        self._core.post(SegmentsMapped(record.id, (answer.segment,)))

    def close(self) -> None:
        for opened, _ in self._segments:
            os.close(opened.fd)
        self._segments.clear()


def decide(config: CxlConfig, speed: MeasuredSpeed) -> Onboarding:
    """Directly, a block that is used n times takes n / c; through DRAM 1 / c and n / d. The first
    use is always sooner directly; up to two it is where c is more than half of d, and a block that
    is used more often gets into DRAM all the same."""
    cxl, dram = speed.read_bytes_per_second, speed.dram_bytes_per_second
    if config.onboard != "auto":
        return Onboarding(config.onboard == "direct", "cxl.onboard")
    if not config.single_tenant or config.emulate is not None:
        return Onboarding(False, "not cxl.single_tenant, or emulated")
    is_direct = cxl > dram / 2
    return Onboarding(is_direct, f"reads at {cxl / dram:.2f} of DRAM's rate")
