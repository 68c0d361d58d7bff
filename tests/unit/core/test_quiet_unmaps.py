"""Being quiet about its own old session means that a process has unmapped what it mapped there."""

from __future__ import annotations

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.manager import BlockManager
from kvtier.core.settings import ManagerConfig
from kvtier.policy.lru import LruPolicy
from kvtier.types import EngineId, NamespaceId, Role, SessionId, SlabId, SlabSetId

NS = NamespaceId(1)
ENGINE = EngineId(b"e" * 16)
OLD, NEW = SessionId(1), SessionId(2)
SLAB = SlabId(1)


def test_a_withdrawn_slab_goes_when_its_mapper_is_quiet_about_the_session_it_mapped_under() -> None:
    manager = BlockManager(
        ManagerConfig(slab_bytes=1 << 21, slab_count_max=1), make_policy=LruPolicy
    )
    for event in (
        ev.SlabPopulated(SLAB),
        ev.NamespaceOpened(NS, epoch=1, hash_bytes=32, slot_bytes=4096, shard_count=1),
        ev.SessionOpened(OLD, ENGINE, Role.BOTH, (0,)),
        ev.NamespaceJoined(OLD, NS),
        ev.SlabMapped(OLD, SLAB),
        ev.SessionOpened(SessionId(3), ENGINE, Role.WORKER, (0,)),  # Is not quiet yet.
        ev.SessionOpened(NEW, ENGINE, Role.BOTH, (0,), replaces=OLD),
        ev.WithdrawSlabSet(SlabSetId(1)),
        ev.SweepVoid(),  # As Continue asks for.
        ev.SweepVoid(),
    ):
        told = manager.handle(event, 0.0)
    assert not any(isinstance(one, ins.DropSlabs) for one in told), "the old mapping is in use"
    told = manager.handle(ev.SessionQuiet(NEW, about=OLD), 0.0)
    assert ins.DropSlabs(SlabSetId(1), (SLAB,)) in told
