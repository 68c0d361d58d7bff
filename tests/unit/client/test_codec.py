from __future__ import annotations

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.checksum import block_checksum
from kvtier.client import codec
from kvtier.client.values import SessionRef
from kvtier.errors import (
    BadFrame,
    BadRequest,
    CorruptReplica,
    Draining,
    KVTierError,
    LimitExceeded,
    TierFull,
    Unauthenticated,
    Unavailable,
)
from kvtier.namespace import NamespaceSpec
from kvtier.types import CommitOutcome, Cut, PrefixMatch, TierName
from kvtier.v1 import kvtier_pb2 as pb

SESSION = SessionRef(generation=5, session_id=8)
SPEC = NamespaceSpec("m", "w", "bfloat16", "nhd", 16, 4096, tenant="t", salt="s", extra={"a": "b"})


def test_every_fact_but_the_tenant_travels() -> None:
    message = codec.spec_message(SPEC)
    assert message.tenant == ""
    for name in ("model", "weights", "layout", "shard_bytes", "hash_bytes", "salt"):
        assert getattr(message, name) == getattr(SPEC, name)
    assert dict(message.extra) == {"a": "b"}


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=20))
def test_packing_by_hand_or_by_us_is_the_same(hashes: list[bytes]) -> None:
    packed = codec.packed_hashes(hashes, 16)
    assert codec.packed_hashes(packed, 16) is packed
    assert [packed[i : i + 16] for i in range(0, len(packed), 16)] == hashes


@pytest.mark.parametrize("hashes", [[b"x" * 31], b"x" * 31, [b"x" * 32, b""]])
def test_hashes_of_another_length_are_refused(hashes: codec.Hashes) -> None:
    with pytest.raises(BadRequest, match="32 bytes long"):
        codec.packed_hashes(hashes, 32)


def test_more_hashes_than_a_message_holds_are_refused() -> None:
    codec.packed_hashes(bytes(codec.HASHES_BYTES_MAX), 32)
    with pytest.raises(BadRequest, match="at most 32768"):
        codec.packed_hashes(bytes(codec.HASHES_BYTES_MAX + 32), 32)


def test_a_tier_that_only_a_newer_daemon_knows_is_left_out() -> None:
    tiers = [pb.TierCount(tier="dram", count=2), pb.TierCount(tier="tape", count=1)]
    answer = pb.MatchResponse(matched_count=3, memory_count=2, tiers=tiers)
    assert codec.match_of(answer) == PrefixMatch(3, 2, ((TierName.DRAM, 2),))


def test_a_lease_of_nothing_has_no_id() -> None:
    assert codec.lease_of(pb.AcquireReady(cut=1), SESSION).lease_id is None


def test_a_lease_carries_its_session_and_its_slots() -> None:
    ready = pb.AcquireReady(lease_id=4, leased_count=3, slots=[7, 9], deadline_ns=11, epoch=2)
    lease = codec.lease_of(ready, SESSION)
    assert (lease.lease_id, lease.session, lease.leased_count) == (4, SESSION, 3)
    assert lease.slots.dtype == np.uint32
    assert lease.slots.tolist() == [7, 9]
    assert (lease.deadline_ns, lease.cut, lease.epoch) == (11, Cut.NONE, 2)


def test_an_unknown_cut_is_a_miss() -> None:
    ready = pb.AcquireReady.FromString(pb.AcquireReady(cut=1).SerializeToString()[:-1] + b"\x63")
    assert codec.lease_of(ready, SESSION).cut is Cut.MISS


def test_an_unknown_outcome_is_not_ready() -> None:
    answer = pb.CommitResponse(outcomes=bytes([0, 1, 99]))
    expected = [CommitOutcome.READY, CommitOutcome.PRESENT, CommitOutcome.VOID]
    assert codec.outcomes_of(answer, 3) == expected


def test_outcomes_for_other_blocks_than_committed_are_refused() -> None:
    with pytest.raises(BadFrame):
        codec.outcomes_of(pb.CommitResponse(outcomes=b"\0"), 2)


