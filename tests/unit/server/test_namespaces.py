"""A namespace is told to the core with all that its blocks' places depend on."""

from __future__ import annotations

import asyncio
import mmap
from pathlib import Path

import pytest

from kvtier.core.events import NamespaceOpened
from kvtier.layout import PAD_BYTES, SlotLayout
from kvtier.metrics import Metrics
from kvtier.namespace import NamespaceSpec
from kvtier.server.core_loop import CoreLoop
from kvtier.server.epochs import EpochStore
from kvtier.server.namespaces import Namespaces, OpenedNamespace, padded_stride, slot_stride
from kvtier.server.owners import Owners
from tests.support.clock import ManualClock
from tests.support.recording_core import RecordingManager

SPEC = NamespaceSpec("test", "v1", "bfloat16", "LBHD", block_tokens=16, shard_bytes=1000)


def namespaces_of(
    manager: RecordingManager, directory: Path, owners: Owners | None = None
) -> Namespaces:
    return Namespaces(
        CoreLoop(manager, clock=ManualClock(), metrics=Metrics()),
        EpochStore(directory, iter([7]).__next__),
        slab_bytes=1 << 20,
        slab_count_max=4,
        count_max=2,
        owners=owners,
        stride=padded_stride,
    )


def test_the_core_learns_what_decides_about_places_and_only_then_others_hear(
    tmp_path: Path,
) -> None:
    manager = RecordingManager()
    namespaces = namespaces_of(manager, tmp_path)
    heard: list[tuple[OpenedNamespace, int]] = []
    namespaces.tell_opened(lambda one: heard.append((one, len(manager.events))))

    async def open_twice() -> OpenedNamespace:
        await namespaces.open(SPEC)
        return await namespaces.open(SPEC)

    opened = asyncio.run(open_twice())
    [told] = manager.of(NamespaceOpened)
    assert (told.shard_bytes, told.fingerprint) == (1000, SPEC.fingerprint())
    assert (told.epoch, told.slot_bytes) == (7, padded_stride(1000))
    assert heard == [(opened, 1)]
    assert list(namespaces.opened()) == [opened]


@pytest.mark.parametrize("shard_bytes", [1, 63, 1000, 4096, 4097, 1 << 20, (1 << 20) + 1])
def test_a_padded_shard_lies_inside_its_slot_and_whole_pages_keep_it_aligned(
    shard_bytes: int,
) -> None:
    stride = padded_stride(shard_bytes)
    assert stride >= SlotLayout(shard_bytes, 1).padded_shard_bytes
    assert stride % PAD_BYTES == stride % mmap.PAGESIZE == 0
    assert slot_stride(shard_bytes) <= stride < shard_bytes + 2 * max(PAD_BYTES, mmap.PAGESIZE)
