"""Recordings: what is written is read again, and damage is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtier.core import events as ev
from kvtier.core.instructions import Instruction
from kvtier.core.manager import BlockManager
from kvtier.core.salting import SALT_BYTES, salted
from kvtier.core.settings import LowerSettings, ManagerConfig
from kvtier.core.tenancy import TenantBudget
from kvtier.errors import BadRequest, KVTierError
from kvtier.policy.admission import Admission
from kvtier.policy.curves import CurvesPolicy
from kvtier.policy.eviction import PolicyMaker
from kvtier.policy.lru import LruPolicy
from kvtier.recording import writer
from kvtier.recording.files import RecordingFile
from kvtier.recording.replaying import Difference, Replay, recorded_batches
from kvtier.recording.values import EVENTS, Decoder, Encoder, Names
from kvtier.recording.writer import Noted, RecordingPlan, RecordingWriter
from kvtier.types import BlockHash, NamespaceId, PackedHashes, SessionId, TierName
from tests.sim.tiered_simulation import TieredSimulation
from tests.support.forms import rounds
from tests.support.known_blocks import chain_hashes

SALT = bytes(range(SALT_BYTES))
MANAGER = ManagerConfig(
    slab_bytes=1 << 20,
    slab_count_max=4,
    key_salt=SALT,
    tenants={"red": TenantBudget(0.25, 0.5, 2.0, 0)},
)


def plan_for(folder: Path, manager: ManagerConfig, policy: str, number: int = 0) -> RecordingPlan:
    return RecordingPlan(folder, 64 << 20, f"{number:016x}", SALT, manager, policy)


class Recorded(BlockManager):
    """As the daemon's, but everything is written at once."""

    def __init__(
        self, config: ManagerConfig, make_policy: PolicyMaker, to: RecordingWriter
    ) -> None:
        super().__init__(config, make_policy=make_policy)
        self.to = to

    def handle(self, event: ev.Event, now: float) -> list[Instruction]:
        try:
            found = super().handle(event, now)
        except KVTierError as error:
            self.to.note(Noted(now, event, (), type(error).__name__))
            raise
        self.to.note(Noted(now, event, found, None))
        return found


def record_simulation(folder: Path, policy: str, make_policy: PolicyMaker) -> list[Path]:
    """The first files of the recordings, one for each life of a daemon under faults."""
    written: list[RecordingWriter] = []

    def make(config: ManagerConfig) -> BlockManager:
        config = replace(config, key_salt=SALT)
        to = RecordingWriter(plan_for(folder, config, policy, len(written)))
        written.append(to)
        return Recorded(config, make_policy, to)

    simulation = TieredSimulation(1, make)
    simulation.seconds = rounds(short=4, full=40)
    simulation.play()
    for one in written:
        one.close("the daemon ended")
    return sorted(folder.glob("*-000000.kvrec"))


def replayed(path: Path, make_policy: PolicyMaker) -> Replay:
    found: Replay | None = None
    for header, batch in recorded_batches(path):
        found = found or Replay(header, make_policy)
        if batch is not None and found.run(batch) is not None:
            break
    assert found is not None
    return found


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "BATCH_BYTES", 2048)


@pytest.fixture
def recording(tmp_path: Path, small_batches: None) -> Path:
    """One file of an opened namespace and some hundred ticks."""
    to = RecordingWriter(plan_for(tmp_path, MANAGER, "lru"))
    manager = Recorded(MANAGER, LruPolicy, to)
    manager.handle(ev.NamespaceOpened(NamespaceId(1), 7, 16, 4096, 1), 1.0)
    for number in range(400):
        manager.handle(ev.Tick(), 2.0 + number)
    to.close("the daemon ended")
    return to.path


@pytest.mark.full_form
@pytest.mark.parametrize(("policy", "maker"), [("lru", LruPolicy), ("curves", CurvesPolicy)])
def test_two_tiers_under_faults_decide_the_same_again(
    policy: str, maker: PolicyMaker, tmp_path: Path
) -> None:
    paths = record_simulation(tmp_path, policy, maker)
    counts = []
    for path in paths:
        found = replayed(path, maker)
        assert found.state.difference is None, found.state.difference
        assert not found.manager.check_invariants()
        counts.append(found.state.event_count)
    assert sum(counts) > 300, "hardly anything was recorded"


def test_the_first_other_decision_is_found(tmp_path: Path) -> None:
    paths = record_simulation(tmp_path, "lru", LruPolicy)

    class Reversed(LruPolicy):
        def nominate(self, count, may_evict, chain_of):  # type: ignore[no-untyped-def]
            victims = list(super().nominate(count + 1, may_evict))
            yield from victims[1:]

    differences = [replayed(path, Reversed).state.difference for path in paths]
    found = next(one for one in differences if one is not None)
    assert isinstance(found, Difference)
    assert found.number > 0


def test_no_block_hash_is_in_the_file() -> None:
    hashes = [BlockHash(one) for one in chain_hashes("x", 3)]
    event = ev.Acquire(SessionId(1), NamespaceId(1), hashes, 9.0)
    encoder = Encoder(Names(SALT), {}, names_new=True)
    encoder.put(event)
    assert not any(block in encoder.out for block in hashes)
    decoder = Decoder()
    decoder.feed(bytes(encoder.out))
    assert decoder.get() == replace(event, hashes=[salted(one, SALT) for one in hashes])


