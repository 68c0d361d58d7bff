"""Certificates of tests' own: authorities, and what they vouch for."""

from __future__ import annotations

import datetime
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvtier.client import ClientTls

HOUR = datetime.timedelta(hours=1)


@dataclass(frozen=True)
class Identity:
    """A certificate and its key, as PEM files."""

    certificate: Path
    private_key: Path
    fingerprint: str  # "sha256:…"

    def tls(self, authorities: Path) -> ClientTls:
        return ClientTls(self.certificate, self.private_key, authorities)


class Authority:
    """Signs certificates; its own is `path`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder = folder / name
        self.folder.mkdir(parents=True)
        self.path = self.folder / "authority.pem"
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        mine = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - HOUR)
            .not_valid_after(now + HOUR)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.path.write_bytes(mine.public_bytes(serialization.Encoding.PEM))

    def vouch(
        self, name: str, *alternatives: str, ends_in: datetime.timedelta = HOUR, at: str = ""
    ) -> Identity:
        """A certificate with names such as "dns:host", "uri:spiffe://a/b" and "ip:127.0.0.1";
        its files are replaced, not written over, where they are there already."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        signed = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * HOUR)
            .not_valid_after(now + ends_in)
            .add_extension(
                x509.SubjectAlternativeName([_general_name(one) for one in alternatives]),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        where = at or name
        certificate, private_key = self.folder / f"{where}.pem", self.folder / f"{where}.key"
        _replace(
            private_key,
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )
        _replace(certificate, signed.public_bytes(serialization.Encoding.PEM))
        fingerprint = f"sha256:{signed.fingerprint(hashes.SHA256()).hex()}"
        return Identity(certificate, private_key, fingerprint)


def _replace(path: Path, data: bytes) -> None:
    new = path.with_suffix(path.suffix + ".new")
    new.write_bytes(data)
    os.replace(new, path)


def _general_name(text: str) -> x509.GeneralName:
    kind, _, name = text.partition(":")
    if kind == "dns":
        return x509.DNSName(name)
    if kind == "uri":
        return x509.UniformResourceIdentifier(name)
    assert kind == "ip", text
    return x509.IPAddress(ipaddress.ip_address(name))
