"""The shell's side of the NVMe tier: opened before READY, read after it, written behind, closed.

The pool belongs to the event loop, but while it is read: nothing else uses it then. What a disk
does to us ends no daemon: the tier is read only, or off, with a metric and one line in the log.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtier.config import NvmeConfig
from kvtier.config_values import AUTO
from kvtier.core.events import BlocksRecovered, LowerChanged, LowerOpened
from kvtier.core.instructions import (
    BindSegments,
    Demote,
    Promote,
    RemainsHeld,
    WriteLowerGone,
    WriteLowerReady,
)
from kvtier.io.driver import Batch, Outcome
from kvtier.layout import PAD_BYTES, SegmentHeader
from kvtier.pools.chains import RecoveredChains, chains_of
from kvtier.pools.dram import DramPool
from kvtier.pools.nvme import NvmePool, PoolCondition, PoolState
from kvtier.pools.nvme_recovery import TableUnreadable, lives_of
from kvtier.pools.slot_table import Slots
from kvtier.server.base import Base
from kvtier.server.namespaces import OpenedNamespace
from kvtier.server.nvme_paths import NvmePaths
from kvtier.server.nvme_transfers import Transfers
from kvtier.server.threads import call_soon, run_in_thread
from kvtier.server.wear import WearMeter
from kvtier.types import TierName

log = logging.getLogger(__name__)

# Transfers under way at the end may take so long, and then each step of closing.
END_SECONDS = 5.0
# Between two parts of the table, when more has changed than one write takes.
CATCH_UP_SECONDS = 0.02
# All of closing: a call that hangs in the kernel must not keep us.
CLOSE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class _Found:
    """What the pool held when it was read."""

    lives: tuple[tuple[SegmentHeader, npt.NDArray[np.int64]], ...]
    chains: tuple[RecoveredChains, ...]
    block_count: int


class NvmeKeeper:
    """Made, opened and started, in this order; lives on the event loop."""

    def __init__(
        self,
        base: Base,
        dram: DramPool,
        paths: NvmePaths,
        config: NvmeConfig,
        current_epochs: Callable[[], Mapping[bytes, int]],
    ) -> None:
        self._core = base.core
        self._namespaces = base.namespaces
        self._clock = base.clock
        self._metrics = base.metrics
        self._base = base
        self._dram = dram
        self._paths = paths
        self._config = config
        self._current_epochs = current_epochs
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._read_ended = threading.Event()  # No thread of ours uses the pool.
        self._read_ended.set()
        self._chains: dict[bytes, RecoveredChains] = {}  # Of namespaces that nobody has opened yet.
        self._table_batch: Batch | None = None  # The last write of the slot table.
        self._is_read = False  # The core knows of the pool.
        self._is_over = False  # The pool takes nothing any more.
        self._returned: bool | None = None  # Once closed: whether every call has come back.
        self.wear = WearMeter()
        self.recovered_count = 0
        self.recovery_seconds = 0.0
        base.namespaces.tell_opened(self._hand_over)
        paths.time_calls(base.metrics.nvme.time_call)

    async def open(self) -> None:
        """From here on the pool says that it was not closed in order. Raises ConfigError."""
        work = partial(
            NvmePool,
            self._paths.drivers,
            make_sealer=self._paths.make_sealer,
            on_condition=self._condition_from_thread,
        )
        self._pool = await run_in_thread(work, "kvtier-open")
        self._transfers = Transfers(self._base, self._dram, self._pool, self.wear)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to read the pool; returns at once."""
        log.info(
            "nvme pool opened",
            extra={
                "paths": len(self._paths.drivers),
                "bytes": self.capacity_bytes,
                "was_clean": self._pool.was_clean,
                "key_id": self._pool.key_id,
            },
        )
        self._read_ended.clear()
        self._task = tasks.create_task(self._run(), name="nvme")

    # ------------------------------------------------------------------------------- questions

    @property
    def capacity_bytes(self) -> int:
        return self._paths.capacity_bytes

    @property
    def endurance_bytes_per_day(self) -> int:
        given = self._config.endurance_bytes_per_day
        return self.capacity_bytes if given == AUTO else given

    @property
    def state(self) -> str:
        """One of metrics.NVME_STATES."""
        state = self._pool.condition.state
        return "recovering" if state is not PoolState.OFF and not self._is_read else str(state)

    @property
    def queued_count(self) -> int:
        return self._paths.queued_count

    @property
    def dirty_page_count(self) -> int:
        """Of the slot table; each holds blocks that a kill now would lose."""
        return self._pool.dirty_page_count

    @property
    def block_counts(self) -> Mapping[str, int]:
        """Blocks under way, by direction."""
        return self._transfers.block_counts

    # ----------------------------------------------------------------------------------- erasing

    @property
    def segment_count(self) -> int:
        return self._pool.geometry.segment_count * self._pool.geometry.path_count

    def hindrance(self) -> str | None:
        """Why nothing can be erased, or ""; None until the core knows of the pool."""
        condition = self._pool.condition
        if condition.state is not PoolState.ON:
            return f"{condition.state}: {condition.reason}"
        return "" if self._is_read else None

    def block_count_of(self, fingerprint: bytes) -> int:
        """Of a namespace that nobody has opened in this life."""
        found = self._chains.get(fingerprint)
        return 0 if found is None else len(found.lower_slots)

    def forget_chains(self, fingerprint: bytes) -> None:
        """What was read of a namespace that nobody has opened yet is not handed over."""
        self._chains.pop(fingerprint, None)

    def has_remains(self, held: RemainsHeld) -> bool:
        return not held.is_whole or self._pool.was_used(held.segment)

    async def erase(self, held: RemainsHeld) -> str:
        """Overwrite what is held; why that could not be done, or ""."""
        work = partial(self._pool.zero, held.segment, held.ranges)
        outcome = await run_in_thread(work, "kvtier-erase")
        if outcome is not Outcome.DONE or self._is_over:
            return f"the disk answered {outcome.name}"
        if held.is_whole:
            self._pool.forget_life(held.segment)
        else:
            first = held.segment * self._pool.geometry.row_count_max
            self._pool.write_gone(np.array(held.void_rows, np.uint32) + np.uint32(first))
        return ""

    def is_settled(self) -> bool:
        """Whether all that was changed in the slot table is on the disk; else some more is sent."""
        if not self._pool.dirty_page_count:
            return True
        self._write_table()
        return False

    # ------------------------------------------------------------------------ reading, writing

    async def _run(self) -> None:
        if not await self._recover():
            return
        pause_seconds = self._config.table_seconds
        while True:  # Until `stop`.
            await asyncio.sleep(pause_seconds)
            is_whole = self._write_table()
            pause_seconds = self._config.table_seconds if is_whole else CATCH_UP_SECONDS

    async def _recover(self) -> bool:
        """Read what the pool holds and tell the core; False when the tier is off."""
        began_at = self._clock.now()
        try:
            found = await run_in_thread(self._read, "kvtier-recovery")
        except TableUnreadable as error:
            self._pool.fail(PoolCondition(PoolState.OFF, str(error)))
            return False
        if self._is_over or self._pool.condition.state is PoolState.OFF:
            return False
        self.recovery_seconds = self._clock.now() - began_at
        self.recovered_count = found.block_count
        log.info(
            "nvme pool read",
            extra={
                "blocks": found.block_count,
                "namespaces": len(found.chains),
                "locked_segments": self._pool.locked_count,
                "seconds": round(self.recovery_seconds, 3),
            },
        )
        self._tell(found)
        if self._pool.condition.state is PoolState.ON and not self._pool.locked_count:
            await self._namespaces.keep_owners({header.fingerprint for header, _ in found.lives})
        for namespace in self._namespaces.opened():
            self._hand_over(namespace)
            await asyncio.sleep(0)
        return True

    def _read(self) -> _Found:
        """In a thread."""
        try:
            recovered = self._pool.recover(self._current_epochs())
            chains = tuple(chains_of(recovered))
            dropped = np.concatenate([np.empty(0, np.uint32), *(one.dropped for one in chains)])
            self._pool.write_gone(dropped)
            lives = recovered.lives
            if len(dropped):
                kept = recovered.slots[~np.isin(recovered.slots, dropped)]
                headers = [header for header, _ in recovered.lives]
                lives = lives_of(headers, kept, self._pool.geometry.row_count_max)
            return _Found(lives, chains, sum(len(one.lower_slots) for one in chains))
        finally:
            self._read_ended.set()

    def _tell(self, found: _Found) -> None:
        geometry = self._pool.geometry
        self._core.post(
            LowerOpened(
                segment_bytes=geometry.segment_bytes,
                segment_count=geometry.segment_count * geometry.path_count,
                row_count_max=geometry.row_count_max,
                lane_count=geometry.path_count,
                sequence_first=self._pool.sequence_first,
                key_id=self._pool.key_id,
                lives=found.lives,
                owners=tuple(self._namespaces.owners().items()),
                is_writable=self._pool.condition.state is PoolState.ON,
            )
        )
        self._is_read = True
        self._chains = {one.fingerprint: one for one in found.chains}

    def _hand_over(self, namespace: OpenedNamespace) -> None:
        """The namespace is open: what the pool held of it is the core's from now on."""
        found = self._chains.pop(namespace.fingerprint, None)
        if found is None or found.hash_bytes != namespace.spec.hash_bytes:
            return
        self._core.post(
            BlocksRecovered(
                namespace=namespace.id,
                epoch=found.epoch,
                packed=found.packed,
                parents=found.parents,
                lower_slots=found.lower_slots,
                sequences=found.sequences,
                used_at=found.used_at,
            )
        )

    def _write_table(self) -> bool:
        """Whether that was all there is to write now."""
        before = self._pool.table_written_bytes
        batch = self._pool.write_table()
        if batch is None:
            return True
        self._table_batch = batch
        written_bytes = self._pool.table_written_bytes - before
        self._metrics.nvme.written_bytes.labels("table").inc(written_bytes)
        self.wear.note(written_bytes, now=self._clock.now())
        return self._pool.dirty_page_count * PAD_BYTES <= written_bytes

    # ----------------------------------------------------------------------------- instructions

    def on_demote(self, asked: Demote) -> None:
        self._transfers.demote(asked)

    def on_promote(self, asked: Promote) -> None:
        self._transfers.promote(asked)

    def on_bind_segments(self, bound: BindSegments) -> None:
        """The table goes to the disk ahead of what is written over the former lives: blocks that
        went again from there would otherwise be lost to a kill, both copies of them."""
        if not self._is_over:
            self._pool.bind(bound.headers)
            self._write_table()

    def on_write_ready(self, written: WriteLowerReady) -> None:
        if not self._is_over:
            self._pool.write_ready(
                written.lower_slots,
                written.hashes,
                written.parents,
                written.checksums,
                epoch=written.epoch,
                sequence=written.sequence,
            )

    def on_write_gone(self, written: WriteLowerGone) -> None:
        if not self._is_over:
            self._pool.write_gone(written.lower_slots)

    # --------------------------------------------------------------------------------- trouble

    def _condition_from_thread(self, condition: PoolCondition) -> None:
        work = partial(self._on_condition, condition)
        call_soon(self._loop, partial(self._core.spawn, work))

    def _on_condition(self, condition: PoolCondition) -> None:
        """Each is for the worse: two at most."""
        log.error(
            "nvme tier is worse off",
            extra={"state": str(condition.state), "reason": condition.reason},
        )
        if self._is_read and not self._is_over:
            self._core.post(LowerChanged(readable=condition.state is not PoolState.OFF))

    # ------------------------------------------------------------------------------------- end

    async def stop(self) -> None:
        """The orderly end, while the core still runs: what is under way ends, the table and the
        order of use are written."""
        if self._task is None or not self._is_read:
            await self.close()
            return
        self._transfers.refuse()
        has_returned = await self._transfers.wait_returned(END_SECONDS)
        if not has_returned:
            log.warning("nvme transfers are under way still", extra=dict(self.block_counts))
        recency = self._core.recency(TierName.NVME)
        await self._close(recency if has_returned else None)

    async def close(self) -> bool:
        """Give the paths back, with what is on the disk by now. Whether every call has come back:
        until then memory must stay where it is."""
        if self._returned is None:
            await self._close(None)
        return bool(self._returned)

    async def _close(self, recency: Slots | None) -> None:
        self._is_over = True
        self._transfers.end()
        if self._task is not None:
            self._task.cancel()
        self._returned = False
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                work = partial(self._close_pool, recency)
                is_clean, self._returned = await run_in_thread(work, "kvtier-close")
        except TimeoutError:
            is_clean = False
        log.info("nvme pool closed", extra={"clean": is_clean, "returned": self._returned})

    def _close_pool(self, recency: Slots | None) -> tuple[bool, bool]:
        """(clean, whether every call has come back). In a thread; nothing else uses the pool."""
        is_clean = recency is not None
        if not is_clean:
            drivers = self._paths.drivers
            step_seconds = END_SECONDS / (len(drivers) * self._config.depth)  # For one thread.
            returned = [driver.close(step_seconds) for driver in drivers]
            # A read of the table that is under way fails now: its drivers are closed.
            if not all(returned) or not self._read_ended.wait(END_SECONDS):
                return False, False
        if self._table_batch is not None:  # Two at once might change places.
            self._table_batch.wait_returned(END_SECONDS)
        is_clean &= self._pool.close(clean=is_clean, recency=recency, timeout_seconds=END_SECONDS)
        return is_clean, all(driver.close(0.0) for driver in self._paths.drivers)
