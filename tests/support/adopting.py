"""A world whose daemon is killed and whose next one adopts what is in memory.

What the next one knows is what the real one could: the slot table, which slabs hold what, and the
sessions whose processes nobody has proven dead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from kvtier.core import events as ev
from kvtier.core.engines import ProcessState, Session
from kvtier.types import BlockHash, EngineId, NamespaceId, Role, SessionId
from tests.support.fake_engine import FakeEngine
from tests.support.world import HASH_BYTES, Bound, World, slots_of


def hold_seconds(world: World) -> float:
    """How long leases of the former life may run on."""
    return world.config.lease_seconds_max + world.config.lease_margin_seconds


def restart(
    world: World,
    engines: Sequence[FakeEngine],
    unreadable: Callable[[int], bool] = lambda _: False,
    before: Callable[[], None] = lambda: None,
) -> None:
    """kill -9, and a daemon that adopts; entries of `unreadable` slots cannot be read.

    `before`: what the new one does before it adopts, its namespaces open.
    """
    world.config = replace(world.config, lease_first=world.config.lease_first + 100_000)
    sets = sorted(world.sets.values(), key=lambda bound: bound.slots.start)
    sessions = sorted(world.manager.sessions(), key=lambda one: one.session)
    tables = {
        namespace: (dict(record.ready_at), dict(record.filled_by))
        for namespace, record in world.namespaces.items()
    }
    kept = [slab for bound in sets for slab in bound.slabs]
    stock_count = len(world.node_of) - len(kept)
    world.node_of = {slab: world.node_of[slab] for slab in kept}
    world.make_anew()
    for namespace, record in world.namespaces.items():
        world.open_namespace(
            namespace,
            slot_bytes=record.slot_bytes,
            shard_count=record.shard_count,
            tenant=record.tenant,
        )
    for engine in engines:
        for process in engine.processes:
            process.session = None
    before()
    _restore_sessions(world, sessions)
    for bound in sets:
        _adopt_set(world, bound, [one.session for one in sessions])
    for namespace, (ready, filled) in tables.items():
        slots = [slot for bound in sets if bound.namespace == namespace for slot in bound.slots]
        if not slots:
            continue
        # An entry of a former epoch tells of no block, nor that nobody reads there.
        void_at = world.namespaces[namespace].void_at
        readable = [slot for slot in slots if not unreadable(slot) and slot not in void_at]
        _adopt_filled(world, namespace, readable, filled, sessions)
        _adopt_free(world, namespace, readable, ready, filled)
        _adopt_blocks(world, namespace, {ready[slot]: slot for slot in readable if slot in ready})
    world.turns.append((ev.AdoptionEnded(), None))
    for _ in range(stock_count):
        world.populate_slab()


def _restore_sessions(world: World, sessions: Sequence[Session]) -> None:
    """All of them are lost; the processes that were proven dead are so still."""
    newest: dict[int, SessionId] = {}
    for one in sessions:
        world.mail[one.session].clear()
        world.run_quietly(
            ev.SessionOpened(
                one.session,
                one.engine,
                one.role,
                one.shards,
                one.by_value,
                replaces=newest.get(id(one.process)),
                tenant=one.tenant,
            )
        )
        newest[id(one.process)] = one.session
    for one in sessions:
        if one.session != newest[id(one.process)]:
            continue
        if one.process.state is ProcessState.DEAD:
            world.run_quietly(ev.ProcessDied(one.session))
        elif one.process.state is ProcessState.ENDED:
            world.run_quietly(ev.SessionEnded(one.session))
        else:
            world.run_quietly(ev.SessionLost(one.session))


def _adopt_set(world: World, bound: Bound, lost: Sequence[SessionId]) -> None:
    world.run_quietly(
        ev.SlabsAdopted(
            bound.namespace,
            bound.slabs,
            bound.slots.start,
            len(bound.slots),
            bound.slots.stop,
            world.now + hold_seconds(world),
            tuple(lost),
        )
    )


def _adopt_filled(
    world: World,
    namespace: NamespaceId,
    slots: Collection[int],
    filled: dict[int, EngineId | None],
    sessions: Sequence[Session],
) -> None:
    for engine in {one.engine for one in sessions}:
        mine = [slot for slot in slots if slot in filled and filled[slot] == engine]
        holders = tuple(
            one.session for one in sessions if one.engine == engine and one.role is not Role.WORKER
        )
        world.run_quietly(ev.ReservedAdopted(namespace, slots_of(mine), holders))


def _adopt_free(
    world: World,
    namespace: NamespaceId,
    slots: Collection[int],
    ready: dict[int, BlockHash],
    filled: dict[int, EngineId | None],
) -> None:
    """Entries of zeros, and slots that the daemon itself was filling."""
    free = [slot for slot in slots if slot not in ready and slot not in filled]
    free += [slot for slot in slots if slot in filled and filled[slot] is None]
    world.run_quietly(ev.FreeAdopted(namespace, slots_of(free)))


def _adopt_blocks(world: World, namespace: NamespaceId, found: dict[BlockHash, int]) -> None:
    """Blocks that chains reach, parents first; its slices get their turns later."""
    record = world.namespaces[namespace]
    reached: dict[BlockHash, int] = {}
    parents: list[int] = []
    for block in sorted(found, key=lambda block: len(block.lstrip(b"."))):
        parent = _parent(block)
        if parent is None or parent in reached:
            parents.append(-1 if parent is None else reached[parent])
            reached[block] = len(reached)
    slots = [found[block] for block in reached]
    record.ready_at.update(zip(slots, reached, strict=True))
    record.ever_ready.update(reached)
    if not reached:
        return
    summed = [slot in world.checksum_at for slot in slots]
    world.start(
        ev.BlocksAdopted(
            namespace,
            record.epoch,
            b"".join(reached),
            np.array(parents, dtype=np.int32),
            slots_of(slots),
            np.array(summed, dtype=np.bool_),
            sequence_next=1 << 20,
        )
    )


def _parent(block: BlockHash) -> BlockHash | None:
    path = block.lstrip(b".")[:-1]
    return BlockHash(path.rjust(HASH_BYTES, b".")) if path else None
