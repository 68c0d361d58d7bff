"""TLS of gRPC's port: files that may change while the daemon runs, and whom a certificate names."""

from __future__ import annotations

import hashlib
import logging
import os
import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvtier.config import Config
from kvtier.config_grpc import GrpcConfig
from kvtier.errors import ConfigError, Forbidden
from kvtier.server.security import Peer, Rights

log = logging.getLogger(__name__)

_Stamp = tuple[tuple[int, int, int] | None, ...]


class TlsFiles:
    """The daemon's certificate, its key, and who may vouch for clients. Belongs to one thread."""

    def __init__(self, config: GrpcConfig) -> None:
        """Raises ConfigError."""
        self._certificate = Path(config.tls_certificate).expanduser()
        self._private_key = Path(config.tls_private_key).expanduser()
        self._authorities = Path(config.tls_authorities).expanduser()
        self._seen = self._stamp()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """Of the files as they are; while those cannot be used, of what they were before."""
        seen = self._stamp()
        if seen != self._seen:
            self._seen = seen  # Told once: files are replaced one after the other.
            try:
                self._context = self._load()
            except ConfigError as error:
                log.warning("tls files cannot be used", extra={"reason": str(error)})
            else:
                log.info("tls files read again", extra={"path": str(self._certificate)})
        return self._context

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0  # Who comes again shows its certificate again.
        context.set_alpn_protocols(["h2"])
        name, path = "tls_authorities", self._authorities
        try:
            context.load_verify_locations(cafile=path)
            name, path = "tls_certificate", self._certificate
            path.read_bytes()
            name, path = "tls_private_key", self._private_key
            path.read_bytes()
            # A password: else the library would ask for that of an encrypted key at a terminal.
            context.load_cert_chain(self._certificate, self._private_key, password="")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError.
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                f"grpc.{name}: {path} cannot be used ({reason}): PEM files are needed, the key not "
                "encrypted and that of the certificate"
            ) from None
        return context

    def _stamp(self) -> _Stamp:
        return tuple(map(_stamp_of, (self._certificate, self._private_key, self._authorities)))


class Grants:
    """Whose a certificate is, and what that one may do."""

    def __init__(self, peers: Mapping[str, Peer]) -> None:
        """By name, as the configuration writes it."""
        self._peers = peers

    def __len__(self) -> int:
        return len(self._peers)

    def is_peer(self, names: Iterable[str], peer: Peer) -> bool:
        """Whether that is who a certificate with these names is."""
        try:
            return self.peer_of(names) == peer
        except Forbidden:
            return False

    def peer_of(self, names: Iterable[str]) -> Peer:
        """`names`: all that one certificate has. Raises Forbidden."""
        found = [self._peers[name] for name in names if name in self._peers]
        if not found:
            raise Forbidden(
                f"the certificate of {_shown(names)} is in no list: its operator has to enter it"
            )
        if len({(one.tenant, one.rights) for one in found}) > 1:
            raise Forbidden(f"the certificate of {_shown(names)} is in several lists: in one only")
        return found[0]


def grants_of(config: Config) -> Grants:
    """From all lists of certificates."""
    own, grpc = config.server.tenant, config.grpc
    lists = [
        (grpc.certificates, own, Rights.ENGINE),
        (grpc.reader_certificates, own, Rights.READER),
        (grpc.operator_certificates, own, Rights.OPERATOR),
    ]
    for tenant, its in config.tenant.items():
        lists += [
            (its.certificates, tenant, Rights.ENGINE),
            (its.reader_certificates, tenant, Rights.READER),
            (its.admin_certificates, tenant, Rights.ADMIN),
        ]
    return Grants(
        {
            name: Peer(tenant, None, rights, certificate=name)
            for names, tenant, rights in lists
            for name in names
        }
    )


def names_of(connection: ssl.SSLObject) -> list[str]:
    """What the verified certificate at the other end says of its owner: "dns:…", "uri:…", and
    "sha256:…" of itself."""
    packed = connection.getpeercert(binary_form=True)
    told = connection.getpeercert() or {}
    assert packed is not None, "a connection without a certificate was let in"
    kinds = {"DNS": "dns", "URI": "uri"}
    alternatives: Iterable[tuple[str, str]] = told.get("subjectAltName", ())  # type: ignore[assignment]  # Of pairs, says the library.
    names = [
        f"{kinds[kind]}:{name.lower() if kind == 'DNS' else name}"
        for kind, name in alternatives
        if kind in kinds
    ]
    return [*names, f"sha256:{hashlib.sha256(packed).hexdigest()}"]


def seconds_left(connection: ssl.SSLObject, now: float) -> float:
    """How long the certificate at the other end is good; `now` is the calendar's."""
    told = connection.getpeercert() or {}
    return ssl.cert_time_to_seconds(str(told["notAfter"])) - now


def _shown(names: Iterable[str]) -> str:
    return " ".join(names)[:512]


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
