"""Values to messages and back; pure. Both faces of the client share every line of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import grpc
import numpy as np

from kvtier.checksum import ByteView, block_checksum
from kvtier.client.values import DIRECT_SLOTS, Lease, Reservation, SessionRef, Slots
from kvtier.errors import (
    BadFrame,
    BadRequest,
    CorruptReplica,
    KVTierError,
    LimitExceeded,
    Unauthenticated,
    Unavailable,
    error_named,
)
from kvtier.namespace import NamespaceSpec
from kvtier.types import CommitOutcome, Cut, LeaseId, PrefixMatch, TierName
from kvtier.v1 import kvtier_pb2 as pb

HASHES_BYTES_MAX = 1 << 20  # The protocol's bound: 32,768 hashes of 32 bytes.
PUT_DATA_BYTES_MAX = 256 << 10  # The protocol's bound on one message of a put.

SLOT_IN_SEGMENT = 1  # In AcquireReady.slot_tiers.

_CUTS = frozenset(Cut)
_OUTCOMES = frozenset(CommitOutcome)

Hashes = Sequence[bytes] | bytes
"""A list of block hashes, or the same already packed."""


# ------------------------------------------------------------------------------------- to the wire


def spec_message(spec: NamespaceSpec) -> pb.NamespaceSpec:
    """Without the tenant: the daemon fills it in from the socket."""
    return pb.NamespaceSpec(
        model=spec.model,
        weights=spec.weights,
        kv_dtype=spec.kv_dtype,
        layout=spec.layout,
        block_tokens=spec.block_tokens,
        hash_bytes=spec.hash_bytes,
        shard_bytes=spec.shard_bytes,
        shard_count=spec.shard_count,
        parallel=spec.parallel,
        kv_group=spec.kv_group,
        attention=spec.attention,
        hash_algorithm=spec.hash_algorithm,
        hash_seed=spec.hash_seed,
        salt=spec.salt,
        extra=spec.extra,
        unchained=not spec.chained,
    )


def packed_hashes(hashes: Hashes, hash_bytes: int) -> bytes:
    """`count * hash_bytes` bytes, first block first. What is packed already is only checked."""
    if isinstance(hashes, bytes):
        packed = hashes
        wrong = len(packed) % hash_bytes != 0
    else:
        packed = b"".join(hashes)
        wrong = len(packed) != len(hashes) * hash_bytes
    if wrong:
        raise BadRequest(f"every block hash of this namespace is {hash_bytes} bytes long")
    if len(packed) > HASHES_BYTES_MAX:
        raise BadRequest(
            f"{len(packed) // hash_bytes} hashes: at most {HASHES_BYTES_MAX // hash_bytes} a call"
        )
    return packed


def slot_list(slots: Slots | Sequence[int]) -> list[int]:
    """As plain ints: protobuf takes these ten times faster than NumPy's."""
    return slots.tolist() if isinstance(slots, np.ndarray) else list(slots)


def put_messages(
    head: pb.PutRequest, blocks: Sequence[tuple[bytes, ByteView]]
) -> Iterator[pb.PutRequest]:
    """Pieces of every block in chain order; `head` has what only the first message needs."""
    message = head
    for block_hash, payload in blocks:
        view = memoryview(payload).cast("B")
        for offset in range(0, view.nbytes, PUT_DATA_BYTES_MAX):
            message.hash = block_hash
            message.offset = offset
            message.data = bytes(view[offset : offset + PUT_DATA_BYTES_MAX])
            yield message
            message = pb.PutRequest()


def check_put(blocks: Sequence[tuple[bytes, ByteView]], hash_bytes: int, block_bytes: int) -> None:
    """Before the first byte travels: a wrong block in the middle would leave half a chain."""
    for block_hash, payload in blocks:
        if len(block_hash) != hash_bytes:
            raise BadRequest(f"every block hash of this namespace is {hash_bytes} bytes long")
        if memoryview(payload).nbytes != block_bytes:
            raise BadRequest(
                f"a block of this namespace is {block_bytes} bytes (its shards side by side), "
                f"not {memoryview(payload).nbytes}"
            )


# ----------------------------------------------------------------------------------- from the wire


def tier_counts(counts: Sequence[pb.TierCount]) -> tuple[tuple[TierName, int], ...]:
    """Tiers of a newer daemon that we have no name for are left out; the totals stand."""
    known = set(TierName)
    return tuple((TierName(one.tier), one.count) for one in counts if one.tier in known)


def match_of(answer: pb.MatchResponse) -> PrefixMatch:
    return PrefixMatch(
        answer.matched_count, answer.memory_count, tier_counts(answer.tiers), answer.presence
    )


def _leased_slots(ready: pb.AcquireReady) -> Slots:
    slots = np.array(ready.slots, dtype=np.uint32)
    if not ready.slot_tiers:
        return slots
    tiers = np.frombuffer(ready.slot_tiers, dtype=np.uint8)
    if len(tiers) != len(slots) or (tiers > SLOT_IN_SEGMENT).any():
        raise BadFrame(f"the tiers of {len(slots)} slots are {ready.slot_tiers!r}")
    return slots + tiers.astype(np.uint64) * np.uint64(DIRECT_SLOTS)


