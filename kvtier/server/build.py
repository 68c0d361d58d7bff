"""Puts the daemon's parts together: who knows whom, in the order in which they are made."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kvtier.clock import Clock, SystemClock
from kvtier.config import Config
from kvtier.config_tenant import SHARED, sharers
from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.manager import BlockManager, ManagerConfig
from kvtier.core.settings import PIN_FRACTION_MAX
from kvtier.metrics import Metrics
from kvtier.metrics.asked import NAMES_MAX
from kvtier.pools.cxl import CxlMemory
from kvtier.pools.dram import DramPool
from kvtier.pools.slabs import best_page_kind
from kvtier.pools.source import memory_source
from kvtier.server.admin import AdminServer
from kvtier.server.adopting import Adopter
from kvtier.server.base import Base
from kvtier.server.calls import Calls, Handlers
from kvtier.server.core_loop import CoreLoop, Effects, both
from kvtier.server.cxl import open_cxl
from kvtier.server.cxl_report import CxlReport
from kvtier.server.cxl_tier import CxlKeeper
from kvtier.server.doors import Door, DoorMaker, RemoteDoor
from kvtier.server.epochs import EpochStore
from kvtier.server.explain import Explainer
from kvtier.server.history import History
from kvtier.server.hit_curves import HitCurves
from kvtier.server.instance import raise_open_files
from kvtier.server.kv_events import KvEvents
from kvtier.server.leasing import Leasing
from kvtier.server.lower_settings import lower_settings
from kvtier.server.mover import Mover
from kvtier.server.namespaces import Namespaces, padded_stride, slot_stride
from kvtier.server.nvme import NvmeKeeper
from kvtier.server.nvme_paths import NvmePaths, OpenDriver, open_file, open_paths
from kvtier.server.nvme_report import NvmeReport
from kvtier.server.owed_clears import OwedClears
from kvtier.server.peers import PidfdWatch
from kvtier.server.plan import Plan
from kvtier.server.policies import policy_named
from kvtier.server.purge_parts import make_purging
from kvtier.server.purging import Purging
from kvtier.server.recorder import RecordedManager, Recorder, draw_salt, open_recorder
from kvtier.server.refitting import Refitting
from kvtier.server.remembering import remembering_effects
from kvtier.server.remote import RemoteParts, open_remote
from kvtier.server.remote_report import RemoteReport
from kvtier.server.remote_search import RemoteSearch
from kvtier.server.remote_tier import RemoteKeeper
from kvtier.server.reporter import Limit, Reporter, open_fd_count
from kvtier.server.security import Tokens
from kvtier.server.segment_offers import SegmentOffers
from kvtier.server.servicer import EngineCalls, EngineFacts
from kvtier.server.servicer_admin import AdminCalls
from kvtier.server.servicer_data import DataCalls
from kvtier.server.servicer_purge import PurgeCalls
from kvtier.server.session_socket import SessionSocket, SocketFacts
from kvtier.server.sessions import Sessions
from kvtier.server.slabs import SlabKeeper
from kvtier.server.tenants import Tenant, call_limits, owners_of, tenant_budgets
from kvtier.server.threads import call_soon, run_in_thread
from kvtier.server.watch import WatchHub
from kvtier.types import TierName


@dataclass(frozen=True, slots=True)
class Parts:
    plan: Plan
    core: CoreLoop
    effects: Effects
    pool: DramPool
    slabs: SlabKeeper
    mover: Mover
    refitting: Refitting
    cxl: CxlKeeper | None
    remote: RemoteKeeper | None
    search: RemoteSearch | None
    nvme: NvmeKeeper | None
    sessions: Sessions
    adopter: Adopter
    purging: Purging
    events: KvEvents | None
    doors: tuple[Door, ...]  # That of server.socket first.
    remote_door: RemoteDoor | None  # With TLS.
    data: DataCalls
    tcp_address: str
    admin: AdminServer | None
    recorder: Recorder | None


async def build(config: Config, plan: Plan, open_driver: OpenDriver = open_file) -> Parts:
    """Bind the sockets and make every part; nothing runs yet."""
    plan = replace(plan, page_kind=str(await asyncio.to_thread(best_page_kind)))
    with ExitStack() as opened:
        work = partial(open_cxl, config.cxl, SystemClock(), generation=plan.generation)
        memory = await run_in_thread(work, "kvtier-open")
        if memory is not None:
            opened.callback(memory.close)
        paths = None
        if config.nvme.paths:
            paths = await run_in_thread(
                partial(open_paths, config.nvme, open_driver), "kvtier-open"
            )
            opened.callback(paths.close)
        remote = open_remote(config.remote, SystemClock())
        parts = await _Builder(config, plan, _Lower(paths, memory, remote)).build()
        opened.pop_all()  # They are the daemon's now.
        return parts


@dataclass(frozen=True, slots=True)
class _Lower:
    """What the tiers below memory lie on, opened; None for those that there are not."""

    paths: NvmePaths | None
    memory: CxlMemory | None
    remote: RemoteParts | None


class _Builder:
    """Makes the parts, each once."""

    def __init__(self, config: Config, plan: Plan, lower: _Lower) -> None:
        self.config = config
        self.plan = plan
        self._bound: list[Path] = []
        epochs = EpochStore(plan.state_dir / "epochs", lambda: secrets.randbits(32))
        self.base, self.recorder = _base(config, plan, epochs, lower.paths)
        self.core = self.base.core
        self.tokens = Tokens()
        self._make_memory(epochs)
        self.mover = Mover(self.pool, self.core, self.base.metrics)
        self.refitting = Refitting(self.core)
        self._make_lower(lower, epochs)
        self.watch = WatchHub(
            watchers_max=config.server.watchers_max,
            events_max=config.server.watch_events_max,
            metrics=self.base.metrics,
        )
        self.events = self._make_events()
        self.curves = HitCurves(
            self.base.namespaces,
            self.base.clock,
            dram_bytes=plan.slab_bytes * plan.slab_count_max,
            nvme_bytes=lower.paths.capacity_bytes if lower.paths is not None else 0,
            has_tenants=len(plan.tenants) > 1,
        )
        self.reporter = Reporter(
            self.base,
            self.sessions,
            self.slabs,
            (
                CxlReport(self.base, self.cxl),
                NvmeReport(self.base, self.nvme),
                RemoteReport(self.base, self.remote),
            ),
            generation=plan.generation,
            page_kind=plan.page_kind,
        )
        keepers = (self.cxl, self.nvme, self.remote)
        self.purging = make_purging(
            self.base, self.pool, plan.state_dir, keepers, self.events, self.curves
        )
        self.leasing = Leasing(self.core, self.base.clock)
        self.calls = Calls(
            self.base,
            self.tokens,
            limits=call_limits(config),
            is_shared=bool(config.tenant),
            slow_call_seconds=config.log.slow_call_seconds,
        )
        self.data = DataCalls(
            self.base,
            self.mover,
            self.watch,
            self.leasing,
            puts_max=config.server.puts_max,
            lease_seconds_max=config.lease.seconds_max,
        )

    def _make_memory(self, epochs: EpochStore) -> None:
        """The DRAM tier, who maps it, and what outlives this life of it."""
        config, plan = self.config, self.plan
        former = plan.keeper.former
        self.pool = DramPool(plan.generation, table_fd=former.table_fd if former else None)
        self.sessions = Sessions(
            self.core,
            self.tokens,
            PidfdWatch(asyncio.get_running_loop()),
            self.base.clock,
            sessions_max=config.server.sessions_max,
            keeper=plan.keeper,
        )
        self.slabs = SlabKeeper(
            self.base,
            self.pool,
            self.sessions,
            slab_bytes=plan.slab_bytes,
            slab_count_max=plan.slab_count_max,
            populate_threads=config.dram.populate_threads,
            source=memory_source(config.dram.nodes),
            keeper=plan.keeper,
        )
        known = {one.name for one in plan.tenants} | ({SHARED} if config.tenant else set())
        self.adopter = Adopter(
            self.base, self.pool, self.slabs, self.sessions, plan.keeper, epochs, tenants=known
        )

    def _make_events(self) -> KvEvents | None:
        config = self.config.kv_events
        if not config.is_set:
            return None
        self.watch.wants_token_ids = config.token_ids
        loop = asyncio.get_running_loop()
        return KvEvents(config, self.base, self.watch.tokens_of, loop, self._told_tenants)

    def _make_lower(self, lower: _Lower, epochs: EpochStore) -> None:
        """The keepers of the tiers below memory that there are."""
        base, pool, config = self.base, self.pool, self.config
        self.offers = SegmentOffers(self.core, self.sessions, lower.memory, config.cxl)
        memory = lower.memory
        self.cxl = None if memory is None else CxlKeeper(base, pool, memory, self.offers)
        self.nvme: NvmeKeeper | None = None
        if lower.paths is not None:
            self.nvme = NvmeKeeper(base, pool, lower.paths, config.nvme, epochs.current_epochs)
        self.remote: RemoteKeeper | None = None
        self.search: RemoteSearch | None = None
        if lower.remote is not None:
            known_bytes = config.remote.known_bytes
            owed = OwedClears(self.plan.state_dir / "owed_clears")
            self.remote = RemoteKeeper(base, pool, lower.remote, known_bytes=known_bytes, owed=owed)
            self.search = RemoteSearch(base, self.remote)

    async def build(self) -> Parts:
        try:
            await self.purging.void_unfinished()
            parts = self._build()
            if self.nvme is not None:
                await self.nvme.open()  # Last: a start that is refused leaves the pool clean.
            return parts
        except BaseException:
            for path in self._bound:  # A refused start leaves nothing behind.
                self.plan.listeners.remove(path)
            raise

    def _build(self) -> Parts:
        self.reporter.set_limits(self._limits())
        self.base.metrics.state.checksum_queue_slots.set_function(lambda: self.mover.waiting_count)
        self.base.metrics.state.waiting_leases.set_function(lambda: self.leasing.waiting_count)
        handlers = self._handlers()
        maker = DoorMaker(
            self.calls,
            handlers,
            self.plan.listeners,
            self.config,
            self.base.metrics.calls,
            self._session_socket,
            self._bound,
        )
        doors = tuple(map(maker.open, self.plan.tenants))
        remote_door, tcp_address = self._listen_tcp(maker, doors[0])
        address = self.config.admin.address
        admin = None
        if address != "off":
            advice = self.curves.told
            admin = AdminServer(address, self.core, self.reporter, self.base.clock, advice)
        return Parts(
            plan=self.plan,
            core=self.core,
            effects=self.base.missed.beside(self._effects()),
            pool=self.pool,
            slabs=self.slabs,
            mover=self.mover,
            refitting=self.refitting,
            cxl=self.cxl,
            remote=self.remote,
            search=self.search,
            nvme=self.nvme,
            sessions=self.sessions,
            adopter=self.adopter,
            purging=self.purging,
            events=self.events,
            doors=doors,
            remote_door=remote_door,
            data=self.data,
            tcp_address=tcp_address,
            admin=admin,
            recorder=self.recorder,
        )

    def _effects(self) -> Effects:
        slabs, sessions, watch = self.slabs, self.sessions, self.watch
        effects: dict[type, Callable[..., None]] = {
            ins.WriteReserved: slabs.on_write_reserved,
            ins.WriteReady: slabs.on_write_ready,
            ins.WriteChecksums: slabs.on_write_checksums,
            ins.WriteGone: slabs.on_write_gone,
            ins.BindSlabs: slabs.on_bind,
            ins.OfferSlab: slabs.on_offer,
            ins.WithdrawSlab: slabs.on_withdraw,
            ins.DropSlabs: slabs.on_drop,
            ins.ComputeChecksums: self.mover.on_compute_checksums,
            ins.Refit: self.refitting.on_refit,
            ins.LeaseReady: self.leasing.on_ready,
            ins.RequestQuiet: sessions.on_request_quiet,
            ins.AcknowledgeQuiet: sessions.on_acknowledge_quiet,
            ins.RecallSlots: sessions.on_recall_slots,
            ins.BlocksStored: watch.on_stored,
            ins.BlocksTakenIn: lambda _: None,  # Watchers ask for what they want to know.
            ev.Acquire: self.curves.on_acquire,
            ev.Commit: self.curves.on_commit,
        }
        effects |= remembering_effects(self.base, watch)
        if self.events is not None:
            effects |= {
                ins.BlocksStored: both(watch.on_stored, self.events.on_stored),
                ins.BlocksTakenIn: self.events.on_taken_in,
                ins.BlocksRemoved: both(effects[ins.BlocksRemoved], self.events.on_removed),
                ins.NamespaceCleared: both(effects[ins.NamespaceCleared], self.events.on_cleared),
            }
        return effects | self._lower_effects()

    def _lower_effects(self) -> dict[type, Callable[..., None]]:
        """What is asked of a tier below memory goes to its keeper."""
        keepers: dict[TierName, CxlKeeper | NvmeKeeper | RemoteKeeper] = {}
        if self.cxl is not None:
            keepers[TierName.CXL] = self.cxl
        if self.nvme is not None:
            keepers[TierName.NVME] = self.nvme
        if self.remote is not None:
            keepers[TierName.REMOTE] = self.remote
        return {
            ins.Demote: lambda asked: keepers[asked.tier].on_demote(asked),
            ins.Promote: lambda asked: keepers[asked.tier].on_promote(asked),
            ins.BindSegments: lambda bound: keepers[bound.tier].on_bind_segments(bound),
            ins.WriteLowerReady: lambda written: keepers[written.tier].on_write_ready(written),
            ins.WriteLowerGone: lambda written: keepers[written.tier].on_write_gone(written),
        }

    def _session_socket(self, tenant: Tenant) -> SessionSocket:
        lease, told = self.config.lease, {tenant.name, SHARED} & self._told_tenants
        facts = SocketFacts(
            generation=self.plan.generation,
            grpc_address=f"unix:{tenant.grpc_socket}",
            hello_seconds=self.config.server.hello_seconds,
            lease_seconds_max=lease.seconds_max,
            lease_margin_seconds=lease.margin_seconds,
            wants_token_ids=self.watch.wants_token_ids and bool(told),
        )
        return SessionSocket(facts, self.base, self.sessions, self.offers, tenant)

    @property
    def _told_tenants(self) -> frozenset[str]:
        """Whose blocks are published."""
        return frozenset(self.config.kv_events.tenants or (self.config.server.tenant,))

    def _handlers(self) -> Handlers:
        handlers = Handlers()
        facts = EngineFacts(
            generation=self.plan.generation,
            wait_seconds_max=self.config.lease.wait_seconds_max,
        )
        engines = EngineCalls(
            self.base, self.sessions, self.watch, self.leasing, facts, self.search
        )
        engines.add_to(handlers)
        self.data.add_to(handlers)
        administration = AdminCalls(
            self.base,
            self.reporter,
            Explainer(self.base, self.sessions, self._tier_states),
            self.leasing,
            self._check_shell,
            self.remote,
        )
        administration.add_to(handlers)
        PurgeCalls(self.base.namespaces, self.purging).add_to(handlers)
        return handlers

    def _listen_tcp(self, maker: DoorMaker, own: Door) -> tuple[RemoteDoor | None, str]:
        """Where clients of other network namespaces may call, if anywhere; without certificates as
        those of `own`."""
        tcp = self.config.grpc.tcp
        if tcp == "off":
            return None, ""
        if not self.config.grpc.has_tls:
            return None, own.grpc.listen_tcp(tcp, "grpc.tcp")
        loop = asyncio.get_running_loop()
        door = maker.open_remote(
            self.plan.tenants, lambda error: call_soon(loop, partial(self.core.fail, error))
        )
        return door, door.address

    def _tier_states(self) -> list[tuple[str, str]]:
        """For people who ask why a block is not there."""
        remote = "absent"
        if self.remote is not None:
            engine = self.remote.parts.engine
            remote = f"read {engine.reading_state}, write {engine.writing_state}"
        return [
            (TierName.DRAM, self.plan.page_kind),
            (TierName.CXL, "absent" if self.cxl is None else self.cxl.state),
            (TierName.NVME, "absent" if self.nvme is None else self.nvme.state),
            (TierName.REMOTE, remote),
        ]

    def _check_shell(self) -> list[str]:
        return [
            *self.pool.check_invariants(),
            *self.pool.check_placement(),
            *self.sessions.check_invariants(),
        ]

    def _limits(self) -> list[Limit]:
        server = self.config.server
        stats = self.core.stats
        return [
            Limit("sessions", server.sessions_max, lambda: self.sessions.used_count),
            Limit("namespaces", server.namespaces_max, lambda: len(self.base.namespaces)),
            Limit("watchers", server.watchers_max, lambda: len(self.watch)),
            Limit("puts", server.puts_max, lambda: self.data.active_count),
            Limit("calls", self.config.grpc.calls_max, lambda: self.calls.limits.active_count),
            Limit(
                "leases_per_session",
                self.config.lease.per_session_max,
                lambda: max((one.lease_count for one in stats().sessions), default=0),
            ),
            Limit(
                "leased_bytes",
                int(self.plan.slab_bytes * self.plan.slab_count_max * PIN_FRACTION_MAX),
                lambda: stats().leased_bytes,
            ),
            Limit("namespace_names", NAMES_MAX, lambda: self.base.metrics.blocks.asked.named_count),
            Limit("file_descriptors", raise_open_files(0), open_fd_count),
        ]


def _base(
    config: Config, plan: Plan, epochs: EpochStore, paths: NvmePaths | None
) -> tuple[Base, Recorder | None]:
    clock: Clock = SystemClock()
    metrics = Metrics()
    manager, recorder = _manager(config, plan, paths)
    core = CoreLoop(manager, clock=clock, metrics=metrics)
    namespaces = Namespaces(
        core,
        epochs,
        slab_bytes=plan.slab_bytes,
        slab_count_max=plan.slab_count_max,
        count_max=config.server.namespaces_max,
        shared=sharers(config.tenant),
        owners=owners_of(config, plan.state_dir),
        stride=padded_stride if paths is not None or config.cxl.is_set else slot_stride,
    )
    history = History(budget_bytes=config.log.history_bytes)
    return Base(core, namespaces, clock, metrics, history), recorder


def _manager(
    config: Config, plan: Plan, paths: NvmePaths | None
) -> tuple[BlockManager, Recorder | None]:
    lease, dram = config.lease, config.dram
    settings = ManagerConfig(
        slab_bytes=plan.slab_bytes,
        slab_count_max=plan.slab_count_max,
        lease_seconds_max=lease.seconds_max,
        lease_margin_seconds=lease.margin_seconds,
        lease_first=plan.keeper.lease_first,
        grace_seconds=lease.grace_seconds,
        watermark_start=dram.watermark_start,
        watermark_stop=dram.watermark_stop,
        leases_per_session_max=lease.per_session_max,
        tenants=tenant_budgets(config.tenant),
        lower=lower_settings(config, paths),
        key_salt=draw_salt() if config.recorder.is_set else b"",
    )
    make_policy = policy_named(dram.policy)
    if not config.recorder.is_set:
        return BlockManager(settings, make_policy=make_policy), None
    recorder = open_recorder(config.recorder, settings, dram.policy)
    return RecordedManager(settings, make_policy=make_policy, recorder=recorder), recorder
