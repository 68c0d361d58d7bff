"""Disks and shares that somebody else may have written: what is in doubt is a miss."""

from __future__ import annotations

import asyncio
import os
import random
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtier.checksum import shard_checksum
from kvtier.clock import SystemClock
from kvtier.codec.codecs import CodecId
from kvtier.errors import ConfigError
from kvtier.io.checksum import block_checksum
from kvtier.io.driver import Outcome
from kvtier.memory import Bytes
from kvtier.pools.dax_superblock import DaxSuperblock, parse_dax_superblock
from kvtier.pools.key_file import Key
from kvtier.pools.nvme import MakeSealer
from kvtier.pools.nvme_recovery import TableUnreadable
from kvtier.pools.recovery import recover
from kvtier.pools.remote.buffers import Buffers
from kvtier.pools.remote.engine import RemoteOutcome
from kvtier.pools.remote.files import FilesEngine, FilesSettings, prepare_root
from kvtier.pools.remote.files_owner import FilesOwner, OwnerSettings
from kvtier.pools.remote.frame import HEADER_BYTES, BlockShape, FrameFault
from kvtier.pools.remote.framing import BlockViews, framed, np_empty, split, unframed, unsealed
from kvtier.pools.remote.keys import block_key, epoch_key
from kvtier.pools.remote.sealed_header import SEAL_HEADER_BYTES
from kvtier.pools.remote.sealing import ValueSealer
from kvtier.pools.sealing import Sealer
from kvtier.pools.slot_table import ENTRY, ENTRY_BYTES, Entries, entry_crcs
from kvtier.pools.superblock import COPY_OFFSETS, HEADERS_FIRST, SUPERBLOCK_BYTES
from kvtier.types import BlockHash
from tests.support.crashing_file import CrashingDriver, CrashingFile
from tests.support.fuzzing import fuzz, mutated
from tests.support.kv_bytes import bf16_block
from tests.support.nvme_pools import (
    EPOCH,
    GENERATION,
    LARGE,
    LENGTH_BYTES,
    SMALL,
    BookedPool,
    demote,
    fingerprint_of,
    hash_of,
    is_right,
    make_drivers,
    opened,
    promote,
)

pytestmark = [pytest.mark.full_form, pytest.mark.timeout(900)]

NAMES = [f"block{number}" for number in range(12)]


def scribble(chance: random.Random, data: Bytes) -> None:
    """A few bytes, or a run of them, changed in place."""
    changed = mutated(chance, data.tobytes())[: data.nbytes]
    data[: len(changed)] = np.frombuffer(changed, np.uint8)


