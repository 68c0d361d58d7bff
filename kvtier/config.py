"""Options of the daemon: TOML -> frozen dataclasses; the only place that validates them.

Owns every option's name, meaning, default and bounds. Each mistake becomes a `ConfigError` of one
line that names the option and what it may be. `python -m kvtier.config` prints
docs/configuration.md.
"""

from __future__ import annotations

import inspect
import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import cast

from kvtier.config_address import ListenAddress
from kvtier.config_cxl import CxlConfig, check_cxl
from kvtier.config_events import EventsConfig, check_events
from kvtier.config_grpc import GrpcConfig, check_grpc
from kvtier.config_recorder import RecorderConfig
from kvtier.config_remote import RemoteConfig, check_remote
from kvtier.config_restart import RestartConfig, check_restart
from kvtier.config_tenant import SHARED, TenantConfig, certificate_lists, check_tenants
from kvtier.config_values import (
    AUTO,
    AdmissionRule,
    Choice,
    Count,
    Fraction,
    Kind,
    NodeNumbers,
    Paths,
    PathValue,
    Seconds,
    Size,
    Text,
    option,
)
from kvtier.errors import ConfigError

TENANT = "tenant"
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Sockets, state and the bounds on what clients may hold."""

    socket: str = option(
        "",
        PathValue(),
        "Session socket. Empty: $KVTIER_SOCKET, else /run/kvtier/kvtier.sock for root, else "
        "below $XDG_RUNTIME_DIR or ~/.kvtier. The gRPC socket stands beside it.",
    )
    state_dir: str = option(
        "",
        PathValue(),
        "Lock and durable epochs. Empty: $STATE_DIRECTORY, else /var/lib/kvtier for root, "
        "else ~/.kvtier/state.",
    )
    tenant: str = option("", Text(256), "Tenant of everyone who connects to this socket.")
    drain_seconds: float = option(
        10.0,
        Seconds(0.0, 3600.0),
        "How long SIGTERM waits for leases and reservations to end before the daemon exits.",
    )
    hello_seconds: float = option(
        5.0, Seconds(0.1, 60.0), "How long a new connection may take to say Hello."
    )
    sessions_max: int = option(
        256,
        Count(1, 4096),
        "Sessions of a tenant at once, lost ones included until their process is proven dead. "
        "Each holds two file descriptors.",
    )
    namespaces_max: int = option(
        256, Count(1, 4096), "Namespaces of a tenant in one life of the daemon."
    )
    watchers_max: int = option(32, Count(1, 1024), "Watch calls of a tenant at once.")
    watch_events_max: int = option(
        1024,
        Count(16, 65536),
        "Events a slow watcher may be behind before it loses some and is told so.",
    )
    puts_max: int = option(
        8, Count(1, 256), "Put and Get calls of a tenant at once: each holds slots for its client."
    )


@dataclass(frozen=True, slots=True)
class DramConfig:
    """The DRAM tier."""

    bytes: int = option(
        AUTO,
        Size(2 * MIB, 64 << 40, auto=True),
        "Memory for blocks. auto: a quarter of the available memory (the cgroup's limit "
        "counts), at most 64 GiB.",
    )
    slab_bytes: int = option(
        AUTO,
        Size(2 * MIB, GIB, auto=True),
        "Size of one slab, a multiple of 2 MiB. auto: a sixteenth of the budget, between "
        "16 MiB (or the whole budget) and 1 GiB. A namespace takes whole slabs, one a shard.",
    )
    nodes: tuple[int, ...] = option(
        (),
        NodeNumbers(),
        "NUMA nodes that slabs must lie on, as many on each: those that GPUs hang on, as "
        "`kvtier probe` names them. A worker's blocks go to the node of its GPU first. []: "
        "wherever the kernel finds memory.",
    )
    populate_threads: int = option(
        2, Count(1, 64), "Threads that populate slabs in the background."
    )
    watermark_start: float = option(
        1.0,
        Fraction(0.05, 1.0),
        "Share of a namespace's slots in use above which eviction starts.",
    )
    watermark_stop: float = option(
        0.98, Fraction(0.0, 1.0), "Share of a namespace's slots at which eviction stops."
    )
    policy: str = option(
        "lru",
        Text(64),
        "Eviction policy. lru: what was used longest ago goes first, a chain's tail before its "
        "head. curves: what is worth least by how blocks of its kind were used so far; see "
        "docs/policies.md. arc: to compare with. Or one that an installed package offers under "
        "this name, as entry point in the group kvtier.eviction.",
    )


@dataclass(frozen=True, slots=True)
class NvmeConfig:
    """The NVMe tier: files or block devices that `kvtier format` has made one pool of."""

    paths: tuple[str, ...] = option(
        (),
        Paths(64),
        "All paths of the pool, in any order; one that is missing, or of another pool, is "
        "refused. Empty: no NVMe tier. With --set: commas between them.",
    )
    bytes: int = option(
        AUTO,
        Size(512 * MIB, 1 << 50, auto=True),
        "Size of each path, with which files that do not exist yet are made and formatted at the "
        "start; a pool that exists keeps its size. auto: nothing is made, see `kvtier format`. "
        "Devices, and files that hold something, are never formatted by the daemon.",
    )
    depth: int = option(
        8, Count(1, 64), "Reads and writes under way at once on each path; one thread each."
    )
    table_seconds: float = option(
        0.5,
        Seconds(0.05, 1.0),
        "How often changes of the slot table are written. What went down since the last time is "
        "lost when the daemon is killed.",
    )
    write_bytes_per_hour: int = option(
        AUTO,
        Size(MIB, 1 << 50, auto=True),
        "Blocks written down in an hour, on average: what nobody has used twice takes what is "
        "left of it. auto: the whole pool once a day.",
    )
    admission: str = option(
        "forecast",
        AdmissionRule(),
        "Of blocks used once, what is written down. forecast (with dram.policy curves, else as "
        "all): what is likely to be used again, the likelier the less is left of "
        "write_bytes_per_hour. all: while half of an hour's bytes is left. reused: nothing.",
    )
    endurance_bytes_per_day: int = option(
        AUTO,
        Size(MIB, 1 << 50, auto=True),
        "What the disks may be written in a day for the years that they shall last; only metrics "
        "compare with it. auto: the whole pool once.",
    )
    key_file: str = option(
        "",
        Text(4096),
        "File of keys, made with `kvtier key FILE`: blocks, and what the slot table says of them, "
        "are encrypted and authenticated (AES-256-GCM); what was written without, or with a key "
        "that is not in the file any more, is a miss. Empty: not encrypted.",
    )


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """Leases and quarantine: how long an engine may hold what."""

    seconds_max: float = option(60.0, Seconds(1.0, 3600.0), "Longest lease.")
    wait_seconds_max: float = option(
        10.0,
        Seconds(0.0, 3600.0),
        "Longest wait of a lease for blocks that are being promoted; who asks for more gets this.",
    )
    margin_seconds: float = option(
        5.0,
        Seconds(0.1, 60.0),
        "What is leased is reused this long after the deadline. Also the most a handshake "
        "may take for the clocks to count as compared.",
    )
    per_session_max: int = option(256, Count(1, 65536), "Leases a session may hold.")
    grace_seconds: float = option(
        1.0,
        Seconds(0.0, 60.0),
        "Slots of a dead engine are withheld this long: DMA that was under way ends.",
    )


@dataclass(frozen=True, slots=True)
class AdminConfig:
    """HTTP for people and Prometheus: a status page, /metrics and /healthz."""

    address: str = option(
        "127.0.0.1:9464",
        ListenAddress(is_loopback_only=True),
        'Loopback address (port 0: any free port), or "off".',
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Log lines on standard error, and what is remembered beside them."""

    format: str = option("text", Choice("text", "json"), "Form of a log line.")
    level: str = option("info", Choice("debug", "info", "warning", "error"), "Least level shown.")
    lines_max: int = option(
        50,
        Count(1, 100_000),
        "Lines of one event and tenant in ten seconds; what comes beyond is counted, and told as "
        "one line.",
    )
    slow_call_seconds: float = option(
        0.5,
        Seconds(0.0, 3600.0),
        "A call that takes longer has a line, and a place among the last slow calls that "
        "`kvtier top` shows; not so Stats, and what goes at its client's pace: Watch, Put, Get.",
    )
    history_bytes: int = option(
        8 * MIB,
        Size(64 << 10, GIB),
        "What `kvtier explain` may remember: 20 bytes for a block that was removed or missed, and "
        "some 700 bytes and its first 64 KiB of hashes for a request.",
    )


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that can be set; sections are TOML tables."""

    server: ServerConfig = ServerConfig()
    dram: DramConfig = DramConfig()
    cxl: CxlConfig = CxlConfig()
    nvme: NvmeConfig = NvmeConfig()
    remote: RemoteConfig = RemoteConfig()
    kv_events: EventsConfig = EventsConfig()
    restart: RestartConfig = RestartConfig()
    recorder: RecorderConfig = RecorderConfig()
    lease: LeaseConfig = LeaseConfig()
    grpc: GrpcConfig = GrpcConfig()
    admin: AdminConfig = AdminConfig()
    log: LogConfig = LogConfig()
    tenant: Mapping[str, TenantConfig] = field(default_factory=dict)


Section = (
    ServerConfig
    | DramConfig
    | CxlConfig
    | NvmeConfig
    | RemoteConfig
    | EventsConfig
    | RestartConfig
    | RecorderConfig
    | LeaseConfig
    | GrpcConfig
    | AdminConfig
    | LogConfig
    | TenantConfig
)


def load(path: Path | None, overrides: Mapping[str, object] | None = None) -> Config:
    """Read `path` (defaults without one), then apply overrides such as {"dram.bytes": "4GiB"}."""
    tables = _read(path) if path is not None else {}
    config = parse(tables)
    for name, value in (overrides or {}).items():
        section, dot, key = name.partition(".")
        if not dot:
            raise ConfigError(f"{name!r} is no option: write SECTION.OPTION, such as dram.bytes")
        table: dict[str, object] = {key: value}
        if section == TENANT:
            tenant, dot, key = key.partition(".")
            table = {tenant: {key: value}}
        config = _merge(config, {section: table}, from_text=True)
    _check_together(config)
    return config


def parse(tables: Mapping[str, object]) -> Config:
    """Validate the tables of a TOML document; what they leave out keeps its default."""
    return _merge(Config(), tables, from_text=False)


def _read(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is no valid TOML: its values are nested too deep") from None


def _merge(config: Config, tables: Mapping[str, object], *, from_text: bool) -> Config:
    sections: dict[str, object] = {f.name: getattr(config, f.name) for f in fields(config)}
    for name, table in tables.items():
        if name not in sections:
            raise ConfigError(f"unknown section [{name}]{_did_you_mean(name, sections)}")
        if not isinstance(table, Mapping):
            raise ConfigError(f"{name} is a section: write it as a table [{name}]")
        if name == TENANT:
            sections[name] = _merge_tenants(config.tenant, table, from_text)
            continue
        section = cast(Section, sections[name])
        sections[name] = _merge_section(name, section, table, from_text)
    return replace(config, **sections)  # type: ignore[arg-type]  # Keys are the fields' own names.


def _merge_tenants(
    tenants: Mapping[str, TenantConfig], tables: Mapping[str, object], from_text: bool
) -> Mapping[str, TenantConfig]:
    merged = dict(tenants)
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise ConfigError(f"tenant.{name} is a tenant: write it as a table [tenant.{name}]")
        before = merged.get(name, TenantConfig())
        merged[name] = cast(
            TenantConfig, _merge_section(f"{TENANT}.{name}", before, table, from_text)
        )
    return merged


def _merge_section(
    name: str, section: Section, table: Mapping[str, object], from_text: bool
) -> Section:
    options = {f.name: f for f in fields(section)}
    values: dict[str, object] = {}
    for key, value in table.items():
        if key not in options:
            raise ConfigError(f"unknown option {name}.{key}{_did_you_mean(key, options)}")
        kind = option_kind(options[key])
        given = kind.from_text(value) if from_text and isinstance(value, str) else value
        values[key] = kind.check(f"{name}.{key}", given)
    return replace(section, **values)  # type: ignore[arg-type]  # Checked by their kinds.


def _check_together(config: Config) -> None:
    """What no single option can say."""
    dram = config.dram
    if dram.watermark_stop > dram.watermark_start:
        raise ConfigError(
            f"dram.watermark_stop is {dram.watermark_stop}: it may be at most "
            f"dram.watermark_start ({dram.watermark_start})"
        )
    if dram.slab_bytes != AUTO and dram.slab_bytes % (2 * MIB):
        raise ConfigError(f"dram.slab_bytes is {dram.slab_bytes}: it must be a multiple of 2 MiB")
    if AUTO not in (dram.bytes, dram.slab_bytes) and dram.slab_bytes > dram.bytes:
        raise ConfigError(
            f"dram.slab_bytes is {dram.slab_bytes}: it may be at most dram.bytes ({dram.bytes})"
        )
    check_cxl(config.cxl)
    check_remote(config.remote)
    check_events(config.kv_events)
    check_restart(config.restart)
    _check_tenants(config)
    real: dict[str, str] = {}
    for path in config.nvme.paths:
        place = os.path.realpath(Path(path).expanduser())
        if place in real:
            raise ConfigError(f"nvme.paths names one file twice: {real[place]} and {path}")
        real[place] = path


def _check_tenants(config: Config) -> None:
    check_tenants(config.tenant, config.server.tenant, config.server.socket)
    lists = certificate_lists(config.tenant)
    check_grpc(config.grpc, lists, has_tenants=bool(config.tenant))
    for name in config.kv_events.tenants:
        if name not in (*config.tenant, config.server.tenant, SHARED):
            raise ConfigError(f"kv_events.tenants names {name!r}: no [tenant.{name}] is there")
    if config.tenant and config.cxl.single_tenant:
        raise ConfigError("cxl.single_tenant is true, but there are tenants: leave it out")


def slab_bytes_for(budget_bytes: int) -> int:
    """`auto` slab size: a sixteenth of the budget, so that namespaces can share it."""
    wanted = max(budget_bytes // 16, min(16 * MIB, budget_bytes))
    return max(min(wanted, GIB) // (2 * MIB), 1) * (2 * MIB)


def option_kind(declared: Field[object]) -> Kind:
    return cast(Kind, declared.metadata["kind"])


def _did_you_mean(name: str, known: Mapping[str, object]) -> str:
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f": did you mean {close[0]!r}?"
    return f": known are {', '.join(sorted(known))}"


def documentation() -> str:
    """docs/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "Generated by `python -m kvtier.config`; do not edit.",
        "",
        "`kvtier serve` works without a file. With `--config FILE` it reads TOML; `--set`",
        "`SECTION.OPTION=VALUE` overrides one option. Sizes are whole bytes or texts such as",
        '`"512MiB"` (KiB, MiB, GiB, TiB). Any mistake is one line on standard error, exit code 2.',
        "",
        "```toml",
        "[server]",
        'socket = "/run/kvtier/kvtier.sock"',
        "",
        "[dram]",
        'bytes = "64GiB"',
        "```",
    ]
    for declared in fields(Config):
        section = TenantConfig() if declared.name == TENANT else cast(Section, declared.default)
        title = f"{TENANT}.NAME" if declared.name == TENANT else declared.name
        lines += ["", f"## [{title}]", "", inspect.getdoc(section) or "", ""]
        lines += ["| option | default | may be | meaning |", "| --- | --- | --- | --- |"]
        for entry in fields(section):
            kind = option_kind(cast("Field[object]", entry))
            lines.append(
                f"| `{entry.name}` | `{kind.show(entry.default)}` | {kind.describe()} "
                f"| {entry.metadata['help']} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(documentation())
