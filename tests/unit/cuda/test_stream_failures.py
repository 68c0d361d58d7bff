"""Copies that fail where nothing is left to tell their end: each still ends, once, and in time."""

from __future__ import annotations

import pytest

from kvtier.cuda.copy_paths import PathLimits
from kvtier.cuda.errors import CudaBroken, CudaCode, CudaMemoryFull, CudaRefused
from kvtier.cuda.fake import FakeCudart, FakeDevice
from kvtier.cuda.runtime import Event
from tests.support.copy_rig import CopyRig
from tests.support.kv_layouts import LAYOUTS, Sizes

SMALL_PIECES = PathLimits(piece_bytes_max=1500, piece_runs_max=5)


def rig_of(device: FakeDevice | None = None, in_flight_bytes_max: int = 1 << 20) -> CopyRig:
    cuda = FakeCudart(device=device)
    kv = LAYOUTS["split"](cuda, Sizes(blocks=10))
    return CopyRig(cuda, kv, limits=SMALL_PIECES, in_flight_bytes_max=in_flight_bytes_max)


@pytest.mark.parametrize("made_first", [0, 1, 2, 5])
def test_copies_without_an_event_fail_after_they_have_ended(
    monkeypatch: pytest.MonkeyPatch, made_first: int
) -> None:
    """No room for an event, in the engine's thread that follows a copy or in the copying one."""
    rig = rig_of()
    rig.compute_fill(0, 1, seconds=1e-3)
    tickets = [rig.offload([0, 1, 2], [0, 1, 2]), rig.onboard([4], [4])]
    create, made = FakeCudart.create_event, 0

    def refuse(self: FakeCudart, *, with_timing: bool = False) -> Event:
        nonlocal made
        made += 1
        if made > made_first:
            raise CudaMemoryFull("cudaEventCreateWithFlags", CudaCode.OUT_OF_MEMORY)
        return create(self, with_timing=with_timing)

    monkeypatch.setattr(FakeCudart, "create_event", refuse)
    rig.streams.follow(rig.compute, tickets[0])
    ended = rig.run()
    assert made > made_first
    assert sorted(map(id, ended)) == sorted(map(id, tickets)), "each once"
    assert any(isinstance(ticket.failed, CudaMemoryFull) for ticket in tickets)
    monkeypatch.undo()
    rig.compute_fill(0, 2)
    rig.compute_fill(4, 2)
    rig.slot_bytes_of(0)
    rig.cuda.advance(1.0)
    rig.close()


def test_a_copy_that_is_refused_as_the_context_is_lost_ends_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = rig_of(FakeDevice(has_batches=False))
    ticket = rig.offload([0, 1], [0, 1])

    def refuse(self: FakeCudart, *arguments: object) -> None:
        self._broken = CudaCode.ILLEGAL_ADDRESS
        raise CudaRefused("cudaMemcpyAsync", CudaCode.INVALID_VALUE)

    monkeypatch.setattr(FakeCudart, "copy", refuse)
    assert rig.streams.poll() == [ticket]
    assert isinstance(ticket.failed, CudaBroken)


def test_what_is_asked_for_after_the_end_fails_however_much_was_in_flight() -> None:
    rig = rig_of(in_flight_bytes_max=1)
    rig.compute_fill(0, 1, seconds=1.0)
    first = [rig.offload([0, 1], [0, 1]), rig.onboard([2, 3], [2, 3])]
    assert rig.streams.poll() == []
    rig.streams.give_up(ZeroDivisionError("a bug"))
    later = [rig.offload([4], [4]), rig.onboard([5], [5])]
    ended = [*rig.streams.poll(), *rig.streams.poll()]
    assert sorted(map(id, ended)) == sorted(map(id, [*first, *later]))
    assert all(isinstance(ticket.failed, CudaBroken) for ticket in ended)