def test_a_prefix_that_comes_again_takes_a_few_bytes() -> None:
    hashes = [BlockHash(number.to_bytes(16, "big")) for number in range(1000)]
    encoder = Encoder(Names(), {}, names_new=True)
    encoder.put(ev.Evict(NamespaceId(1), PackedHashes(b"".join(hashes), 16)))
    first = len(encoder.out)
    encoder.put(ev.Evict(NamespaceId(1), hashes[:900]))
    assert first > 16_000
    assert len(encoder.out) - first < 40
    decoder = Decoder()
    decoder.feed(bytes(encoder.out))
    assert list(decoder.get().hashes) == hashes
    assert decoder.get().hashes == hashes[:900]


def test_every_event_is_read_as_it_was_written() -> None:
    namespace, hashes = NamespaceId(1), [BlockHash(one) for one in chain_hashes("y", 4)]
    events = [
        ev.NamespaceOpened(namespace, 7, len(hashes[0]), 4096, 2, fingerprint=b"f" * 16),
        ev.Commit(
            *(SessionId(3), namespace, hashes, np.arange(4, dtype=np.uint32), None, 7),
            checksums=np.arange(4, dtype=np.uint64),
        ),
        ev.BlocksRecovered(
            *(namespace, 7, b"".join(hashes), np.arange(-1, 3, dtype=np.int32)),
            *(np.arange(4, dtype=np.uint32), np.arange(4, dtype=np.uint64)),
        ),
        ev.Tick(),
    ]
    encoder = Encoder(Names(), {}, names_new=True)
    for one in events:
        encoder.put(one)
    decoder = Decoder()
    decoder.feed(bytes(encoder.out))
    assert [repr(decoder.get()) for _ in events] == [repr(one) for one in events]
    assert decoder.is_at_end


def test_a_file_that_was_cut_anywhere_says_so(recording: Path, tmp_path: Path) -> None:
    whole = recording.read_bytes()
    cut = tmp_path / "cut.kvrec"
    header = whole.index(b"\n") + 1
    for length in [*range(header, len(whole), 97), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(BadRequest, match="breaks off at byte"):
            list(recorded_batches(cut))
    cut.write_bytes(whole[: header // 2])
    with pytest.raises(BadRequest, match="no recording of kvtier"):
        list(recorded_batches(cut))


def test_a_flipped_bit_anywhere_is_told_and_never_believed(recording: Path, tmp_path: Path) -> None:
    whole = recording.read_bytes()
    flipped = tmp_path / "flipped.kvrec"
    header = whole.index(b"\n") + 1
    for place in range(header, len(whole), 53):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        flipped.write_bytes(data)
        with pytest.raises(BadRequest, match=r"damaged|breaks off"):
            list(recorded_batches(flipped))


def test_a_recording_of_other_events_is_refused(recording: Path) -> None:
    line, rest = recording.read_bytes().split(b"\n", 1)
    values = json.loads(line)
    values["forms"][0][1] = "something"
    recording.write_bytes(json.dumps(values).encode() + b"\n" + rest)
    with pytest.raises(BadRequest, match="replay it with that version"):
        RecordingFile(recording)


@pytest.fixture
def rotated(tmp_path: Path, small_batches: None, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files of a recording that was bounded to less than it took."""
    monkeypatch.setattr(writer, "NAMES_MAX", 64)
    plan = replace(plan_for(tmp_path, MANAGER, "lru"), bytes_max=40_000)
    to = RecordingWriter(plan)
    manager = Recorded(MANAGER, LruPolicy, to)
    manager.handle(ev.NamespaceOpened(NamespaceId(1), 7, 16, 4096, 1), 1.0)
    for number in range(2000):
        hashes = [BlockHash(number.to_bytes(16, "big"))]
        manager.handle(ev.HintPaused(NamespaceId(1), hashes), 2.0 + number)
    to.close("the daemon ended")
    return sorted(tmp_path.glob("*.kvrec"))


def test_the_core_of_a_replay_has_the_settings_of_the_recorded_one(tmp_path: Path) -> None:
    """To their types: the core asks whether an enum is the one."""
    lower = {
        tier: LowerSettings(admission=admission)
        for tier, admission in zip((TierName.CXL, TierName.REMOTE), Admission, strict=False)
    }
    config = replace(MANAGER, lower=lower, grace_seconds=0.25)
    to = RecordingWriter(plan_for(tmp_path, config, "lru"))
    to.close("the daemon ended")
    assert repr(RecordingFile(to.path).header.manager) == repr(replace(config, key_salt=b""))


def test_a_bounded_recording_keeps_its_end(rotated: list[Path]) -> None:
    assert sum(path.stat().st_size for path in rotated) < 60_000
    assert not rotated[0].name.endswith("-000000.kvrec"), "nothing was rotated away"
    batches = [batch for _, batch in recorded_batches(rotated[0]) if batch is not None]
    assert batches[-1].event_first + len(batches[-1].events) == 2001


def test_recordings_that_are_small_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "FILES_MAX", 5)
    for number in range(9):
        RecordingWriter(plan_for(tmp_path, MANAGER, "lru", number)).close("the daemon ended")
    assert len(list(tmp_path.glob("*.kvrec"))) == 5


def test_mid_life_is_told_instead_of_replayed(rotated: list[Path]) -> None:
    with pytest.raises(BadRequest, match="begins in mid-life, at event"):
        replayed(rotated[0], LruPolicy)


def test_a_file_missing_in_the_middle_is_told(rotated: list[Path]) -> None:
    rotated[1].unlink()
    with pytest.raises(BadRequest, match="the recording goes on in"):
        list(recorded_batches(rotated[0]))


def test_every_event_has_a_form() -> None:
    assert len({one.__name__ for one in EVENTS}) == len(EVENTS)
