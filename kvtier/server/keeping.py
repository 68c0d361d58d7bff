"""Keeping: what outlives this process is left with somebody, and taken over from the life before.

A `Keeper` writes the inventory and parks what it names. Order of each change, so that a kill
between any two steps leaves a true inventory: a descriptor is parked before the inventory names it,
and unparked after it has stopped to. Whoever changes something calls in time: a set before any of
it is offered, a session before its client hears that it is open.

A place that fails is not used any more, and the inventory says so: the next life begins empty.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from mmap import PAGESIZE
from pathlib import Path

from kvtier.config_restart import RestartConfig
from kvtier.io.memory import create_memfd
from kvtier.pools.slot_table import ENTRY_BYTES, FORMAT_VERSION, read_entries
from kvtier.pools.table_versions import as_current
from kvtier.server.inventory import (
    Inventory,
    InventoryFile,
    ParkedSession,
    ParkedSet,
    read_inventory,
)
from kvtier.server.parking import (
    HolderParking,
    Parking,
    ParkingFailed,
    SystemdParking,
    systemd_keeps,
)

log = logging.getLogger(__name__)

INVENTORY = "inventory"
TABLE = f"slot-table-{FORMAT_VERSION}"
# Numbers of sessions are written down so many ahead: not at each Greet.
SESSIONS_AHEAD = 4096
# Whatever it is about the memory taken over that ends us, it must not do so for ever.
TRIES_MAX = 5
LEASES_A_LIFE_BITS = 40


@dataclass(frozen=True, slots=True)
class Former:
    """What the life before left, whole as far as the inventory goes."""

    inventory: Inventory
    inventory_fd: int
    table_fd: int  # In this build's version.


class Keeper:
    """Lives on the event loop. `begin` ends the taking over of descriptors; nothing is changed at
    the parking place before it, so that a start that is refused loses nothing."""

    def __init__(self, parking: Parking | None = None) -> None:
        """`parking`: ours then; None where nobody keeps anything."""
        self._parking = parking
        self._taken: dict[str, int] = {}
        self.former: Former | None = None
        self._file: InventoryFile | None = None
        self._inventory = Inventory(0, FORMAT_VERSION, 0)
        self._parked: set[str] = set()
        self._kept_sets: set[int] = set()  # By their first slots.
        if parking is not None:
            self._take()

    # ------------------------------------------------------------------------------ taking over

    @property
    def is_on(self) -> bool:
        return self._parking is not None

    @property
    def life(self) -> int:
        """How many lives this memory has had before this one."""
        return 0 if self.former is None else self.former.inventory.life + 1

    @property
    def lease_first(self) -> int:
        """Above every lease of the former lives."""
        return (self.life << LEASES_A_LIFE_BITS) + 1

    def take(self, name: str) -> int | None:
        """A parked descriptor, which is the caller's then; None when there is none."""
        return self._taken.pop(name, None)

    def begin(self, generation: int, table_fd: int, hold_seconds: float) -> None:
        """This life's memory is `table_fd`'s, which stays the caller's: from now on it is kept.

        What nobody has taken of the former life goes back.
        """
        if self._parking is None:
            return
        known = {INVENTORY, TABLE}
        former = self.former
        if former is None:
            self._file = InventoryFile()
            self._inventory = Inventory(
                generation, FORMAT_VERSION, slot_next=0, table=TABLE, hold_seconds=hold_seconds
            )
            self._write()
            # First: an old inventory beside a new table would call slots free that are in use.
            self._try_to(lambda place: place.unpark(INVENTORY))
            self._try_to(lambda place: place.park(TABLE, table_fd))
            fd = self._file.fd
            self._try_to(lambda place: place.park(INVENTORY, fd))
        else:
            self.begin_taking_over()
            before = self._inventory
            if before.table != TABLE:  # It was converted: the next life finds the new one.
                self._park(TABLE, table_fd)
            known |= {slab.name for one in before.sets for slab in one.slabs}
            known |= {one.pidfd for one in before.sessions if one.pidfd}
            self._inventory = replace(
                before,
                table=TABLE,
                table_version=FORMAT_VERSION,
                life=self.life,
                hold_seconds=max(hold_seconds, before.hold_seconds),
            )
            self._write()
            if before.table != TABLE:
                self._unpark([before.table])
        self._parked |= known
        self._kept_sets = {one.slot_first for one in self._inventory.sets}
        for name in [name for name in self._taken if name not in known]:
            self._unpark([name])
        while self._taken:
            os.close(self._taken.popitem()[1])

    def close(self) -> None:
        """What is kept stays so."""
        while self._taken:
            os.close(self._taken.popitem()[1])
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._parking is not None:
            self._parking.close()
            self._parking = None

    def begin_taking_over(self) -> None:
        """Before anything of the former life is believed: this counts as a try."""
        if self.former is not None and self._file is None:
            before = self.former.inventory
            self._file = InventoryFile(self.former.inventory_fd)
            self._inventory = replace(before, tries=before.tries + 1)
            self._write()

    def end_taking_over(self) -> None:
        """What was taken over has ended nobody, or this life ends in order."""
        self._change(tries=0)

    # --------------------------------------------------------------------------------- keeping

    def keep_set(self, one: ParkedSet, fds: Sequence[int]) -> None:
        """When this returns the set, and its slabs, outlive us; a known one changes nothing."""
        if self._file is None or one.slot_first in self._kept_sets:
            return
        self._kept_sets.add(one.slot_first)
        for slab, fd in zip(one.slabs, fds, strict=True):
            self._park(slab.name, fd)
        inventory = self._inventory
        self._change(
            sets=(*inventory.sets, one),
            slot_next=max(inventory.slot_next, one.slot_first + one.slot_count),
            slab_next=max(inventory.slab_next, *(slab.slab + 1 for slab in one.slabs)),
        )

    def drop_set(self, slot_first: int) -> None:
        """The set is no more, for the next life too."""
        self._kept_sets.discard(slot_first)
        gone = [one for one in self._inventory.sets if one.slot_first == slot_first]
        self._change(
            sets=tuple(one for one in self._inventory.sets if one.slot_first != slot_first)
        )
        self._unpark(slab.name for one in gone for slab in one.slabs)

    def keep_process(self, name: str, pidfd: int) -> None:
        self._park(name, pidfd)

    def keep_namespace(self, facts: str) -> None:
        if facts not in self._inventory.namespaces:
            self._change(namespaces=(*self._inventory.namespaces, facts))

    def note_namespaces(self, namespaces: Iterable[str]) -> None:
        """These are all."""
        self._change(namespaces=tuple(namespaces))

    def note_sessions(self, sessions: Iterable[ParkedSession]) -> None:
        """All that somebody may still touch memory under; processes of no session are let go."""
        self._change(sessions=tuple(sessions))
        named = {one.pidfd for one in self._inventory.sessions}
        self._unpark(
            [name for name in self._parked if name.startswith("process-") and name not in named]
        )

    def sessions_until(self, session: int) -> int:
        """Numbers below the answer, which is above `session`, are not given by the next life."""
        until = max(self._inventory.session_next, session + SESSIONS_AHEAD)
        self._change(session_next=until)
        return until

    # --------------------------------------------------------------------------------- helpers

    def _take(self) -> None:
        assert self._parking is not None, "nobody to take from"
        try:
            self._taken = self._parking.take_all()
        except ParkingFailed as error:
            self._give_up(error)
            return
        reason = self._find_former()
        if reason:
            log.warning("memory of the former life is let go", extra={"reason": reason})

    def _find_former(self) -> str:
        """Why there is none to be taken over; empty when there is, or never was."""
        if not self._taken:
            return ""
        fd = self._taken.get(INVENTORY)
        if fd is None:
            return "there is no inventory of it"
        found = read_inventory(fd)
        if isinstance(found, str):
            return found
        if found.generation == 0:
            return "its daemon could not keep all of it"
        if found.tries >= TRIES_MAX:
            return f"it was begun to be taken over {found.tries} times in vain"
        if found.table not in self._taken:
            return "its slot table is missing"
        table_fd = self._taken[found.table]
        length_bytes = os.fstat(table_fd).st_size
        if length_bytes < found.slot_next * ENTRY_BYTES or length_bytes % PAGESIZE:
            return f"its slot table has {length_bytes} bytes for {found.slot_next} slots"
        if found.table_version != FORMAT_VERSION:
            converted = _converted(table_fd, found)
            if converted is None:
                return f"its slot table has version {found.table_version}"
            os.close(table_fd)
            table_fd = converted
        del self._taken[found.table]
        self.former = Former(found, self._taken.pop(INVENTORY), table_fd)
        return ""

    def _change(self, **changes: object) -> None:
        if self._file is None:
            return
        changed = replace(self._inventory, **changes)  # type: ignore[arg-type]  # Our own names.
        if changed != self._inventory:
            self._inventory = changed
            self._write()

    def _write(self) -> None:
        if self._file is not None and self._parking is not None:
            self._file.write(self._inventory)

    def _park(self, name: str, fd: int) -> None:
        if self._parking is None:
            return  # Else a name for each session would be kept for ever.
        self._parked.add(name)
        self._try_to(lambda place: place.park(name, fd))

    def _unpark(self, names: Iterable[str]) -> None:
        for name in list(names):
            self._parked.discard(name)
            self._try_to(lambda place, name=name: place.unpark(name))  # type: ignore[misc]

    def _try_to(self, act: Callable[[Parking], None]) -> None:
        if self._parking is None:
            return
        try:
            act(self._parking)
        except ParkingFailed as error:
            self._give_up(error)

    def _give_up(self, error: ParkingFailed) -> None:
        assert self._parking is not None, "nobody to give up"
        log.warning("memory will not outlive this daemon", extra={"reason": str(error)})
        if self._file is not None:
            self._file.write(replace(self._inventory, generation=0))
        self._parking.close()
        self._parking = None


