"""A writer that dies, or a medium that tears: an entry is the old one, the new one, or void."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier.memory import Mapping
from kvtier.pools.recovery import recover
from kvtier.pools.slot_table import BlockFacts, SlotTable
from kvtier.types import BlockHash, EngineId
from tests.support.forms import rounds
from tests.support.memory_pool import pack_entry

GENERATION = 3
FINGERPRINT = b"f" * 16
EPOCH = 4
WORDS = 16  # 8 bytes each: what a store of this machine never tears.
SECTOR_ENTRIES = 4  # 512 bytes.


def ready(block: bytes, sequence: int, checksum: int = 0) -> bytes:
    return pack_entry(
        state=2,
        generation=GENERATION,
        hash_bytes=32,
        fingerprint=FINGERPRINT,
        block=block.ljust(32, b"."),
        parent=b"p" * 32,
        sequence=sequence,
        payload_bytes=2 << 20,
        checksum=checksum,
        epoch=EPOCH,
    )


blocks = st.binary(min_size=1, max_size=32)
entries = st.one_of(
    st.just(bytes(128)),
    st.builds(ready, blocks, st.integers(1, 1 << 40), st.integers(0, (1 << 64) - 1)),
    st.builds(
        lambda engine: pack_entry(state=1, generation=GENERATION, block=engine),
        st.binary(min_size=16, max_size=16),
    ),
)


def torn(old: bytes, new: bytes, from_new: int) -> bytes:
    """Word i comes from the new entry if bit i of `from_new` is set."""
    return b"".join(
        (new if from_new >> word & 1 else old)[8 * word : 8 * word + 8] for word in range(WORDS)
    )


def assert_old_new_or_void(old: bytes, new: bytes, found: bytes) -> None:
    table = np.frombuffer(found, np.uint8)
    recovered = recover(table, GENERATION, {FINGERPRINT: EPOCH})
    for entry in [*recovered.ready, *recovered.reserved]:
        assert entry.tobytes() in {old, new}, "a mixture of two entries was believed"


@settings(max_examples=400, deadline=None)
@given(old=entries, new=entries, from_new=st.integers(0, (1 << WORDS) - 1))
@example(old=ready(b"a", 1), new=ready(b"a", 1, checksum=7), from_new=1 << 14)
@example(old=ready(b"a", 1), new=ready(b"b", 2), from_new=0b1111 << 4)
def test_any_mixture_of_words_is_the_old_entry_the_new_one_or_void(
    old: bytes, new: bytes, from_new: int
) -> None:
    assert_old_new_or_void(old, new, torn(old, new, from_new))


@given(old=entries, new=entries)
@settings(max_examples=50, deadline=None)
def test_a_write_cut_off_after_any_number_of_words_is_old_new_or_void(
    old: bytes, new: bytes
) -> None:
    for word_count in range(WORDS + 1):
        assert_old_new_or_void(old, new, torn(old, new, (1 << word_count) - 1))
        # As the writer does it: the head is zero until all else is there.
        voided = bytes(8) + old[8:]
        assert_old_new_or_void(old, new, torn(voided, new, ((1 << word_count) - 1) & ~1))


@given(data=st.data(), sectors=st.integers(1, 6))
@settings(max_examples=50, deadline=None)
def test_lost_sectors_lose_only_their_own_entries(data: st.DataObject, sectors: int) -> None:
    count = sectors * SECTOR_ENTRIES
    old = [ready(b"old%d" % slot, slot + 1) for slot in range(count)]
    new = [ready(b"new%d" % slot, slot + 100) for slot in range(count)]
    written = data.draw(st.lists(st.booleans(), min_size=sectors, max_size=sectors))
    table = [(new if written[slot // SECTOR_ENTRIES] else old)[slot] for slot in range(count)]
    found = recover(np.frombuffer(b"".join(table), np.uint8), GENERATION, {FINGERPRINT: EPOCH})
    assert [entry.tobytes() for entry in found.ready] == table


SLOT_COUNT = 512
WRITER = """
import sys
from tests.crash.test_slot_table import write_for_ever
write_for_ever(int(sys.argv[1]))
"""


def block_of(slot: int, lap: int) -> BlockHash:
    return BlockHash(b"%16d%16d" % (slot, lap))


def write_for_ever(fd: int) -> None:
    """In the child: rewrites every slot, lap after lap, until it is killed."""
    table = SlotTable(GENERATION, grow_slots=SLOT_COUNT)
    table._words = Mapping(fd, SLOT_COUNT * 128).array.view(np.uint64).reshape(-1, WORDS)
    slots = np.arange(SLOT_COUNT, dtype=np.uint32)
    facts = BlockFacts(FINGERPRINT, EPOCH, payload_bytes=1)
    lap = 0
    while True:
        lap += 1
        hashes = [block_of(slot, lap) for slot in range(SLOT_COUNT)]
        sequence = lap * SLOT_COUNT
        table.write_reserved(slots, EngineId(b"e" * 16))
        table.write_ready(slots, hashes, hashes, facts, sequence=sequence)
        table.write_checksums(slots, np.arange(sequence, sequence + SLOT_COUNT, dtype=np.uint64))


@pytest.mark.full_form
def test_a_killed_writer_leaves_whole_entries_or_void_ones() -> None:
    for round_number in range(rounds(short=5, full=200)):
        fd = os.memfd_create("kvtier-crash")
        os.ftruncate(fd, SLOT_COUNT * 128)
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(fd)], pass_fds=[fd])
        try:
            deadline = time.monotonic() + 20
            while not any(os.pread(fd, 128, 0)):
                assert time.monotonic() < deadline, "the writer never wrote"
                time.sleep(0.005)
            time.sleep(0.0137 * (round_number % 7))
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
        table = np.frombuffer(os.pread(fd, SLOT_COUNT * 128, 0), np.uint8)
        os.close(fd)
        found = recover(table, GENERATION, {FINGERPRINT: EPOCH})
        for slot, entry in zip(found.ready_slots.tolist(), found.ready, strict=True):
            lap = int(entry["sequence"]) // SLOT_COUNT
            assert bytes(entry["hash"]) == bytes(entry["parent"]) == block_of(slot, lap)
            assert int(entry["checksum"]) in {0, lap * SLOT_COUNT + slot}
