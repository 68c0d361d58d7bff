from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_SCHEDULER: _ClassVar[Role]
    ROLE_WORKER: _ClassVar[Role]
    ROLE_BOTH: _ClassVar[Role]
    ROLE_TOOL: _ClassVar[Role]

class Cut(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CUT_NONE: _ClassVar[Cut]
    CUT_MISS: _ClassVar[Cut]
    CUT_PIN_LIMIT: _ClassVar[Cut]
    CUT_DEADLINE: _ClassVar[Cut]
    CUT_NO_SPACE: _ClassVar[Cut]
    CUT_UNMAPPED: _ClassVar[Cut]
    CUT_DRAINING: _ClassVar[Cut]

class CommitOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMMIT_OUTCOME_READY: _ClassVar[CommitOutcome]
    COMMIT_OUTCOME_PRESENT: _ClassVar[CommitOutcome]
    COMMIT_OUTCOME_NO_PARENT: _ClassVar[CommitOutcome]
    COMMIT_OUTCOME_VOID: _ClassVar[CommitOutcome]
ROLE_UNSPECIFIED: Role
ROLE_SCHEDULER: Role
ROLE_WORKER: Role
ROLE_BOTH: Role
ROLE_TOOL: Role
CUT_NONE: Cut
CUT_MISS: Cut
CUT_PIN_LIMIT: Cut
CUT_DEADLINE: Cut
CUT_NO_SPACE: Cut
CUT_UNMAPPED: Cut
CUT_DRAINING: Cut
COMMIT_OUTCOME_READY: CommitOutcome
COMMIT_OUTCOME_PRESENT: CommitOutcome
COMMIT_OUTCOME_NO_PARENT: CommitOutcome
COMMIT_OUTCOME_VOID: CommitOutcome

class NamespaceSpec(_message.Message):
    __slots__ = ("model", "weights", "kv_dtype", "layout", "block_tokens", "hash_bytes", "shard_bytes", "shard_count", "parallel", "kv_group", "attention", "hash_algorithm", "hash_seed", "tenant", "salt", "extra", "unchained")
    class ExtraEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_FIELD_NUMBER: _ClassVar[int]
    KV_GROUP_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    UNCHAINED_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights: str
    kv_dtype: str
    layout: str
    block_tokens: int
    hash_bytes: int
    shard_bytes: int
    shard_count: int
    parallel: str
    kv_group: str
    attention: str
    hash_algorithm: str
    hash_seed: str
    tenant: str
    salt: str
    extra: _containers.ScalarMap[str, str]
    unchained: bool
    def __init__(self, model: _Optional[str] = ..., weights: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., layout: _Optional[str] = ..., block_tokens: _Optional[int] = ..., hash_bytes: _Optional[int] = ..., shard_bytes: _Optional[int] = ..., shard_count: _Optional[int] = ..., parallel: _Optional[str] = ..., kv_group: _Optional[str] = ..., attention: _Optional[str] = ..., hash_algorithm: _Optional[str] = ..., hash_seed: _Optional[str] = ..., tenant: _Optional[str] = ..., salt: _Optional[str] = ..., extra: _Optional[_Mapping[str, str]] = ..., unchained: bool = ...) -> None: ...

class DaemonFrame(_message.Message):
    __slots__ = ("welcome", "opened", "namespace_opened", "slab_offered", "slab_withdrawn", "slots_recalled", "quiet_requested", "error", "quiet_ack", "segment_offered")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_OPENED_FIELD_NUMBER: _ClassVar[int]
    SLAB_OFFERED_FIELD_NUMBER: _ClassVar[int]
    SLAB_WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    SLOTS_RECALLED_FIELD_NUMBER: _ClassVar[int]
    QUIET_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    QUIET_ACK_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_OFFERED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    opened: SessionOpened
    namespace_opened: NamespaceOpened
    slab_offered: SlabOffered
    slab_withdrawn: SlabWithdrawn
    slots_recalled: SlotsRecalled
    quiet_requested: QuietRequested
    error: SessionError
    quiet_ack: SessionQuietAck
    segment_offered: SegmentOffered
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., opened: _Optional[_Union[SessionOpened, _Mapping]] = ..., namespace_opened: _Optional[_Union[NamespaceOpened, _Mapping]] = ..., slab_offered: _Optional[_Union[SlabOffered, _Mapping]] = ..., slab_withdrawn: _Optional[_Union[SlabWithdrawn, _Mapping]] = ..., slots_recalled: _Optional[_Union[SlotsRecalled, _Mapping]] = ..., quiet_requested: _Optional[_Union[QuietRequested, _Mapping]] = ..., error: _Optional[_Union[SessionError, _Mapping]] = ..., quiet_ack: _Optional[_Union[SessionQuietAck, _Mapping]] = ..., segment_offered: _Optional[_Union[SegmentOffered, _Mapping]] = ...) -> None: ...

