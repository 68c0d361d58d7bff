"""What fuzzers have found, each as it was: inputs that ended a process, or had it take memory."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import struct
import threading
import zlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.config import load
from kvtier.errors import BadRequest, ConfigError
from kvtier.pools.remote.files import FilesEngine, FilesSettings, prepare_root
from kvtier.pools.remote.keys import epoch_key
from kvtier.pools.superblock import Geometry, Superblock, parse_superblock
from kvtier.recording import files
from kvtier.recording.values import ARRAY, INTEGER, LIST, TEXT, Decoder
from kvtier.server import inventory
from kvtier.server.holder import Holder
from kvtier.server.inventory import read_inventory
from kvtier.server.parking import HolderParking, ParkingFailed
from kvtier.sim.traces import read_trace

DEEP = b"[" * 20_000


@pytest.mark.parametrize("said", [DEEP, b'{"do": "take", "first": Infinity}', b"[1]", b"{}"])
def test_a_holder_goes_on_whatever_it_is_asked(tmp_path: Path, said: bytes) -> None:
    path = tmp_path / "hold.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(1)
    ours, theirs = socket.socketpair()
    holder = Holder(listener)
    thread = threading.Thread(target=holder.run, args=(theirs,))
    thread.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(10)
        peer.connect(str(path))
        for asked in (b'{"do": "own"}', said, b'{"do": "take", "first": 0}'):
            peer.send(asked)
            answer = json.loads(peer.recv(1 << 16))
        assert answer == {"ok": True, "names": [], "count": 0}
    ours.send(b"x")
    thread.join(10)
    holder.close()
    for one in (ours, theirs):
        one.close()


@pytest.mark.parametrize(
    "answer", [b"[]", DEEP, b'{"ok": 1}', b'{"ok": 1, "names": [], "count": []}']
)
def test_a_holder_that_answers_nonsense_is_none(tmp_path: Path, answer: bytes) -> None:
    path = tmp_path / "hold.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(1)

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            for said in (b'{"ok": true}', answer):
                connection.recv(1 << 16)
                connection.send(said)

    thread = threading.Thread(target=serve)
    thread.start()
    with closing(HolderParking(path)) as parking, pytest.raises(ParkingFailed):
        parking.take_all()
    thread.join(10)
    listener.close()


GEOMETRY = Geometry(segment_bytes=256 << 20, segment_count=30, row_count_max=4096, path_count=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"life": 1 << 40},
        {"revision": (1 << 64) - 1},
        {"path_index": 2},
        *(
            {"geometry": replace(GEOMETRY, **one)}
            for one in (
                {"segment_bytes": 0},
                {"segment_bytes": 4097},
                {"segment_bytes": 1 << 60},
                {"row_count_max": 0},
                {"row_count_max": 1 << 30},
                {"segment_count": 0},
                {"path_count": 0},
            )
        ),
    ],
)
def test_a_superblock_of_a_pool_that_cannot_be_is_none(changes: dict[str, object]) -> None:
    right = Superblock(b"p" * 16, 7, GEOMETRY, path_index=1)
    assert parse_superblock(right.pack()) == right
    forged: Superblock = replace(right, **changes)  # type: ignore[arg-type]
    assert parse_superblock(forged.pack()) is None


def number(value: int) -> bytes:
    """As recordings write it."""
    data = b""
    while value >= 0x80:
        data += bytes((value & 0x7F | 0x80,))
        value >>= 7
    return data + bytes((value,))


@pytest.mark.parametrize(
    "data",
    [
        bytes((ARRAY,)) + number(2) + b"u1" + bytes((INTEGER,)) + number(1 << 41),
        bytes((INTEGER,)) + b"\xff" * 100_000,
        bytes((ARRAY,)) + number(2) + b"u1" + bytes((TEXT,)) + number(1) + b"x",
    ],
)
def test_bytes_of_a_recording_take_no_memory_but_their_own(data: bytes) -> None:
    decoder = Decoder()
    decoder.feed(data)
    with pytest.raises(BadRequest):
        decoder.get()


def test_a_batch_of_a_recording_is_not_unpacked_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files, "_BATCH_BYTES_MAX", 1000)
    assert files._unpacked(zlib.compress(bytes(999))) == bytes(999)
    with pytest.raises(ValueError, match="too many for one batch"):
        files._unpacked(zlib.compress(bytes(100_000)))


def test_values_in_values_without_end_are_no_recording() -> None:
    decoder = Decoder()
    decoder.feed(bytes((LIST, 1)) * 20_000)
    with pytest.raises((BadRequest, RecursionError)):
        decoder.get()


@pytest.mark.parametrize("line", [DEEP, b'{"t": 1, "in": Infinity, "out": 1, "b": []}'])
def test_a_line_of_a_trace_that_is_none_is_named(tmp_path: Path, line: bytes) -> None:
    header = {"kvtrace": 1, "name": "t", "block_tokens": 4, "time_unit": "ms", "scope": "global"}
    path = tmp_path / "t.kvt.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(header).encode() + b"\n" + line + b"\n"))
    with pytest.raises(BadRequest, match="line 2"):
        read_trace(path)


def test_a_configuration_nested_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kvtier.toml"
    path.write_bytes(b"a = " + DEEP)
    with pytest.raises(ConfigError, match="nested too deep"):
        load(path)


def test_an_inventory_nested_without_end_is_not_believed(tmp_path: Path) -> None:
    head = inventory._HEAD.pack(inventory.MAGIC, inventory.VERSION, 1, len(DEEP))
    crc = struct.pack("<I", zlib.crc32(DEEP, zlib.crc32(head)))
    with (tmp_path / "inventory").open("w+b") as file:
        file.write(head + crc + DEEP)
        file.flush()
        found = read_inventory(file.fileno())
    assert isinstance(found, str)
    assert "cannot be understood" in found


async def ask_share(root: Path) -> object:
    engine = FilesEngine(FilesSettings(root, capacity_bytes=1 << 20), unique="client")
    record = epoch_key(bytes(16))
    await engine.replace_record(record, expected=None, value=b"r", timeout_seconds=5)
    (folder,) = (root / "records").iterdir()
    (folder / "²").write_bytes(b"x")
    reply = await engine.read_record(record, timeout_seconds=5)
    await engine.close()
    return reply.value


def test_a_strange_name_in_a_share_hides_no_record(tmp_path: Path) -> None:
    root = tmp_path / "share"
    prepare_root(root)
    value = asyncio.run(ask_share(root))
    assert value is not None
    assert bytes(value) == b"r"  # type: ignore[call-overload]
