"""Requests out of a recording."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtier.core import events as ev
from kvtier.core.manager import BlockManager
from kvtier.core.settings import ManagerConfig
from kvtier.errors import BadRequest, KVTierError
from kvtier.policy.lru import LruPolicy
from kvtier.recording.writer import Noted, RecordingPlan, RecordingWriter
from kvtier.sim.recorded import read_recording
from kvtier.types import BlockHash, NamespaceId, Role, SessionId
from tests.support.known_blocks import chain_hashes
from tests.support.world import engine_id

MANAGER = ManagerConfig(slab_bytes=64 * 4096, slab_count_max=1, key_salt=b"salt")
ONE, TWO = NamespaceId(1), NamespaceId(2)
SESSION = SessionId(1)


def recorded(folder: Path, events: list[tuple[float, ev.Event]]) -> Path:
    plan = RecordingPlan(folder, 64 << 20, "0" * 16, b"salt", MANAGER, "lru")
    writer, manager = RecordingWriter(plan), BlockManager(MANAGER, make_policy=LruPolicy)
    opened: list[tuple[float, ev.Event]] = [
        (0.0, ev.SessionOpened(SESSION, engine_id(1), Role.BOTH, (0,))),
        *((0.0, ev.NamespaceOpened(one, 7, 16, 4096, 1, block_tokens=32)) for one in (ONE, TWO)),
        *((0.0, ev.NamespaceJoined(SESSION, one)) for one in (ONE, TWO)),
    ]
    for now, event in opened + events:
        try:
            writer.note(Noted(now, event, manager.handle(event, now), None))
        except KVTierError as error:
            writer.note(Noted(now, event, (), type(error).__name__))
    writer.close("the daemon ended")
    return writer.path


def chain(label: str, count: int) -> list[BlockHash]:
    return [BlockHash(one[:16]) for one in chain_hashes(label, count)]


def test_what_was_asked_for_comes_as_requests_of_one_tenant_a_namespace(tmp_path: Path) -> None:
    path = recorded(
        tmp_path,
        [
            (10.0, ev.Acquire(SESSION, ONE, chain("a", 4), 70.0)),
            (12.5, ev.Acquire(SESSION, TWO, chain("a", 4), 70.0)),
            (13.0, ev.Acquire(SESSION, ONE, chain("a", 6), 70.0)),
        ],
    )
    trace = read_recording(path)
    assert [one.at for one in trace.requests] == [0.0, 2.5, 3.0]
    assert [len(one.blocks) for one in trace.requests] == [4, 4, 6]
    assert [one.tenant for one in trace.requests] == [1, 2, 1]
    assert trace.block_tokens == 32
    assert trace.requests[2].blocks[:4].tolist() == trace.requests[0].blocks.tolist()
    assert trace.unique_count == 10, "two namespaces share no block"


def test_chains_that_were_only_committed_count_too(tmp_path: Path) -> None:
    hashes = chain("b", 4)
    slots = np.arange(2, dtype=np.uint32)
    path = recorded(
        tmp_path,
        [
            (1.0, ev.SlabPopulated(1)),  # type: ignore[arg-type]
            (1.5, ev.Reserve(SESSION, ONE, 2)),
            (1.6, ev.SlabMapped(SESSION, 1)),  # type: ignore[arg-type]
            (1.7, ev.Reserve(SESSION, ONE, 2)),
            (2.0, ev.Commit(SESSION, ONE, hashes[:2], slots, None, 7)),
            (3.0, ev.Acquire(SESSION, ONE, hashes, 50.0)),
        ],
    )
    assert [len(one.blocks) for one in read_recording(path).requests] == [2, 4]


def test_a_recording_without_requests_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="has no request in it"):
        read_recording(recorded(tmp_path, []))
