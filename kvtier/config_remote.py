"""`[remote]`: the remote engine and how it is reached; what its options need of each other.

No secret stands here: a password is named by the file that holds it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvtier.config_values import (
    AUTO,
    Addresses,
    AdmissionRule,
    Choice,
    PathValue,
    Seconds,
    Size,
    Switch,
    Text,
    option,
    split_remote_address,
)
from kvtier.errors import ConfigError

MIB = 1 << 20
TIB = 1 << 40

OFF = "off"
# Of each engine: what only it understands.
_OPTIONS_OF = {
    "files": ("path", "capacity_bytes"),
    "redis": (
        *("addresses", "cluster", "username", "password_file", "tls_authorities"),
        *("tls_certificate", "tls_private_key", "tls_check_hostname", "lifetime_seconds"),
    ),
    "mooncake": ("master", "host", "segment_bytes", "metadata", "protocol", "devices"),
}


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """The remote tier, below all others and shared with other nodes; see remote.md."""

    engine: str = option(
        OFF,
        Choice(OFF, *_OPTIONS_OF),
        "What keeps the blocks: a shared file system, Valkey or Redis, Mooncake Store. off: no "
        "remote tier, whatever else is set.",
    )
    path: str = option(
        "", PathValue(), "files: the folder on the share, made once by `kvtier format FOLDER`."
    )
    capacity_bytes: int = option(
        0,
        Size(0, 1 << 55),
        "files: most bytes there, of all nodes together; the same on each of them. Must be set.",
    )
    addresses: tuple[str, ...] = option(
        (),
        Addresses(64),
        "redis: the server, as HOST:PORT; of a cluster some nodes, from which the others are "
        "learned. With --set: commas between them.",
    )
    cluster: bool = option(False, Switch(), "redis: the addresses are nodes of a cluster.")
    username: str = option("", Text(256), "redis: the user; empty: the default one.")
    password_file: str = option(
        "", PathValue(), "redis: file that holds the password and nothing else. Empty: none."
    )
    tls_authorities: str = option(
        "", PathValue(), "redis: PEM file of who may vouch for the server. Empty: no TLS."
    )
    tls_certificate: str = option(
        "", PathValue(), "redis: PEM file by which the server can know us."
    )
    tls_private_key: str = option(
        "", PathValue(), "redis: PEM file of the certificate's key, not encrypted."
    )
    tls_check_hostname: bool = option(
        True, Switch(), "redis: the server's certificate must name the host of its address."
    )
    lifetime_seconds: float = option(
        0.0,
        Seconds(0.0, 864_000.0),
        "redis: how long a block stays there, at least 1. 0: until it is evicted.",
    )
    master: str = option(
        "", Text(1024), "mooncake: the master, as HOST:PORT, or the URL by which it is found."
    )
    host: str = option("", Text(256), "mooncake: this node, as the others reach it. Must be set.")
    segment_bytes: int = option(
        0,
        Size(0, 1 << 44),
        "mooncake: memory that the daemon lends to the store. 0: none, a mooncake_client does.",
    )
    metadata: str = option(
        "P2PHANDSHAKE", Text(1024), "mooncake: metadata server; P2PHANDSHAKE needs none."
    )
    protocol: str = option("tcp", Choice("tcp", "rdma"), "mooncake: how bytes go.")
    devices: str = option(
        "", Text(1024), "mooncake: RDMA devices, with commas between them. Empty: all."
    )
    codec: str = option(
        "auto",
        Choice("auto", "none", "lz4", "zstd"),
        "How blocks are packed. auto: by what the link and the codecs are measured to take; none "
        "on a fast link. Nodes may differ.",
    )
    key_file: str = option(
        "",
        PathValue(),
        "File of the keys that blocks are encrypted with there (AES-256-GCM), as `kvtier key` "
        "makes it; may be that of nvme.key_file. Every node needs it. Empty: in the clear.",
    )
    timeout_seconds: float = option(
        1.0,
        Seconds(0.05, 60.0),
        "Longest time for one batch of blocks, there or back. A batch that takes it is a miss, and "
        "trouble of the engine: see breakers in remote.md.",
    )
    known_bytes: int = option(
        TIB,
        Size(MIB, 1 << 55),
        "Bytes of blocks that the daemon remembers to be there; of others it asks the engine. At "
        "least 64 times the largest block.",
    )
    write_bytes_per_hour: int = option(
        AUTO,
        Size(MIB, 1 << 50, auto=True),
        "Blocks put in an hour, on average: what nobody has used twice takes what is left of it. "
        "auto: no bound.",
    )
    admission: str = option(
        "forecast",
        AdmissionRule(),
        "Of blocks used once, what is put. forecast (with dram.policy curves and a bound in "
        "write_bytes_per_hour, else as reused): what is likely to be used again, the likelier the "
        "less is left of that. all: while half of an hour's bytes is left. reused: nothing.",
    )

    @property
    def is_set(self) -> bool:
        """Whether there is to be a remote tier."""
        return self.engine != OFF


def check_remote(remote: RemoteConfig) -> None:
    """Raises ConfigError for what no single option can say."""
    if not remote.is_set:
        return  # So that `--set remote.engine=off` turns off what a file describes.
    _refuse_options_of_others(remote)
    _CHECKS[remote.engine](remote)


def changed_options(remote: RemoteConfig) -> list[str]:
    """Names of those that are not at their defaults."""
    return [one.name for one in fields(remote) if getattr(remote, one.name) != one.default]


def _refuse_options_of_others(remote: RemoteConfig) -> None:
    changed = set(changed_options(remote))
    for engine, names in _OPTIONS_OF.items():
        wrong = [f"remote.{name}" for name in names if name in changed]
        if engine != remote.engine and wrong:
            raise ConfigError(
                f"{wrong[0]} is for engine {engine}, and remote.engine is {remote.engine}: leave "
                f"{', '.join(wrong)} out, or set the other engine"
            )


def _check_files(remote: RemoteConfig) -> None:
    if not remote.path:
        raise ConfigError(
            "remote.engine is files: set remote.path to the folder on the share that all nodes "
            "mount"
        )
    if not remote.capacity_bytes:
        raise ConfigError(
            "remote.engine is files: set remote.capacity_bytes to what blocks of all nodes may "
            "take there, the same on each node"
        )


def _check_redis(remote: RemoteConfig) -> None:
    if not remote.addresses:
        raise ConfigError('remote.engine is redis: set remote.addresses, such as ["10.0.0.1:6379"]')
    if len(remote.addresses) > 1 and not remote.cluster:
        raise ConfigError(
            f"remote.addresses names {len(remote.addresses)} servers: give one, or set "
            "remote.cluster to true if they are nodes of a cluster"
        )
    if remote.username and not remote.password_file:
        raise ConfigError(
            "remote.username needs remote.password_file: write the user's password into a file "
            "and name it there"
        )
    if bool(remote.tls_certificate) != bool(remote.tls_private_key):
        raise ConfigError(
            "remote.tls_certificate and remote.tls_private_key go together: set both, or neither"
        )
    if not remote.tls_authorities and (remote.tls_certificate or not remote.tls_check_hostname):
        option_name = "tls_certificate" if remote.tls_certificate else "tls_check_hostname"
        raise ConfigError(
            f"remote.{option_name} is about TLS, which is off: set remote.tls_authorities"
        )
    if 0.0 < remote.lifetime_seconds < 1.0:
        raise ConfigError(
            f"remote.lifetime_seconds is {remote.lifetime_seconds}: it may be 0 (until evicted), "
            "or 1 and more"
        )


def _check_mooncake(remote: RemoteConfig) -> None:
    if not remote.master:
        raise ConfigError('remote.engine is mooncake: set remote.master, such as "10.0.0.1:50051"')
    for name in ("master", "metadata"):
        if "@" in getattr(remote, name):  # Not shown: it may hold a password.
            raise ConfigError(f"remote.{name} has a user in it: no secret may stand here")
    if "://" not in remote.master:
        split_remote_address("remote.master", remote.master)
    if not remote.host:
        raise ConfigError(
            "remote.engine is mooncake: set remote.host to the address of this node, as the others "
            "reach it"
        )
    if not remote.metadata:
        raise ConfigError("remote.metadata is empty: name a server, or leave it out")
    if remote.devices and remote.protocol != "rdma":
        raise ConfigError(
            f"remote.devices is about RDMA, and remote.protocol is {remote.protocol}: leave it out"
        )


_CHECKS = {"files": _check_files, "redis": _check_redis, "mooncake": _check_mooncake}