def lease_of(ready: pb.AcquireReady, session: SessionRef) -> Lease:
    return Lease(
        lease_id=LeaseId(ready.lease_id) if ready.lease_id else None,
        session=session,
        leased_count=ready.leased_count,
        slots=_leased_slots(ready),
        deadline_ns=ready.deadline_ns,
        cut=_cut_of(ready.cut),
        tiers=tier_counts(ready.tiers),
        epoch=ready.epoch,
    )


class AcquireAnswers:
    """The messages of one acquire: `pending` while blocks are promoted, then one `ready`."""

    def __init__(self, session: SessionRef) -> None:
        self.lease: Lease | None = None
        # Of the lease granted or waited for: Release ends it, whether its answer came or not.
        self.lease_id: int | None = None
        self._session = session

    def add(self, answer: pb.AcquireResponse) -> None:
        if answer.WhichOneof("outcome") == "ready":
            self.lease = lease_of(answer.ready, self._session)
            self.lease_id = self.lease.lease_id
        else:
            self.lease_id = answer.pending.lease_id or None


def pin_of(answer: pb.PinResponse, session: SessionRef, deadline_ns: int, epoch: int) -> Lease:
    """A pin is a lease without slots."""
    return Lease(
        lease_id=LeaseId(answer.lease_id) if answer.lease_id else None,
        session=session,
        leased_count=answer.pinned_count,
        slots=np.empty(0, dtype=np.uint32),
        deadline_ns=deadline_ns,
        cut=_cut_of(answer.cut),
        tiers=(),
        epoch=epoch,
    )


def _cut_of(cut: int) -> Cut:
    # A reason that only a newer daemon knows: what follows is not leased, so a miss to us.
    return Cut(cut) if cut in _CUTS else Cut.MISS


def reservation_of(answer: pb.ReserveResponse, session: SessionRef) -> Reservation:
    return Reservation(
        session=session,
        slots=np.array(answer.slots, dtype=np.uint32),
        epoch=answer.epoch,
        stock_count_max=answer.stock_count_max,
    )


def outcomes_of(answer: pb.CommitResponse, count: int) -> list[CommitOutcome]:
    if len(answer.outcomes) != count:
        raise BadFrame(f"{len(answer.outcomes)} outcomes for {count} committed blocks")
    # An outcome that only a newer daemon knows is not READY: say that the block is not there.
    return [
        CommitOutcome(outcome) if outcome in _OUTCOMES else CommitOutcome.VOID
        for outcome in answer.outcomes
    ]


class BlockAssembler:
    """Pieces of a get in, whole blocks with proven checksums out."""

    def __init__(self, block_bytes: int, shard_bytes: int, block_count_max: int) -> None:
        self._block_bytes = block_bytes
        self._shard_bytes = shard_bytes
        self._block_count_max = block_count_max
        self._pieces: list[bytes] = []
        self._filled_bytes = 0
        self._checksum = 0
        self._blocks: list[bytes] = []

    def add(self, piece: pb.GetResponse) -> None:
        """Raises CorruptReplica when pieces or checksum do not fit together."""
        expected = (len(self._blocks), self._filled_bytes)
        if (piece.index, piece.offset) != expected or piece.index >= self._block_count_max:
            raise CorruptReplica(f"piece {(piece.index, piece.offset)} came, not {expected}")
        self._pieces.append(piece.data)
        self._filled_bytes += len(piece.data)
        self._checksum = piece.checksum or self._checksum
        if self._filled_bytes > self._block_bytes:
            raise CorruptReplica(f"block {piece.index} is longer than {self._block_bytes} bytes")
        if self._filled_bytes == self._block_bytes:
            self._finish_block()

    def finish(self) -> list[bytes]:
        """The whole blocks, first to first gap; the stream has ended."""
        if self._pieces:
            raise CorruptReplica(f"block {len(self._blocks)} ended in the middle")
        return self._blocks

    def _finish_block(self) -> None:
        block = b"".join(self._pieces)
        # 0: the daemon has not computed it yet; the bytes come straight from its memory.
        if self._checksum and block_checksum(block, self._shard_bytes) != self._checksum:
            raise CorruptReplica(f"block {len(self._blocks)} does not match its checksum")
        self._blocks.append(block)
        self._pieces, self._filled_bytes, self._checksum = [], 0, 0


# ---------------------------------------------------------------------------------------- failures


def named_error(details: str | None) -> KVTierError | None:
    """The daemon's own error out of "Name: text"; None when the text is not the daemon's."""
    name, colon, text = (details or "").partition(": ")
    found = error_named(name)
    if not colon or (found is KVTierError and name != "KVTierError"):
        return None
    return found(text)


def error_of(code: grpc.StatusCode, details: str | None) -> KVTierError:
    """What to raise for a call that failed; Unavailable when nobody says what became of it.

    The daemon's own Unavailable is an answer: `named_error` tells it from this one.
    """
    error = named_error(details)
    if error is not None:
        return error
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return LimitExceeded(f"gRPC refused the message: {details}")
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return Unauthenticated(details or "no session has this token: connect again")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return BadRequest(f"the daemon does not know this call: upgrade it ({details})")
    return Unavailable(f"{code.name}: {details or 'no answer from the daemon'}")
