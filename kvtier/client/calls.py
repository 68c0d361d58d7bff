"""The calls of the service as a table, and the channel both faces use.

No generated stub: the table also says what a missing answer means, and serves `grpc` and
`grpc.aio` alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from google.protobuf.message import Message

from kvtier.v1 import kvtier_pb2 as pb

SERVICE = "/kvtier.v1.KVTier/"
MESSAGE_BYTES_MAX = 4 << 20  # The largest message is a match of 1 MiB of hashes.

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)


@dataclass(frozen=True, slots=True)
class Call(Generic[Q, A]):
    """One RPC. `changes_state`: a missing answer leaves slots or leases nobody knows of."""

    name: str
    request: type[Q]
    answer: type[A]
    changes_state: bool = False

    @property
    def path(self) -> str:
        return SERVICE + self.name


class AnyCall(Protocol):
    """A call whose types do not matter."""

    @property
    def changes_state(self) -> bool: ...


GREET = Call("Greet", pb.GreetRequest, pb.GreetResponse)
MATCH = Call("Match", pb.MatchRequest, pb.MatchResponse)
ACQUIRE = Call("Acquire", pb.AcquireRequest, pb.AcquireResponse, changes_state=True)
RELEASE = Call("Release", pb.ReleaseRequest, pb.ReleaseResponse, changes_state=True)
RESERVE = Call("Reserve", pb.ReserveRequest, pb.ReserveResponse, changes_state=True)
COMMIT = Call("Commit", pb.CommitRequest, pb.CommitResponse, changes_state=True)
ABORT = Call("Abort", pb.AbortRequest, pb.AbortResponse, changes_state=True)
PREFETCH = Call("Prefetch", pb.PrefetchRequest, pb.PrefetchResponse)
# A put fills slots of the daemon's own; asking again is harmless.
PUT = Call("Put", pb.PutRequest, pb.PutResponse)
GET = Call("Get", pb.GetRequest, pb.GetResponse)
HINT = Call("Hint", pb.HintRequest, pb.HintResponse)
EVICT = Call("Evict", pb.EvictRequest, pb.EvictResponse)
PIN = Call("Pin", pb.PinRequest, pb.PinResponse, changes_state=True)
CLEAR = Call("Clear", pb.ClearRequest, pb.ClearResponse)
PURGE = Call("Purge", pb.PurgeRequest, pb.PurgeResponse)
DRAIN = Call("Drain", pb.DrainRequest, pb.DrainResponse)
CHECK = Call("Check", pb.CheckRequest, pb.CheckResponse)
EXPLAIN = Call("Explain", pb.ExplainRequest, pb.ExplainResponse)
LIST = Call("List", pb.ListRequest, pb.ListResponse)
STATS = Call("Stats", pb.StatsRequest, pb.StatsResponse)
WATCH = Call("Watch", pb.WatchRequest, pb.WatchResponse)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # A retry that we did not ask for would repeat a Reserve.
    ("grpc.enable_retries", 0),
    # A restarted daemon is found again within one probe.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # Two clients of one process must not share a broken connection.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # Not SingleThreadedUnaryStream: it answers an Acquire about 0.4 ms sooner, and loses its
    # connection's descriptor whenever a stream ends before its last message was read.
)