def entries_of(table: Bytes) -> Entries:
    entries: Entries = table[: table.nbytes // ENTRY_BYTES * ENTRY_BYTES].view(ENTRY)
    return entries


def scribble_entries(chance: random.Random, table: Bytes) -> bool:
    """Some rows; whether one that was forged now has a right CRC."""
    used = np.flatnonzero(table.reshape(-1, ENTRY_BYTES).any(axis=1))
    is_forged = chance.random() < 0.5
    for _ in range(chance.randrange(1, 4)):
        at = int(chance.choice(used.tolist() or [0]))
        row = table[at * ENTRY_BYTES : (at + 1) * ENTRY_BYTES]
        scribble(chance, row)
        if is_forged:
            entry = row.view(ENTRY)
            entry["crc"] = entry_crcs(entry)
    return is_forged


def test_fuzzed_nvme_pools() -> None:
    fuzz_pools("nvme pools", None)


def test_fuzzed_sealed_pools() -> None:
    """Encrypted: what was forged, with right checksums and all, is a miss as well."""
    fuzz_pools("sealed nvme pools", lambda generation: Sealer([Key(1, b"k" * 32)], generation))


def fuzz_pools(what: str, make_sealer: MakeSealer | None) -> None:
    drivers = make_drivers()
    pool = BookedPool(drivers, make_sealer=make_sealer)
    pool.recover({})
    demote(pool, NAMES, layout=SMALL)
    demote(pool, NAMES[:4], namespace="large", layout=LARGE)
    pool.close(clean=True)
    geometry = pool.geometry
    image = np.empty(LENGTH_BYTES, np.uint8)
    drivers[0].file.read(0, image)
    epochs = {fingerprint_of(name): EPOCH for name in ("ns", "large")}
    known = {hash_of(name): name for name in NAMES}
    layouts = {fingerprint_of("ns"): SMALL, fingerprint_of("large"): LARGE}

    def attempt(chance: random.Random) -> None:
        disk = image.copy()
        areas = [
            (0, SUPERBLOCK_BYTES),
            (HEADERS_FIRST, HEADERS_FIRST + geometry.segment_count * ENTRY_BYTES),
            (geometry.table_first, geometry.recency_first),
            (geometry.recency_first, geometry.segments_first),
            (geometry.segments_first, LENGTH_BYTES),
        ]
        for begin, end in chance.sample(areas, chance.randrange(1, 3)):
            part = disk[begin:end]
            if begin == 0:
                scribble_superblocks(chance, disk)
            elif begin in (HEADERS_FIRST, geometry.table_first):
                scribble_entries(chance, part)
            else:
                scribble(chance, part)
        file = CrashingFile(LENGTH_BYTES)
        file.write(0, disk)
        with suppress(ConfigError, TableUnreadable):
            check_pool(chance, [CrashingDriver(file, "path0")])

    def check_pool(chance: random.Random, drivers: list[CrashingDriver]) -> None:
        pool = BookedPool(drivers, make_sealer=make_sealer)
        try:
            found = pool.recover(dict(epochs))
            named = {
                slot: BlockHash(row[:size].tobytes())
                for slot, row, size in zip(
                    found.slots.tolist(), found.hashes, found.hash_bytes.tolist(), strict=True
                )
            }
            for header, rows in found.lives:
                layout = layouts.get(header.fingerprint)
                if layout is None or header.layout != layout:
                    continue
                slots = (rows + header.segment * geometry.row_count_max).astype(np.uint32)
                outcomes, blocks = promote(pool, slots, layout)
                for slot, outcome, views in zip(slots.tolist(), outcomes, blocks, strict=True):
                    block = named[slot]
                    if outcome is Outcome.DONE and block in known:
                        assert is_right(views, block, layout), f"wrong bytes of {known[block]}"
        finally:
            pool.close(clean=chance.random() < 0.5)

    fuzz(what, attempt)


def scribble_superblocks(chance: random.Random, disk: Bytes) -> None:
    """Both copies; now and then with a CRC that fits again."""
    for offset in COPY_OFFSETS:
        copy = disk[offset : offset + SUPERBLOCK_BYTES]
        scribble(chance, copy[:112])
        if chance.random() < 0.7:
            crc = zlib.crc32(copy[: SUPERBLOCK_BYTES - 4].tobytes())
            copy[-4:] = np.frombuffer(crc.to_bytes(4, "little"), np.uint8)


def test_fuzzed_slot_tables() -> None:
    drivers = make_drivers()
    pool = opened(drivers, {})
    demote(pool, NAMES)
    pool.close(clean=True)
    table = np.empty(pool.geometry.recency_first - pool.geometry.table_first, np.uint8)
    drivers[0].file.read(pool.geometry.table_first, table)
    epochs = {fingerprint_of("ns"): EPOCH}
    dax = DaxSuperblock(GENERATION, 1 << 30, 2 << 20, 1 << 20).pack()

    def attempt(chance: random.Random) -> None:
        forged = table.copy()
        scribble_entries(chance, forged)
        found = recover(forged, GENERATION, epochs)
        assert len(set(found.ready_slots.tolist())) == len(found.ready)
        parse_dax_superblock(mutated(chance, dax))

    fuzz("slot tables", attempt)


def test_fuzzed_remote_values() -> None:
    shape = BlockShape(bytes(16), 7, 2, 16_384)
    block = BlockHash(b"B" * 32)
    payload = bf16_block(shape.payload_bytes, 1)
    shards = split(payload, shape)
    right = BlockViews(block, shards, block_checksum(shards))
    values = []
    for codec in CodecId:
        value = framed(right, shape, codec, width=2, take=np_empty)
        assert not isinstance(value, FrameFault)
        values.append(value[0].copy())

    def attempt(chance: random.Random) -> None:
        value = np.frombuffer(
            bytearray(with_right_sums(chance, chance.choice(values).tobytes())), np.uint8
        )
        place = np.zeros(shape.payload_bytes, np.uint8)
        views = BlockViews(block, split(place, shape))
        found = unframed(value, views, shape)
        if not isinstance(found, FrameFault):
            assert block_checksum(views.shards) == found.checksum

    fuzz("remote values", attempt)


def test_fuzzed_sealed_remote_values() -> None:
    """Whoever can write to the engine makes blocks miss, and no more: without the key no other
    value opens than the one that was sealed under this very name."""
    shape = BlockShape(bytes(16), 7, 2, 16_384)
    elsewhere = replace(shape, epoch=8)
    keys = [Key(number, bytes([number]) * 32) for number in (1, 2)]
    sealer, buffers = ValueSealer(keys, shape.fingerprint), Buffers()
    strangers = ValueSealer([Key(1, b"x" * 32)], shape.fingerprint)
    names = [BlockHash(bytes([one]) * 32) for one in (1, 2)]
    payloads = {name: bf16_block(shape.payload_bytes, name[0]) for name in names}
    frames: list[np.ndarray] = []
    values: list[tuple[BlockHash, bytes]] = []
    for name, payload in payloads.items():
        shards = split(payload, shape)
        right = BlockViews(name, shards, block_checksum(shards))
        for codec in CodecId:
            frame = framed(right, shape, codec, width=2, take=np_empty)
            assert not isinstance(frame, FrameFault)
            frames.append(frame[0])
            values.append((name, sealer.seal(frame[0], shape, name, np_empty).tobytes()))
    faults: set[FrameFault] = set()

    def attempt(chance: random.Random) -> None:
        wanted, data = chance.choice(names), forged(chance, chance.choice(values)[1])
        place = np.zeros(shape.payload_bytes, np.uint8)
        views = BlockViews(wanted, split(place, shape))
        opener, asked = chance.choice([(sealer, shape)] * 4 + [(strangers, shape), (None, shape)])
        if chance.random() < 0.1:
            asked = elsewhere
        found = unsealed(opener, np.frombuffer(bytearray(data), np.uint8), views, asked, buffers)
        if isinstance(found, FrameFault):
            faults.add(found)
            return
        assert (opener, asked) == (sealer, shape), "opened for somebody else"
        assert (wanted, data) in values, "what was changed opens, or by another name"
        assert bytes(place) == payloads[wanted].tobytes(), "wrong bytes"

    def forged(chance: random.Random, value: bytes) -> bytes:
        kind = chance.randrange(6)
        if kind == 0:
            return value
        if kind == 1:  # The envelope of one, the inside of another.
            other = chance.choice(values)[1]
            cut = chance.choice((8, 16, 28, 32, len(value) - 16))
            return value[:cut] + other[cut:]
        if kind == 2:
            head = SEAL_HEADER_BYTES
            return mutated(chance, value[:head]) + value[head:]
        return mutated(chance, value)

    fuzz("sealed remote values", attempt)
    assert {FrameFault.SEAL, FrameFault.KEY} <= faults, faults


def test_fuzzed_frames_behind_a_right_seal() -> None:
    """Of somebody who has the key: decoders see what the cipher let through."""
    shape = BlockShape(bytes(16), 7, 2, 16_384)
    sealer, buffers = ValueSealer([Key(1, b"k" * 32)], shape.fingerprint), Buffers()
    block = BlockHash(b"B" * 32)
    shards = split(bf16_block(shape.payload_bytes, 1), shape)
    right = BlockViews(block, shards, block_checksum(shards))
    frames = []
    for codec in CodecId:
        frame = framed(right, shape, codec, width=2, take=np_empty)
        assert not isinstance(frame, FrameFault)
        frames.append(frame[0].tobytes())

    def attempt(chance: random.Random) -> None:
        inside = np.frombuffer(with_right_sums(chance, chance.choice(frames)), np.uint8)
        value = sealer.seal(inside, shape, block, buffers.take)
        views = BlockViews(block, split(np.zeros(shape.payload_bytes, np.uint8), shape))
        found = unsealed(sealer, value, views, shape, buffers)
        if not isinstance(found, FrameFault):
            assert block_checksum(views.shards) == found.checksum

    fuzz("frames behind a seal", attempt)


def with_right_sums(chance: random.Random, data: bytes) -> bytes:
    """Changed, and mostly with a header that fits again, so that decoders see it."""
    head, body = data[:HEADER_BYTES], data[HEADER_BYTES:]
    if chance.random() < 0.7:
        body = (
            body[:64] + mutated(chance, body[64:])
            if chance.random() < 0.5
            else (mutated(chance, body[:64]) + body[64:])
        )
    changed = bytearray(mutated(chance, head) if chance.random() < 0.3 else head)
    if chance.random() < 0.9 and len(changed) == HEADER_BYTES:
        torn = block_checksum_of(body)
        changed[72:80] = len(body).to_bytes(8, "little")
        changed[88:96] = torn.to_bytes(8, "little")
        changed[124:128] = zlib.crc32(changed[:124]).to_bytes(4, "little")
    return bytes(changed) + body


def block_checksum_of(body: bytes) -> int:
    return int(shard_checksum(memoryview(body)))


def test_fuzzed_shares(tmp_path: Path) -> None:
    root = tmp_path / "share"
    prepare_root(root)
    settings = OwnerSettings(root, capacity_bytes=1 << 20, owner_seconds=0.0)
    keys = [block_key(bytes(16), 7, BlockHash(bytes([one]) * 16)) for one in range(3)]
    record = epoch_key(bytes(16))
    value = np.ones(1000, np.uint8)

    async def fill(engine: FilesEngine) -> None:
        await engine.put([(key, [value]) for key in keys], timeout_seconds=5)
        await engine.replace_record(record, expected=None, value=b"r", timeout_seconds=5)

    async def ask(engine: FilesEngine, chance: random.Random) -> None:
        for reply in await engine.get(keys, value_bytes_max=2000, timeout_seconds=5):
            assert isinstance(reply.outcome, RemoteOutcome)
        await engine.exists(keys, timeout_seconds=5)
        found = await engine.read_record(record, timeout_seconds=5)
        expected = None if found.value is None else found.value.tobytes()
        await engine.replace_record(record, expected=expected, value=b"s", timeout_seconds=5)
        await engine.health(timeout_seconds=5)
        await engine.put([(chance.choice(keys), [value])], timeout_seconds=5)

    def attempt(chance: random.Random) -> None:
        paths = [path for path in sorted(root.rglob("*")) if path.is_file() and path.name != "mark"]
        for path in chance.sample(paths, min(len(paths), chance.randrange(1, 4))):
            path.write_bytes(mutated(chance, path.read_bytes()))
        folders = [path for path in sorted(root.rglob("*")) if path.is_dir()]
        strange = chance.choice(folders) / chance.choice(("²", "0000000009", "x", "9" * 200, "-1"))
        with suppress(OSError):
            if chance.random() < 0.5:
                strange.write_bytes(mutated(chance, b"12 x.1\n"))
            else:
                os.symlink(chance.choice(("/nowhere", ".", "/dev/null")), strange)
        owner = FilesOwner(settings, unique="me", clock=SystemClock(), pause=lambda: None)
        with suppress(OSError):
            owner.run_round()
        runner.run(ask(engine, chance))
        with suppress(OSError):
            strange.unlink()

    with asyncio.Runner() as runner:
        engine = FilesEngine(FilesSettings(root, capacity_bytes=1 << 20), unique="client")
        runner.run(fill(engine))
        fuzz("shared folders", attempt)
        runner.run(engine.close())
