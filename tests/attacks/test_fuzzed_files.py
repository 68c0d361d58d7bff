"""Files that somebody else may have written: refused by name, never a crash, never wrong bytes."""

from __future__ import annotations

import gzip
import json
import os
import random
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from kvtier.config import documentation, load
from kvtier.core import events as ev
from kvtier.core.manager import BlockManager
from kvtier.core.settings import LowerSettings, ManagerConfig
from kvtier.errors import BadRequest, ConfigError, KVTierError
from kvtier.policy.lru import LruPolicy
from kvtier.pools.key_file import format_keys, new_key, parse_keys
from kvtier.recording import files as recording_files
from kvtier.recording.files import BATCH, END, file_name
from kvtier.recording.replaying import recorded_batches
from kvtier.recording.writer import Noted, RecordingPlan, RecordingWriter
from kvtier.server import inventory as module
from kvtier.server.epochs import EpochStore
from kvtier.server.inventory import (
    HALF_BYTES,
    Inventory,
    InventoryFile,
    ParkedSession,
    ParkedSet,
    ParkedSlab,
    read_inventory,
)
from kvtier.server.owed_clears import OwedClears
from kvtier.server.owners import Owners
from kvtier.sim.traces import read_sessions, read_trace, scope_of
from kvtier.types import BlockHash, EngineId, NamespaceId, Role, SessionId, TierName
from tests.support.fuzzing import fuzz, mutated, mutated_value, nested

pytestmark = [pytest.mark.full_form, pytest.mark.timeout(900)]


def changed_json(chance: random.Random, value: object) -> bytes:
    if chance.random() < 0.03:
        return nested(chance)
    for _ in range(chance.randrange(1, 4)):
        value = mutated_value(chance, value)
    data = json.dumps(value).encode()
    return mutated(chance, data) if chance.random() < 0.2 else data


