"""`[kv_events]`: where the daemon tells routers which blocks it has, in vLLM's wire form."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.config_address import ListenAddress, split_address
from kvtier.config_values import (
    Choice,
    Count,
    Names,
    PathValue,
    Size,
    Switch,
    Text,
    option,
)
from kvtier.errors import ConfigError

MIB = 1 << 20
CHARS_MAX = 256
BIND_FORMS = '"tcp://127.0.0.1:5557" or "ipc:///run/kvtier/kv-events"'
TOPIC_FIELDS = ("node", "model", "tenant")


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """KV cache events as vLLM publishes them (ZMQ, msgpack), for routers and indexers; see
    vllm.md. Off unless `bind` or `connect` is set."""

    bind: str = option(
        "",
        Text(CHARS_MAX),
        'Where subscribers connect: "tcp://127.0.0.1:5557" (loopback only) or '
        '"ipc:///run/kvtier/kv-events". Empty: nowhere.',
    )
    connect: str = option(
        "",
        Text(CHARS_MAX),
        'A subscriber that is connected to, as "tcp://indexer:5557", or several with commas '
        "between them. Hashes travel in the clear, and prompts with them if token_ids is true.",
    )
    replay_bind: str = option(
        "", Text(CHARS_MAX), "Where a subscriber asks for batches that it has missed; as bind."
    )
    topic: str = option(
        "kv@{node}@{model}",
        Text(CHARS_MAX),
        "Topic of a model's events. {node}, {model} and {tenant} are put in.",
    )
    tenants: tuple[str, ...] = option(
        (),
        Names("tenants"),
        "Tenants whose blocks are told of, * among them for shared namespaces: whoever reads the "
        "events learns of all of these. []: that of server.socket.",
    )
    node: str = option("", Text(CHARS_MAX), "What {node} is. Empty: the name of the host.")
    token_ids: bool = option(
        True,
        Switch(),
        "Engines are asked for the token ids of what they offload, so that a router can work out "
        "the hashes itself. Whoever reads the events then reads the prompts.",
    )
    hash_form: str = option(
        "bytes",
        Choice("bytes", "int64"),
        "How a hash is written: as it is, or as the number in its last 8 bytes "
        "(VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES of the engines).",
    )
    buffer_bytes: int = option(
        64 * MIB, Size(MIB, 1 << 34), "Batches kept for replay; the oldest go first."
    )
    queue_blocks_max: int = option(
        262_144,
        Count(1024, 1 << 24),
        "Blocks in events that wait to be sent. Beyond it events are dropped, and when there is "
        "room again everything that is there is announced anew.",
    )

    @property
    def is_set(self) -> bool:
        return bool(self.bind or self.connect)


def connections(config: EventsConfig) -> tuple[str, ...]:
    """The subscribers that are connected to."""
    return tuple(one.strip() for one in config.connect.split(",") if one.strip())


def check_events(config: EventsConfig) -> None:
    """What no single option can say; raises ConfigError."""
    for name in ("bind", "replay_bind"):
        _check_bind(f"kv_events.{name}", getattr(config, name))
    for endpoint in connections(config):
        if not endpoint.startswith(("tcp://", "ipc://")) or "*" in endpoint:
            raise ConfigError(f'kv_events.connect has {endpoint!r}: write "tcp://HOST:PORT"')
        if endpoint.startswith("tcp://"):
            split_address("kv_events.connect", endpoint.removeprefix("tcp://"))
    if config.replay_bind and not config.is_set:
        raise ConfigError("kv_events.replay_bind is set, but neither bind nor connect is")
    if config.replay_bind and config.replay_bind == config.bind:
        raise ConfigError("kv_events.bind and kv_events.replay_bind are one place: choose two")
    try:
        config.topic.format(node="", model="", tenant="")
    except (KeyError, IndexError, ValueError, AttributeError):
        raise ConfigError(
            f"kv_events.topic is {config.topic!r}: in braces it may have "
            f"{', '.join(TOPIC_FIELDS)} only"
        ) from None


def _check_bind(name: str, endpoint: str) -> None:
    if not endpoint:
        return
    if endpoint.startswith("ipc://"):
        PathValue().check(name, endpoint.removeprefix("ipc://"))
        return
    if not endpoint.startswith("tcp://"):
        raise ConfigError(f"{name} is {endpoint!r}: write {BIND_FORMS}")
    ListenAddress(is_loopback_only=True).check(name, endpoint.removeprefix("tcp://"))
