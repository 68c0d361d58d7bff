"""`[grpc]`: where gRPC listens, and which certificates may call from other machines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.config_address import OFF, ListenAddress, is_loopback, split_address
from kvtier.config_values import Count, PathValue, Seconds, option
from kvtier.errors import ConfigError

LIST_MAX = 256
NAME_CHARS_MAX = 512
_FORMS = {
    "dns": re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9])?"),  # Whole names: no wildcards.
    "uri": re.compile(r"[!-~]+"),
    "sha256": re.compile(r"[0-9a-f]{64}"),
}
_TLS_FILES = ("tls_certificate", "tls_private_key", "tls_authorities")


@dataclass(frozen=True, slots=True)
class CertificateNames:
    """A list of what certificates say of their owners; on the command line with commas between."""

    def check(self, name: str, value: object) -> object:
        if not isinstance(value, list | tuple):
            raise ConfigError(f'{name} is {value!r}: it must be a list such as ["dns:tools.red"]')
        if len(value) > LIST_MAX:
            raise ConfigError(f"{name} has {len(value)} entries: it may have at most {LIST_MAX}")
        return tuple(_certificate_name(name, one) for one in value)

    def from_text(self, text: str) -> object:
        return text.split(",") if text else []

    def describe(self) -> str:
        return "a list of dns:NAME, uri:NAME or sha256:FINGERPRINT"

    def show(self, value: object) -> str:
        assert isinstance(value, tuple)
        return str(list(value))


@dataclass(frozen=True, slots=True)
class GrpcConfig:
    """gRPC, and who may call it from other machines: only who has a certificate. A certificate is
    named by a whole DNS name or URI of its subjectAltName, or by the SHA-256 of itself; the lists
    here are of the owner of `server.socket`, those of other tenants stand in theirs. Upon SIGHUP
    all are read again: who is taken off one is refused, and its connections end."""

    tcp: str = option(
        OFF,
        ListenAddress(),
        'Address to listen on besides the Unix socket, such as "127.0.0.1:0" (0: any free port) '
        'or "[::]:7480", or "off". Beyond loopback, or beside tenants, only with TLS.',
    )
    tls_certificate: str = option(
        "",
        PathValue(),
        "PEM file of the daemon's certificate, and of those between it and the root. With it every "
        "client of `tcp` needs a certificate of its own. Files that change count from the next "
        "connection on. Empty: no TLS.",
    )
    tls_private_key: str = option(
        "", PathValue(), "PEM file of the certificate's key, not encrypted."
    )
    tls_authorities: str = option(
        "", PathValue(), "PEM file of who may vouch for clients; nobody else is believed."
    )
    certificates: tuple[str, ...] = option(
        (), CertificateNames(), "Who may put, get and prefetch blocks by value."
    )
    reader_certificates: tuple[str, ...] = option(
        (), CertificateNames(), "Who may only ask: Match, Get, Watch, List, Explain, Stats."
    )
    operator_certificates: tuple[str, ...] = option(
        (), CertificateNames(), "Who may do what the operator may: also Drain and Check."
    )
    idle_seconds: float = option(
        300.0,
        Seconds(1.0, 86_400.0),
        "A connection ends that has had no call for so long, or has not answered a ping by then.",
    )
    calls_max: int = option(512, Count(1, 65536), "Calls of a tenant at once; more are refused.")

    @property
    def has_tls(self) -> bool:
        """Whether clients of `tcp` need certificates."""
        return bool(self.tls_certificate)

    @property
    def lists(self) -> dict[str, tuple[str, ...]]:
        """The lists of certificates, by option."""
        return {
            "grpc.certificates": self.certificates,
            "grpc.reader_certificates": self.reader_certificates,
            "grpc.operator_certificates": self.operator_certificates,
        }


def check_grpc(
    grpc: GrpcConfig, lists_of_tenants: Mapping[str, tuple[str, ...]], *, has_tenants: bool
) -> None:
    """What no single option can say; raises ConfigError."""
    given = [name for name in _TLS_FILES if getattr(grpc, name)]
    left = [f"grpc.{name}" for name in _TLS_FILES if name not in given]
    if given and left:
        raise ConfigError(f"grpc.{given[0]} is set, so {left[0]} must be, too: TLS needs all three")
    named = {**grpc.lists, **lists_of_tenants}
    first = next((option_name for option_name, names in named.items() if names), None)
    if first is not None and (not grpc.has_tls or grpc.tcp == OFF):
        needed = "grpc.tcp" if grpc.has_tls else "grpc.tls_certificate"
        raise ConfigError(f"{first} names certificates, and nobody is asked for one: set {needed}")
    _check_once(named)
    if grpc.tcp == OFF or grpc.has_tls:
        return
    host = split_address("grpc.tcp", grpc.tcp)[0]
    if host != "localhost" and not is_loopback(host):
        raise ConfigError(
            f"grpc.tcp is {grpc.tcp!r}, which other machines reach: set grpc.tls_certificate, "
            "grpc.tls_private_key and grpc.tls_authorities, or name a loopback address"
        )
    if has_tenants:
        raise ConfigError(
            "grpc.tcp is set, but without TLS nobody can tell whose tenant a TCP client is: leave "
            "it off, or set grpc.tls_certificate"
        )


def _check_once(named: Mapping[str, tuple[str, ...]]) -> None:
    places: dict[str, str] = {}
    for option_name, names in named.items():
        for name in names:
            if name in places:
                raise ConfigError(
                    f"{name} is in {places[name]} and in {option_name}: whose is it? Leave one out"
                )
            places[name] = option_name


def _certificate_name(option_name: str, value: object) -> str:
    forms = "dns:NAME, uri:NAME or sha256:FINGERPRINT"
    if not isinstance(value, str) or not 1 <= len(value) <= NAME_CHARS_MAX:
        raise ConfigError(f"{option_name} has {value!r}: write {forms}")
    kind, _, name = value.partition(":")
    if kind == "dns":
        name = name.lower()
    elif kind == "sha256":
        name = name.lower().replace(":", "")
    form = _FORMS.get(kind)
    if form is None or not form.fullmatch(name):
        raise ConfigError(f"{option_name} has {value!r}: write {forms}, without wildcards")
    return f"{kind}:{name}"
