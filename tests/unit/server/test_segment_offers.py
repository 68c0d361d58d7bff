"""Who is offered segments of the CXL tier, and whether blocks reach engines directly."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvtier.clock import SystemClock
from kvtier.config import load
from kvtier.config_cxl import CxlConfig
from kvtier.core.events import SegmentsMapped
from kvtier.errors import BadFrame
from kvtier.pools.cxl import ClientSlab, CxlMemory, MeasuredSpeed
from kvtier.pools.slabs import PageKind, Slab, populate_slab
from kvtier.server.core_loop import CoreLoop
from kvtier.server.segment_offers import SegmentOffers, decide
from kvtier.server.sessions import SessionRecord, Sessions
from kvtier.types import Role, SessionId, SlabId
from kvtier.v1 import kvtier_pb2 as pb

SLAB_BYTES = 2 << 20
FAST = MeasuredSpeed(
    read_bytes_per_second=6e9, write_bytes_per_second=1e9, dram_bytes_per_second=1e10
)
SLOW = MeasuredSpeed(
    read_bytes_per_second=4e9, write_bytes_per_second=9e9, dram_bytes_per_second=1e10
)


def config(**options: str) -> CxlConfig:
    whole = {"node": "0", "single_tenant": "true", **options}
    return load(None, {f"cxl.{name}": value for name, value in whole.items()}).cxl


class Memory:
    """Slabs whose files are passed on as they are, or not at all."""

    def __init__(self, *, is_for_engines: bool = True) -> None:
        self.is_for_engines = is_for_engines

    def open_for_client(self, slab: Slab) -> ClientSlab | None:
        return ClientSlab(os.dup(slab.fd), 4096) if self.is_for_engines else None


class Rig:
    def __init__(self, slabs: list[Slab]) -> None:
        self.slabs = slabs
        self.sent: list[tuple[int, pb.SegmentOffered, int | None]] = []
        self.posted: list[object] = []
        self.records: list[SessionRecord] = []
        self.offers = self.make(config(), Memory())

    def make(self, its: CxlConfig, memory: Memory) -> SegmentOffers:
        core = cast(CoreLoop, SimpleNamespace(post=self.posted.append))
        sessions = SimpleNamespace(live=lambda: self.records, send=self.send)
        return SegmentOffers(core, cast(Sessions, sessions), cast(CxlMemory, memory), its)

    def send(self, session: SessionId, frame: pb.DaemonFrame, fd: int | None = None) -> None:
        self.sent.append((session, frame.segment_offered, fd))

    def record(self, number: int, **facts: Any) -> SessionRecord:
        made = {"role": Role.WORKER, "by_value": False, "knows_segments": True, **facts}
        its = SimpleNamespace(id=SessionId(number), name="one", segments=set(), **made)
        return cast(SessionRecord, its)

    def answer(self, record: SessionRecord, segment: int, refused: str = "") -> None:
        mapped = pb.SegmentMapped(segment=segment, refused=refused)
        self.offers.on_mapped(record, pb.ClientFrame(segment_mapped=mapped))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    clock = SystemClock()
    slabs = [populate_slab(SlabId(n), SLAB_BYTES, PageKind.BASE, clock=clock) for n in (1, 2)]
    found = Rig(slabs)
    yield found
    found.offers.close()
    for slab in slabs:
        os.close(slab.fd)
        slab.mapping.close()


@pytest.mark.parametrize(
    ("options", "speed", "is_direct"),
    [
        ({}, FAST, True),
        ({}, SLOW, False),
        ({"onboard": "direct"}, SLOW, True),
        ({"onboard": "dram"}, FAST, False),
        ({"single_tenant": "false"}, FAST, False),
    ],
)
def test_more_than_half_of_memorys_rate_is_enough(
    options: dict[str, str], speed: MeasuredSpeed, is_direct: bool
) -> None:
    assert decide(config(**options), speed).is_direct is is_direct


def test_emulated_memory_is_never_mapped() -> None:
    emulated = load(None, {"cxl.emulate": "4GB/s", "cxl.bytes": "8MiB"}).cxl
    assert not decide(emulated, FAST).is_direct


def test_sessions_from_before_and_after_are_offered_each_segment_once(rig: Rig) -> None:
    before = rig.record(1)
    rig.records.append(before)
    rig.offers.offer(before)
    assert rig.sent == [], "the tier is not open yet"
    assert rig.offers.open(rig.slabs, 64, FAST).is_direct
    rig.offers.offer(rig.record(2, role=Role.BOTH))
    assert [(session, one.segment) for session, one, _ in rig.sent] == [
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    _, offer, fd = rig.sent[0]
    assert (offer.offset, offer.length, offer.row_count_max) == (4096, SLAB_BYTES, 64)
    assert fd is not None
    assert os.fstat(fd).st_ino == os.fstat(rig.slabs[0].fd).st_ino


@pytest.mark.parametrize(
    "facts",
    [{"knows_segments": False}, {"role": Role.SCHEDULER}, {"role": Role.TOOL}, {"by_value": True}],
)
def test_others_are_offered_none(rig: Rig, facts: dict[str, Any]) -> None:
    rig.offers.open(rig.slabs, 64, FAST)
    rig.offers.offer(rig.record(1, **facts))
    assert rig.sent == []


def test_the_core_hears_of_what_is_mapped_and_not_of_what_is_refused(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.offers.open(rig.slabs, 64, FAST)
    record = rig.record(1)
    rig.offers.offer(record)
    rig.answer(record, 1)
    assert rig.posted == [SegmentsMapped(SessionId(1), (1,))]
    rig.answer(record, 0, refused="no room in the address space")
    assert len(rig.posted) == 1
    assert "segment refused by a client" in caplog.text
    for segment in (0, 7):  # Answered already; never offered.
        with pytest.raises(BadFrame, match="was not offered"):
            rig.answer(record, segment)


def test_memory_that_is_not_for_engines_is_offered_to_nobody(rig: Rig) -> None:
    rig.records.append(rig.record(1))
    offers = rig.make(config(onboard="direct"), Memory(is_for_engines=False))
    assert not offers.open(rig.slabs, 64, FAST).is_direct
    assert rig.sent == []