def _converted(table_fd: int, inventory: Inventory) -> int | None:
    """A new slot table that says the same in this build's version, of the sets that there are."""
    fd = create_memfd("kvtier-slot-table", os.fstat(table_fd).st_size)
    for one in inventory.sets:
        slots = range(one.slot_first, one.slot_first + one.slot_count)
        entries = as_current(read_entries(table_fd, slots), inventory.table_version)
        if entries is None:
            os.close(fd)
            return None
        written = os.pwrite(fd, entries, one.slot_first * ENTRY_BYTES)
        assert written == len(entries), "memory has no room for the slot table"
    return fd


def open_keeper(
    config: RestartConfig, environment: Mapping[str, str], passed: Sequence[tuple[str, int]]
) -> Keeper:
    """With whom `config` says; a place that does not answer is told in the log, and done without.

    `passed`: what the service manager handed over beside its listeners; ours then.
    """
    if config.keep in ("auto", "systemd") and systemd_keeps(environment):
        return Keeper(SystemdParking(environment["NOTIFY_SOCKET"], passed))
    for _, fd in passed:
        os.close(fd)
    if config.keep == "systemd":
        log.warning("memory will not outlive this daemon", extra={"reason": "no FD store"})
    elif config.keep in ("auto", "holder") and config.holder:
        try:
            return Keeper(HolderParking(Path(config.holder).expanduser()))
        except ParkingFailed as error:
            log.warning("memory will not outlive this daemon", extra={"reason": str(error)})
    return Keeper()
