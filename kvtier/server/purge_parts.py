"""Puts together what a purge reaches."""

from __future__ import annotations

from pathlib import Path

from kvtier.pools.dram import DramPool
from kvtier.server.base import Base
from kvtier.server.cxl_tier import CxlKeeper
from kvtier.server.hit_curves import HitCurves
from kvtier.server.kv_events import KvEvents
from kvtier.server.nvme import NvmeKeeper
from kvtier.server.purge_records import PurgeRecords
from kvtier.server.purging import PurgeBooks, Purging
from kvtier.server.remote_purge import RemotePurge
from kvtier.server.remote_tier import RemoteKeeper

Keepers = tuple[CxlKeeper | None, NvmeKeeper | None, RemoteKeeper | None]


def make_purging(
    base: Base,
    pool: DramPool,
    state_dir: Path,
    keepers: Keepers,
    events: KvEvents | None,
    curves: HitCurves,
) -> Purging:
    """`keepers`: of the tiers below memory that there are."""
    cxl, nvme, remote = keepers
    books = [("history of requests and removed blocks", base.history.forget)]
    if events is not None:
        books.append(("published events that could be fetched again", events.forget))
    return Purging(
        base,
        pool,
        PurgeRecords(state_dir / "purges"),
        PurgeBooks(tuple(books), (("samples of hit curves", curves.forget),)),
        cxl=cxl,
        nvme=nvme,
        remote=None if remote is None else RemotePurge(remote, base.namespaces),
    )