class ClientFrame(_message.Message):
    __slots__ = ("hello", "open_namespace", "slab_mapped", "slab_unmapped", "quiet", "bye", "segment_mapped")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SLAB_MAPPED_FIELD_NUMBER: _ClassVar[int]
    SLAB_UNMAPPED_FIELD_NUMBER: _ClassVar[int]
    QUIET_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_MAPPED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    open_namespace: OpenNamespace
    slab_mapped: SlabMapped
    slab_unmapped: SlabUnmapped
    quiet: Quiet
    bye: Bye
    segment_mapped: SegmentMapped
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., open_namespace: _Optional[_Union[OpenNamespace, _Mapping]] = ..., slab_mapped: _Optional[_Union[SlabMapped, _Mapping]] = ..., slab_unmapped: _Optional[_Union[SlabUnmapped, _Mapping]] = ..., quiet: _Optional[_Union[Quiet, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ..., segment_mapped: _Optional[_Union[SegmentMapped, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol", "daemon_version", "generation", "daemon_ns")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    DAEMON_VERSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DAEMON_NS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    daemon_version: str
    generation: int
    daemon_ns: int
    def __init__(self, protocol: _Optional[int] = ..., daemon_version: _Optional[str] = ..., generation: _Optional[int] = ..., daemon_ns: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "client_version", "engine_id", "role", "shards", "welcome_ns", "client_ns", "old_session_id", "old_token", "name", "memory_node", "knows_segments")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    WELCOME_NS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NS_FIELD_NUMBER: _ClassVar[int]
    OLD_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    OLD_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_NODE_FIELD_NUMBER: _ClassVar[int]
    KNOWS_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    client_version: str
    engine_id: bytes
    role: Role
    shards: _containers.RepeatedScalarFieldContainer[int]
    welcome_ns: int
    client_ns: int
    old_session_id: int
    old_token: bytes
    name: str
    memory_node: int
    knows_segments: bool
    def __init__(self, protocol: _Optional[int] = ..., client_version: _Optional[str] = ..., engine_id: _Optional[bytes] = ..., role: _Optional[_Union[Role, str]] = ..., shards: _Optional[_Iterable[int]] = ..., welcome_ns: _Optional[int] = ..., client_ns: _Optional[int] = ..., old_session_id: _Optional[int] = ..., old_token: _Optional[bytes] = ..., name: _Optional[str] = ..., memory_node: _Optional[int] = ..., knows_segments: bool = ...) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ("session_id", "token", "by_value", "by_value_reason", "lease_ms_max", "lease_margin_ms", "grpc_address", "keeps_memory")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    BY_VALUE_FIELD_NUMBER: _ClassVar[int]
    BY_VALUE_REASON_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_MAX_FIELD_NUMBER: _ClassVar[int]
    LEASE_MARGIN_MS_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KEEPS_MEMORY_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    token: bytes
    by_value: bool
    by_value_reason: str
    lease_ms_max: int
    lease_margin_ms: int
    grpc_address: str
    keeps_memory: bool
    def __init__(self, session_id: _Optional[int] = ..., token: _Optional[bytes] = ..., by_value: bool = ..., by_value_reason: _Optional[str] = ..., lease_ms_max: _Optional[int] = ..., lease_margin_ms: _Optional[int] = ..., grpc_address: _Optional[str] = ..., keeps_memory: bool = ...) -> None: ...

class OpenNamespace(_message.Message):
    __slots__ = ("spec", "about")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    spec: NamespaceSpec
    about: int
    def __init__(self, spec: _Optional[_Union[NamespaceSpec, _Mapping]] = ..., about: _Optional[int] = ...) -> None: ...

class NamespaceOpened(_message.Message):
    __slots__ = ("namespace_id", "fingerprint", "epoch", "about", "slot_bytes", "slot_count_max", "wants_token_ids", "segment_shard_bytes")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_COUNT_MAX_FIELD_NUMBER: _ClassVar[int]
    WANTS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_SHARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    fingerprint: bytes
    epoch: int
    about: int
    slot_bytes: int
    slot_count_max: int
    wants_token_ids: bool
    segment_shard_bytes: int
    def __init__(self, namespace_id: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., epoch: _Optional[int] = ..., about: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., slot_count_max: _Optional[int] = ..., wants_token_ids: bool = ..., segment_shard_bytes: _Optional[int] = ...) -> None: ...

class SlabOffered(_message.Message):
    __slots__ = ("namespace_id", "shard", "slab_id", "slot_first", "slot_count", "slot_bytes", "slab_bytes", "page_kind")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SLAB_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIRST_FIELD_NUMBER: _ClassVar[int]
    SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLAB_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGE_KIND_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    shard: int
    slab_id: int
    slot_first: int
    slot_count: int
    slot_bytes: int
    slab_bytes: int
    page_kind: str
    def __init__(self, namespace_id: _Optional[int] = ..., shard: _Optional[int] = ..., slab_id: _Optional[int] = ..., slot_first: _Optional[int] = ..., slot_count: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., slab_bytes: _Optional[int] = ..., page_kind: _Optional[str] = ...) -> None: ...

class SlabMapped(_message.Message):
    __slots__ = ("slab_id", "shard")
    SLAB_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    slab_id: int
    shard: int
    def __init__(self, slab_id: _Optional[int] = ..., shard: _Optional[int] = ...) -> None: ...

class SlabWithdrawn(_message.Message):
    __slots__ = ("namespace_id", "shard", "slab_id")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SLAB_ID_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    shard: int
    slab_id: int
    def __init__(self, namespace_id: _Optional[int] = ..., shard: _Optional[int] = ..., slab_id: _Optional[int] = ...) -> None: ...

class SlabUnmapped(_message.Message):
    __slots__ = ("slab_id", "shard")
    SLAB_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    slab_id: int
    shard: int
    def __init__(self, slab_id: _Optional[int] = ..., shard: _Optional[int] = ...) -> None: ...

class SegmentOffered(_message.Message):
    __slots__ = ("segment", "offset", "length", "row_count_max")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_MAX_FIELD_NUMBER: _ClassVar[int]
    segment: int
    offset: int
    length: int
    row_count_max: int
    def __init__(self, segment: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., row_count_max: _Optional[int] = ...) -> None: ...

class SegmentMapped(_message.Message):
    __slots__ = ("segment", "refused")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    segment: int
    refused: str
    def __init__(self, segment: _Optional[int] = ..., refused: _Optional[str] = ...) -> None: ...

class SlotsRecalled(_message.Message):
    __slots__ = ("namespace_id", "count")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    count: int
    def __init__(self, namespace_id: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class QuietRequested(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    def __init__(self, session_id: _Optional[int] = ...) -> None: ...

class Quiet(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    def __init__(self, session_id: _Optional[int] = ...) -> None: ...

class SessionQuietAck(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    def __init__(self, session_id: _Optional[int] = ...) -> None: ...

class Bye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionError(_message.Message):
    __slots__ = ("name", "message", "about")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    message: str
    about: int
    def __init__(self, name: _Optional[str] = ..., message: _Optional[str] = ..., about: _Optional[int] = ...) -> None: ...

class GreetRequest(_message.Message):
    __slots__ = ("protocol", "client_version", "spec")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    client_version: str
    spec: NamespaceSpec
    def __init__(self, protocol: _Optional[int] = ..., client_version: _Optional[str] = ..., spec: _Optional[_Union[NamespaceSpec, _Mapping]] = ...) -> None: ...

class GreetResponse(_message.Message):
    __slots__ = ("protocol", "daemon_version", "token", "generation", "namespace_id", "fingerprint", "epoch")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    DAEMON_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    daemon_version: str
    token: bytes
    generation: int
    namespace_id: int
    fingerprint: bytes
    epoch: int
    def __init__(self, protocol: _Optional[int] = ..., daemon_version: _Optional[str] = ..., token: _Optional[bytes] = ..., generation: _Optional[int] = ..., namespace_id: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., epoch: _Optional[int] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("token", "namespace_id", "hashes", "request_id")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    namespace_id: int
    hashes: bytes
    request_id: str
    def __init__(self, token: _Optional[bytes] = ..., namespace_id: _Optional[int] = ..., hashes: _Optional[bytes] = ..., request_id: _Optional[str] = ...) -> None: ...

class MatchResponse(_message.Message):
    __slots__ = ("matched_count", "memory_count", "tiers", "epoch", "daemon_us", "presence")
    MATCHED_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_COUNT_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DAEMON_US_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_FIELD_NUMBER: _ClassVar[int]
    matched_count: int
    memory_count: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierCount]
    epoch: int
    daemon_us: int
    presence: bytes
    def __init__(self, matched_count: _Optional[int] = ..., memory_count: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierCount, _Mapping]]] = ..., epoch: _Optional[int] = ..., daemon_us: _Optional[int] = ..., presence: _Optional[bytes] = ...) -> None: ...

class TierCount(_message.Message):
    __slots__ = ("tier", "count")
    TIER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    tier: str
    count: int
    def __init__(self, tier: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("token", "namespace_id", "hashes", "deadline_ns", "wait_ms", "skip_count", "request_id")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_NS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    SKIP_COUNT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    namespace_id: int
    hashes: bytes
    deadline_ns: int
    wait_ms: int
    skip_count: int
    request_id: str
    def __init__(self, token: _Optional[bytes] = ..., namespace_id: _Optional[int] = ..., hashes: _Optional[bytes] = ..., deadline_ns: _Optional[int] = ..., wait_ms: _Optional[int] = ..., skip_count: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class AcquireResponse(_message.Message):
    __slots__ = ("pending", "ready")
    PENDING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    pending: AcquirePending
    ready: AcquireReady
    def __init__(self, pending: _Optional[_Union[AcquirePending, _Mapping]] = ..., ready: _Optional[_Union[AcquireReady, _Mapping]] = ...) -> None: ...

class AcquirePending(_message.Message):
    __slots__ = ("matched_count", "memory_count", "lease_id")
    MATCHED_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    matched_count: int
    memory_count: int
    lease_id: int
    def __init__(self, matched_count: _Optional[int] = ..., memory_count: _Optional[int] = ..., lease_id: _Optional[int] = ...) -> None: ...

class AcquireReady(_message.Message):
    __slots__ = ("lease_id", "leased_count", "slots", "deadline_ns", "cut", "epoch", "tiers", "slot_tiers")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASED_COUNT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_NS_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SLOT_TIERS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    leased_count: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    deadline_ns: int
    cut: Cut
    epoch: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierCount]
    slot_tiers: bytes
    def __init__(self, lease_id: _Optional[int] = ..., leased_count: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., deadline_ns: _Optional[int] = ..., cut: _Optional[_Union[Cut, str]] = ..., epoch: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierCount, _Mapping]]] = ..., slot_tiers: _Optional[bytes] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("token", "lease_ids", "prefill_seconds", "onboard_seconds")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ONBOARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    prefill_seconds: float
    onboard_seconds: float
    def __init__(self, token: _Optional[bytes] = ..., lease_ids: _Optional[_Iterable[int]] = ..., prefill_seconds: _Optional[float] = ..., onboard_seconds: _Optional[float] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("ended_count",)
    ENDED_COUNT_FIELD_NUMBER: _ClassVar[int]
    ended_count: int
    def __init__(self, ended_count: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("token", "namespace_id", "count")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    namespace_id: int
    count: int
    def __init__(self, token: _Optional[bytes] = ..., namespace_id: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("slots", "epoch", "stock_count_max")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STOCK_COUNT_MAX_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    epoch: int
    stock_count_max: int
    def __init__(self, slots: _Optional[_Iterable[int]] = ..., epoch: _Optional[int] = ..., stock_count_max: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("token", "namespace_id", "hashes", "slots", "parent", "checksums", "token_ids", "epoch")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    namespace_id: int
    hashes: bytes
    slots: _containers.RepeatedScalarFieldContainer[int]
    parent: bytes
    checksums: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    epoch: int
    def __init__(self, token: _Optional[bytes] = ..., namespace_id: _Optional[int] = ..., hashes: _Optional[bytes] = ..., slots: _Optional[_Iterable[int]] = ..., parent: _Optional[bytes] = ..., checksums: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., epoch: _Optional[int] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("outcomes", "epoch")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    epoch: int
    def __init__(self, outcomes: _Optional[bytes] = ..., epoch: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("token", "namespace_id", "slots")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    namespace_id: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token: _Optional[bytes] = ..., namespace_id: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("freed_count",)
    FREED_COUNT_FIELD_NUMBER: _ClassVar[int]
    freed_count: int
    def __init__(self, freed_count: _Optional[int] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("token", "namespace_id", "hashes")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    namespace_id: int
    hashes: bytes
    def __init__(self, token: _Optional[bytes] = ..., namespace_id: _Optional[int] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ("memory_count", "promoting_count")
    MEMORY_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROMOTING_COUNT_FIELD_NUMBER: _ClassVar[int]
    memory_count: int
    promoting_count: int
    def __init__(self, memory_count: _Optional[int] = ..., promoting_count: _Optional[int] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("token", "namespace_id", "parent", "hash", "offset", "data")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    namespace_id: int
    parent: bytes
    hash: bytes
    offset: int
    data: bytes
    def __init__(self, token: _Optional[bytes] = ..., namespace_id: _Optional[int] = ..., parent: _Optional[bytes] = ..., hash: _Optional[bytes] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("ready_count", "present_count", "refused_count")
    READY_COUNT_FIELD_NUMBER: _ClassVar[int]
    PRESENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_COUNT_FIELD_NUMBER: _ClassVar[int]
    ready_count: int
    present_count: int
    refused_count: int
    def __init__(self, ready_count: _Optional[int] = ..., present_count: _Optional[int] = ..., refused_count: _Optional[int] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("token", "namespace_id", "hashes")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    namespace_id: int
    hashes: bytes
    def __init__(self, token: _Optional[bytes] = ..., namespace_id: _Optional[int] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("index", "offset", "data", "checksum")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    index: int
    offset: int
    data: bytes
    checksum: int
    def __init__(self, index: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class HintRequest(_message.Message):
    __slots__ = ("token", "namespace_id", "hashes", "session_end", "paused_ms", "turn_kind")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    SESSION_END_FIELD_NUMBER: _ClassVar[int]
    PAUSED_MS_FIELD_NUMBER: _ClassVar[int]
    TURN_KIND_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    namespace_id: int
    hashes: bytes
    session_end: bool
    paused_ms: int
    turn_kind: str
    def __init__(self, token: _Optional[bytes] = ..., namespace_id: _Optional[int] = ..., hashes: _Optional[bytes] = ..., session_end: bool = ..., paused_ms: _Optional[int] = ..., turn_kind: _Optional[str] = ...) -> None: ...

class HintResponse(_message.Message):
    __slots__ = ("used",)
    USED_FIELD_NUMBER: _ClassVar[int]
    used: bool
    def __init__(self, used: bool = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("token", "namespace_id", "hashes")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    namespace_id: int
    hashes: bytes
    def __init__(self, token: _Optional[bytes] = ..., namespace_id: _Optional[int] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("evicted_count", "kept_count")
    EVICTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    KEPT_COUNT_FIELD_NUMBER: _ClassVar[int]
    evicted_count: int
    kept_count: int
    def __init__(self, evicted_count: _Optional[int] = ..., kept_count: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("token", "namespace_id", "hashes", "hold_ms")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    HOLD_MS_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    namespace_id: int
    hashes: bytes
    hold_ms: int
    def __init__(self, token: _Optional[bytes] = ..., namespace_id: _Optional[int] = ..., hashes: _Optional[bytes] = ..., hold_ms: _Optional[int] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("lease_id", "pinned_count", "cut")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    PINNED_COUNT_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    pinned_count: int
    cut: Cut
    def __init__(self, lease_id: _Optional[int] = ..., pinned_count: _Optional[int] = ..., cut: _Optional[_Union[Cut, str]] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("token", "namespace_id")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    namespace_id: int
    def __init__(self, token: _Optional[bytes] = ..., namespace_id: _Optional[int] = ...) -> None: ...

class ClearResponse(_message.Message):
    __slots__ = ("epoch", "voided_count")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VOIDED_COUNT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    voided_count: int
    def __init__(self, epoch: _Optional[int] = ..., voided_count: _Optional[int] = ...) -> None: ...

class PurgeRequest(_message.Message):
    __slots__ = ("token", "tenant", "namespace_id", "fingerprint", "purge")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PURGE_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    tenant: str
    namespace_id: int
    fingerprint: bytes
    purge: str
    def __init__(self, token: _Optional[bytes] = ..., tenant: _Optional[str] = ..., namespace_id: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., purge: _Optional[str] = ...) -> None: ...

class PurgeResponse(_message.Message):
    __slots__ = ("purge", "state", "step", "waits", "done_bytes", "report")
    PURGE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    purge: str
    state: str
    step: str
    waits: str
    done_bytes: int
    report: str
    def __init__(self, purge: _Optional[str] = ..., state: _Optional[str] = ..., step: _Optional[str] = ..., waits: _Optional[str] = ..., done_bytes: _Optional[int] = ..., report: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("token", "resume")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    resume: bool
    def __init__(self, token: _Optional[bytes] = ..., resume: bool = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("draining", "lease_count", "reserved_count")
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LEASE_COUNT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_COUNT_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    lease_count: int
    reserved_count: int
    def __init__(self, draining: bool = ..., lease_count: _Optional[int] = ..., reserved_count: _Optional[int] = ...) -> None: ...

class CheckRequest(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    def __init__(self, token: _Optional[bytes] = ...) -> None: ...

class CheckResponse(_message.Message):
    __slots__ = ("violations", "block_count", "check_us")
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    CHECK_US_FIELD_NUMBER: _ClassVar[int]
    violations: _containers.RepeatedScalarFieldContainer[str]
    block_count: int
    check_us: int
    def __init__(self, violations: _Optional[_Iterable[str]] = ..., block_count: _Optional[int] = ..., check_us: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("token", "hash", "request_id")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    hash: bytes
    request_id: str
    def __init__(self, token: _Optional[bytes] = ..., hash: _Optional[bytes] = ..., request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("places", "requests", "happenings", "tiers", "uptime_seconds", "remembered_seconds", "draining")
    PLACES_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HAPPENINGS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REMEMBERED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    places: _containers.RepeatedCompositeFieldContainer[PrefixPlace]
    requests: _containers.RepeatedCompositeFieldContainer[RequestSeen]
    happenings: _containers.RepeatedCompositeFieldContainer[Happening]
    tiers: _containers.RepeatedCompositeFieldContainer[TierCondition]
    uptime_seconds: float
    remembered_seconds: float
    draining: bool
    def __init__(self, places: _Optional[_Iterable[_Union[PrefixPlace, _Mapping]]] = ..., requests: _Optional[_Iterable[_Union[RequestSeen, _Mapping]]] = ..., happenings: _Optional[_Iterable[_Union[Happening, _Mapping]]] = ..., tiers: _Optional[_Iterable[_Union[TierCondition, _Mapping]]] = ..., uptime_seconds: _Optional[float] = ..., remembered_seconds: _Optional[float] = ..., draining: bool = ...) -> None: ...

class PrefixPlace(_message.Message):
    __slots__ = ("namespace_id", "model", "fingerprint", "block_count", "cut_off", "runs", "events", "twins")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    CUT_OFF_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    TWINS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    model: str
    fingerprint: bytes
    block_count: int
    cut_off: bool
    runs: _containers.RepeatedCompositeFieldContainer[PrefixRun]
    events: _containers.RepeatedCompositeFieldContainer[BlockEvent]
    twins: _containers.RepeatedCompositeFieldContainer[NamespaceTwin]
    def __init__(self, namespace_id: _Optional[int] = ..., model: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., block_count: _Optional[int] = ..., cut_off: bool = ..., runs: _Optional[_Iterable[_Union[PrefixRun, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[BlockEvent, _Mapping]]] = ..., twins: _Optional[_Iterable[_Union[NamespaceTwin, _Mapping]]] = ...) -> None: ...

class PrefixRun(_message.Message):
    __slots__ = ("first_index", "block_count", "tiers", "last")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    block_count: int
    tiers: _containers.RepeatedScalarFieldContainer[str]
    last: BlockEvent
    def __init__(self, first_index: _Optional[int] = ..., block_count: _Optional[int] = ..., tiers: _Optional[_Iterable[str]] = ..., last: _Optional[_Union[BlockEvent, _Mapping]] = ...) -> None: ...

class BlockEvent(_message.Message):
    __slots__ = ("what", "why", "tier", "seconds_ago")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_AGO_FIELD_NUMBER: _ClassVar[int]
    what: str
    why: str
    tier: str
    seconds_ago: float
    def __init__(self, what: _Optional[str] = ..., why: _Optional[str] = ..., tier: _Optional[str] = ..., seconds_ago: _Optional[float] = ...) -> None: ...

class RequestSeen(_message.Message):
    __slots__ = ("request_id", "call", "seconds_ago", "seconds", "session_id", "session_name", "namespace_id", "model", "asked_count", "found_count", "tiers", "cut", "missed_hash", "runs", "twins")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    SECONDS_AGO_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ASKED_COUNT_FIELD_NUMBER: _ClassVar[int]
    FOUND_COUNT_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    MISSED_HASH_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    TWINS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    call: str
    seconds_ago: float
    seconds: float
    session_id: int
    session_name: str
    namespace_id: int
    model: str
    asked_count: int
    found_count: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierCount]
    cut: Cut
    missed_hash: bytes
    runs: _containers.RepeatedCompositeFieldContainer[PrefixRun]
    twins: _containers.RepeatedCompositeFieldContainer[NamespaceTwin]
    def __init__(self, request_id: _Optional[str] = ..., call: _Optional[str] = ..., seconds_ago: _Optional[float] = ..., seconds: _Optional[float] = ..., session_id: _Optional[int] = ..., session_name: _Optional[str] = ..., namespace_id: _Optional[int] = ..., model: _Optional[str] = ..., asked_count: _Optional[int] = ..., found_count: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierCount, _Mapping]]] = ..., cut: _Optional[_Union[Cut, str]] = ..., missed_hash: _Optional[bytes] = ..., runs: _Optional[_Iterable[_Union[PrefixRun, _Mapping]]] = ..., twins: _Optional[_Iterable[_Union[NamespaceTwin, _Mapping]]] = ...) -> None: ...

class NamespaceTwin(_message.Message):
    __slots__ = ("namespace_id", "model", "has_block", "facts")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    HAS_BLOCK_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    model: str
    has_block: bool
    facts: _containers.RepeatedCompositeFieldContainer[FactDifference]
    def __init__(self, namespace_id: _Optional[int] = ..., model: _Optional[str] = ..., has_block: bool = ..., facts: _Optional[_Iterable[_Union[FactDifference, _Mapping]]] = ...) -> None: ...

class FactDifference(_message.Message):
    __slots__ = ("name", "here", "there")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HERE_FIELD_NUMBER: _ClassVar[int]
    THERE_FIELD_NUMBER: _ClassVar[int]
    name: str
    here: str
    there: str
    def __init__(self, name: _Optional[str] = ..., here: _Optional[str] = ..., there: _Optional[str] = ...) -> None: ...

class Happening(_message.Message):
    __slots__ = ("what", "seconds_ago", "namespace_id", "detail")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_AGO_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    what: str
    seconds_ago: float
    namespace_id: int
    detail: str
    def __init__(self, what: _Optional[str] = ..., seconds_ago: _Optional[float] = ..., namespace_id: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class TierCondition(_message.Message):
    __slots__ = ("tier", "state")
    TIER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    tier: str
    state: str
    def __init__(self, tier: _Optional[str] = ..., state: _Optional[str] = ...) -> None: ...

class SlowCall(_message.Message):
    __slots__ = ("call", "seconds_ago", "seconds", "request_id", "block_count", "outcome", "session_id")
    CALL_FIELD_NUMBER: _ClassVar[int]
    SECONDS_AGO_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    call: str
    seconds_ago: float
    seconds: float
    request_id: str
    block_count: int
    outcome: str
    session_id: int
    def __init__(self, call: _Optional[str] = ..., seconds_ago: _Optional[float] = ..., seconds: _Optional[float] = ..., request_id: _Optional[str] = ..., block_count: _Optional[int] = ..., outcome: _Optional[str] = ..., session_id: _Optional[int] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("token", "namespace_id", "row_first")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    ROW_FIRST_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    namespace_id: int
    row_first: int
    def __init__(self, token: _Optional[bytes] = ..., namespace_id: _Optional[int] = ..., row_first: _Optional[int] = ...) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("hashes", "tiers", "row_next")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    ROW_NEXT_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    tiers: bytes
    row_next: int
    def __init__(self, hashes: _Optional[bytes] = ..., tiers: _Optional[bytes] = ..., row_next: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    def __init__(self, token: _Optional[bytes] = ...) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("daemon_version", "protocol", "generation", "uptime_seconds", "draining", "tiers", "namespaces", "sessions", "counters", "slow_calls")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    DAEMON_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    SLOW_CALLS_FIELD_NUMBER: _ClassVar[int]
    daemon_version: str
    protocol: int
    generation: int
    uptime_seconds: float
    draining: bool
    tiers: _containers.RepeatedCompositeFieldContainer[TierStats]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStats]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStats]
    counters: _containers.ScalarMap[str, float]
    slow_calls: _containers.RepeatedCompositeFieldContainer[SlowCall]
    def __init__(self, daemon_version: _Optional[str] = ..., protocol: _Optional[int] = ..., generation: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., draining: bool = ..., tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceStats, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionStats, _Mapping]]] = ..., counters: _Optional[_Mapping[str, float]] = ..., slow_calls: _Optional[_Iterable[_Union[SlowCall, _Mapping]]] = ...) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("tier", "budget_bytes", "populated_bytes", "slot_count", "free_count", "ready_count", "reserved_count", "quarantined_count", "pinned_count", "page_kind", "memory", "held_count")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    POPULATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    FREE_COUNT_FIELD_NUMBER: _ClassVar[int]
    READY_COUNT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_COUNT_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_COUNT_FIELD_NUMBER: _ClassVar[int]
    PINNED_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAGE_KIND_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    HELD_COUNT_FIELD_NUMBER: _ClassVar[int]
    tier: str
    budget_bytes: int
    populated_bytes: int
    slot_count: int
    free_count: int
    ready_count: int
    reserved_count: int
    quarantined_count: int
    pinned_count: int
    page_kind: str
    memory: str
    held_count: int
    def __init__(self, tier: _Optional[str] = ..., budget_bytes: _Optional[int] = ..., populated_bytes: _Optional[int] = ..., slot_count: _Optional[int] = ..., free_count: _Optional[int] = ..., ready_count: _Optional[int] = ..., reserved_count: _Optional[int] = ..., quarantined_count: _Optional[int] = ..., pinned_count: _Optional[int] = ..., page_kind: _Optional[str] = ..., memory: _Optional[str] = ..., held_count: _Optional[int] = ...) -> None: ...

class NamespaceStats(_message.Message):
    __slots__ = ("namespace_id", "model", "fingerprint", "epoch", "block_count", "block_bytes", "slot_count", "free_count", "salt", "tenant")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    FREE_COUNT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    model: str
    fingerprint: bytes
    epoch: int
    block_count: int
    block_bytes: int
    slot_count: int
    free_count: int
    salt: str
    tenant: str
    def __init__(self, namespace_id: _Optional[int] = ..., model: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., epoch: _Optional[int] = ..., block_count: _Optional[int] = ..., block_bytes: _Optional[int] = ..., slot_count: _Optional[int] = ..., free_count: _Optional[int] = ..., salt: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class SessionStats(_message.Message):
    __slots__ = ("session_id", "name", "role", "state", "reserved_count", "lease_count", "engine_id", "by_value")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RESERVED_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEASE_COUNT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    BY_VALUE_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    name: str
    role: str
    state: str
    reserved_count: int
    lease_count: int
    engine_id: bytes
    by_value: bool
    def __init__(self, session_id: _Optional[int] = ..., name: _Optional[str] = ..., role: _Optional[str] = ..., state: _Optional[str] = ..., reserved_count: _Optional[int] = ..., lease_count: _Optional[int] = ..., engine_id: _Optional[bytes] = ..., by_value: bool = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("token", "namespace_id")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    namespace_id: int
    def __init__(self, token: _Optional[bytes] = ..., namespace_id: _Optional[int] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("stored", "removed", "cleared", "lost", "sequence")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    stored: BlocksStored
    removed: BlocksRemoved
    cleared: NamespaceCleared
    lost: EventsLost
    sequence: int
    def __init__(self, stored: _Optional[_Union[BlocksStored, _Mapping]] = ..., removed: _Optional[_Union[BlocksRemoved, _Mapping]] = ..., cleared: _Optional[_Union[NamespaceCleared, _Mapping]] = ..., lost: _Optional[_Union[EventsLost, _Mapping]] = ..., sequence: _Optional[int] = ...) -> None: ...

class BlocksStored(_message.Message):
    __slots__ = ("hashes", "parent", "tier", "token_ids")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    parent: bytes
    tier: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, hashes: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., tier: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class BlocksRemoved(_message.Message):
    __slots__ = ("hashes", "tier")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    tier: str
    def __init__(self, hashes: _Optional[bytes] = ..., tier: _Optional[str] = ...) -> None: ...

class NamespaceCleared(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class EventsLost(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...