# --------------------------------------------------------------------------------- put and get


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_put_pieces_join_to_the_blocks_put(sizes: list[int]) -> None:
    block_bytes = codec.PUT_DATA_BYTES_MAX + 1000
    blocks = [(bytes([i]) * 32, bytes([size]) * block_bytes) for i, size in enumerate(sizes)]
    head = pb.PutRequest(token=b"t", namespace_id=3)
    joined: dict[bytes, bytes] = {}
    for index, message in enumerate(codec.put_messages(head, blocks)):
        assert (message.token == b"t") == (index == 0)
        assert 1 <= len(message.data) <= codec.PUT_DATA_BYTES_MAX
        assert message.offset == len(joined.get(message.hash, b""))
        joined[message.hash] = joined.get(message.hash, b"") + message.data
    assert list(joined.items()) == blocks


def test_a_block_of_the_wrong_size_is_refused_before_anything_is_sent() -> None:
    good = (b"a" * 32, bytes(100))
    codec.check_put([good], 32, 100)
    for bad in [(b"a" * 31, bytes(100)), (b"a" * 32, bytes(99))]:
        with pytest.raises(BadRequest):
            codec.check_put([good, bad], 32, 100)


def pieces_of(block: bytes, index: int = 0, checksum: int | None = None) -> list[pb.GetResponse]:
    summed = block_checksum(block, 100) if checksum is None else checksum
    return [
        pb.GetResponse(index=index, offset=at, data=block[at : at + 150], checksum=summed)
        for at in range(0, len(block), 150)
    ]


def test_pieces_of_a_get_join_to_the_blocks() -> None:
    blocks = [bytes(range(200)), b"z" * 200]
    assembler = codec.BlockAssembler(200, 100, 2)
    for index, block in enumerate(blocks):
        for piece in pieces_of(block, index):
            assembler.add(piece)
    assert assembler.finish() == blocks


def add_all(assembler: codec.BlockAssembler, pieces: list[pb.GetResponse]) -> None:
    for piece in pieces:
        assembler.add(piece)


def test_a_flipped_bit_is_corrupt() -> None:
    pieces = pieces_of(bytes(range(200)))
    pieces[0].data = b"\x01" + pieces[0].data[1:]
    with pytest.raises(CorruptReplica, match="checksum"):
        add_all(codec.BlockAssembler(200, 100, 1), pieces)


def test_swapped_shards_are_corrupt() -> None:
    block = bytes(range(200))
    pieces = pieces_of(block[100:] + block[:100], checksum=block_checksum(block, 100))
    with pytest.raises(CorruptReplica, match="checksum"):
        add_all(codec.BlockAssembler(200, 100, 1), pieces)


def test_lost_repeated_or_unasked_pieces_are_corrupt() -> None:
    first, second = pieces_of(bytes(200))
    for wrong in ([second], [first, first], [first, second, *pieces_of(bytes(200), index=1)]):
        with pytest.raises(CorruptReplica):
            add_all(codec.BlockAssembler(200, 100, 1), wrong)
    assembler = codec.BlockAssembler(200, 100, 1)
    assembler.add(first)
    with pytest.raises(CorruptReplica, match="ended in the middle"):
        assembler.finish()


# ------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize(
    ("code", "details", "expected"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "TierFull: want 3 slots, 0 free", TierFull),
        (grpc.StatusCode.UNAVAILABLE, "Draining: shutting down", Draining),
        (grpc.StatusCode.UNAVAILABLE, "failed to connect: no such file", Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", Unavailable),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Sent message larger than max", LimitExceeded),
        (grpc.StatusCode.UNAUTHENTICATED, "", Unauthenticated),
        (grpc.StatusCode.UNKNOWN, None, Unavailable),
    ],
)
def test_failures_become_the_error_that_says_what_to_do(
    code: grpc.StatusCode, details: str | None, expected: type[KVTierError]
) -> None:
    assert type(codec.error_of(code, details)) is expected


def test_the_daemons_text_reaches_the_caller() -> None:
    error = codec.error_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "TierFull: want 3: slots")
    assert str(error) == "want 3: slots"