def test_fuzzed_traces(tmp_path: Path) -> None:
    header = {"kvtrace": 1, "name": "t", "block_tokens": 4, "time_unit": "ms", "scope": "global"}
    globally = [{"t": 1.5 * at, "in": 12, "out": 1, "b": [at, 2, 90, 1]} for at in range(3)]
    session = {**header, "scope": "session"}
    sessions = [{"r": [[0.5, 12, 1, [0, 3]], [2.5, 16, 1, [0, 4]]]} for _ in range(3)]
    path = tmp_path / "t.kvt.jsonl.gz"

    def attempt(chance: random.Random) -> None:
        lines = chance.choice(([header, *globally], [session, *sessions]))
        at = chance.randrange(len(lines))
        texts = [json.dumps(line).encode() for line in lines]
        texts[at] = changed_json(chance, lines[at])
        data = gzip.compress(b"\n".join(texts) + b"\n", 1)
        path.write_bytes(mutated(chance, data) if chance.random() < 0.2 else data)
        for read in (read_trace, scope_of, lambda path: read_sessions(path, 8, 10.0, seed=1)):
            with suppress(BadRequest):
                read(path)  # type: ignore[operator]

    fuzz("trace files", attempt)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A short one, with events of many kinds."""
    config = ManagerConfig(
        slab_bytes=1 << 20,
        slab_count_max=2,
        key_salt=bytes(32),
        lower={TierName.NVME: LowerSettings()},
    )
    plan = RecordingPlan(tmp_path, 64 << 20, "ab" * 8, bytes(32), config, "lru")
    writer = RecordingWriter(plan)
    core = BlockManager(config, make_policy=LruPolicy)
    hashes = [BlockHash(bytes([at]) * 16) for at in range(8)]
    events: list[ev.Event] = [
        ev.SessionOpened(SessionId(1), EngineId(b"E" * 16), Role.BOTH, (0,)),
        ev.Reserve(SessionId(1), NamespaceId(1), 3),
        ev.Acquire(SessionId(1), NamespaceId(1), hashes, deadline=10.0),
        ev.Prefetch(NamespaceId(1), hashes[:3]),
    ]
    for now, event in enumerate(events):
        refused = None
        try:
            found = core.handle(event, float(now))
        except KVTierError as error:
            found, refused = [], type(error).__name__
        writer.note(Noted(float(now), event, found, refused))
    writer.close("the daemon ended")
    return tmp_path / file_name("ab" * 8, 0)


_FRAME = struct.Struct("<4sII")


def test_fuzzed_recordings(recording: Path, tmp_path: Path) -> None:
    data = recording.read_bytes()
    line, _, rest = data.partition(b"\n")
    header = json.loads(line)
    bodies: list[tuple[bytes, bytes]] = []
    while rest:
        kind, length, _ = _FRAME.unpack_from(rest)
        bodies.append((kind, rest[_FRAME.size : _FRAME.size + length]))
        rest = rest[_FRAME.size + length :]
    assert {kind for kind, _ in bodies} == {BATCH, END}
    path = tmp_path / "fuzzed.kvrec"

    def framed(kind: bytes, body: bytes) -> bytes:
        return _FRAME.pack(kind, len(body), zlib.crc32(body)) + body

    def changed_batch(chance: random.Random, body: bytes) -> bytes:
        head, packed = body[: -len(zlib_tail(body))], zlib_tail(body)
        events = mutated(chance, zlib.decompress(packed))
        return (mutated(chance, head) if chance.random() < 0.1 else head) + zlib.compress(events)

    def changed_body(chance: random.Random, kind: bytes, body: bytes) -> bytes:
        if chance.random() < 0.2:
            return body
        if kind == BATCH:
            return changed_batch(chance, body)
        return changed_json(chance, {"reason": "x", "events": 4})

    def attempt(chance: random.Random) -> None:
        text = changed_json(chance, header) if chance.random() < 0.2 else line
        parts = [text + b"\n"]
        parts += [framed(kind, changed_body(chance, kind, body)) for kind, body in bodies]
        whole = b"".join(parts)
        path.write_bytes(mutated(chance, whole) if chance.random() < 0.2 else whole)
        with suppress(BadRequest):
            for _ in recorded_batches(path):
                pass

    fuzz("recordings", attempt)


def zlib_tail(body: bytes) -> bytes:
    """The compressed events of a batch."""
    return body[recording_files._BATCH.size :]


def test_fuzzed_configuration(tmp_path: Path) -> None:
    names = [line.split("`")[1] for line in documentation().splitlines() if line.startswith("| `")]
    sections = [line[4:-1] for line in documentation().splitlines() if line.startswith("## [")]
    sections = ["tenant.red" if one == "tenant.NAME" else one for one in sections]
    values = [
        '"auto"',
        '"4GiB"',
        "1",
        "0.5",
        "true",
        "[]",
        '["a"]',
        '"off"',
        "nan",
        "-inf",
        '"²GiB"',
        '{ bandwidth = "4GB/s" }',
        "1979-05-27",
        '"127.0.0.1:0"',
        "1e400",
        "9" * 30,
        '"a:b@c:1"',
    ]
    path = tmp_path / "kvtier.toml"

    def attempt(chance: random.Random) -> None:
        lines = []
        for section in chance.sample(sections, 3):
            lines.append(f"[{section}]")
            lines += [
                f"{chance.choice(names)} = {chance.choice(values)}"
                for _ in range(chance.randrange(4))
            ]
        data = "\n".join(lines).encode()
        kind = chance.randrange(10)
        if kind < 4:
            data = mutated(chance, data)
        elif kind == 4:
            data = b"a = " + nested(chance)
        path.write_bytes(data)
        overrides = {
            f"{chance.choice(sections)}.{chance.choice(names)}": chance.choice(values).strip('"')
            for _ in range(chance.randrange(3))
        }
        with suppress(ConfigError):
            load(path, overrides)

    fuzz("configuration", attempt)


def test_fuzzed_state_files(tmp_path: Path) -> None:
    fingerprint = bytes(16)
    epochs = EpochStore(tmp_path / "epochs", count(7).__next__)
    epochs.ensure(fingerprint)
    epochs.renew(fingerprint)
    owners = Owners(tmp_path / "owners")
    owners.note(fingerprint, "red")
    owed = OwedClears(tmp_path / "owed")
    owed.note(fingerprint)
    files = [one for one in tmp_path.rglob("*") if one.is_file()]
    assert len(files) == 3
    right = {path: path.read_bytes() for path in files}
    keys = format_keys([new_key([])])

    def attempt(chance: random.Random) -> None:
        for path, data in right.items():
            path.write_bytes(mutated(chance, data) if chance.random() < 0.8 else data)
        strange = tmp_path / "epochs" / chance.choice(("x", "00.epochs", f"{'²' * 8}.epochs"))
        if chance.random() < 0.2:
            strange.write_bytes(b"\0")
        assert set(epochs.current_epochs()) <= {fingerprint}
        Owners(tmp_path / "owners").known()
        owed.is_owed(fingerprint)
        with suppress(ConfigError):
            parse_keys(mutated(chance, keys.encode()).decode("utf-8", "surrogateescape"), "keys")

    fuzz("state files", attempt)


@pytest.fixture
def parked() -> Iterator[InventoryFile]:
    file = InventoryFile()
    slabs = (ParkedSlab("slab-1", 1, "base"), ParkedSlab("slab-2", 2, "thp", 2 << 20, node=1))
    session = ParkedSession(3, "ab" * 16, "BOTH", (0, 1), False, 3, "LIVE", token="cd")
    file.write(
        Inventory(
            generation=7,
            table_version=1,
            slot_next=48,
            sets=(ParkedSet("00" * 16, slabs, 32, 16, 4096, 4000),),
            sessions=(session,),
        )
    )
    yield file
    file.close()


def test_fuzzed_inventories(parked: InventoryFile) -> None:
    fd = parked.fd
    offset = next(at for at in (0, HALF_BYTES) if os.pread(fd, 1, at) != b"\0")
    magic, version, number, length = module._HEAD.unpack(os.pread(fd, module._HEAD.size, offset))
    text = json.loads(os.pread(fd, length, offset + module._TEXT_AT))

    def attempt(chance: random.Random) -> None:
        body = changed_json(chance, text)[: HALF_BYTES - module._TEXT_AT]
        head = module._HEAD.pack(magic, version, number, len(body))
        crc = module._CRC.pack(zlib.crc32(body, zlib.crc32(head)))
        whole = head + crc + body
        if chance.random() < 0.2:
            whole = mutated(chance, whole)
        os.pwrite(fd, whole[:HALF_BYTES], offset)
        found = read_inventory(fd)
        assert isinstance(found, str | Inventory)

    fuzz("inventories", attempt)
