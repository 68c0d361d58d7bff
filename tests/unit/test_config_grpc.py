"""Mistakes in [grpc] are one line that says what to do; certificates are named in one way."""

from __future__ import annotations

import pytest

from kvtier.config import load
from kvtier.errors import ConfigError

FINGERPRINT = "ab" * 32
TLS = {
    "grpc.tls_certificate": "/tls/cert.pem",
    "grpc.tls_private_key": "/tls/key.pem",
    "grpc.tls_authorities": "/tls/ca.pem",
}
BEYOND = {**TLS, "grpc.tcp": "0.0.0.0:7480"}
RED = {"tenant.red.socket": "/run/red.sock"}


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"grpc.tcp": "0.0.0.0:7480"}, "which other machines reach: set grpc.tls_certificate"),
        ({"grpc.tcp": "[::]:7480"}, "which other machines reach"),
        ({"grpc.tcp": "10.1.2.3:0"}, "which other machines reach"),
        ({"grpc.tcp": "node7:7480"}, "write an IP address of this node"),
        ({"grpc.tcp": ":7480"}, "write an IP address of this node"),
        ({"grpc.tcp": "127.0.0.1:70000"}, "the port may be 0 to 65535"),
        ({"grpc.tcp": "127.0.0.1"}, "write ADDRESS:PORT"),
        ({"grpc.tls_certificate": "/c"}, "so grpc.tls_private_key must be, too"),
        ({**BEYOND, "grpc.tls_authorities": ""}, "so grpc.tls_authorities must be, too"),
        ({"grpc.certificates": "dns:a"}, "nobody is asked for one: set grpc.tls_certificate"),
        ({**TLS, "grpc.certificates": "dns:a"}, "nobody is asked for one: set grpc.tcp"),
        ({**RED, "tenant.red.certificates": "dns:a"}, "tenant.red.certificates names"),
        ({**BEYOND, "grpc.certificates": "a"}, "write dns:NAME, uri:NAME or sha256:FINGERPRINT"),
        ({**BEYOND, "grpc.certificates": "dns:*.a"}, "without wildcards"),
        ({**BEYOND, "grpc.certificates": "cn:a"}, "write dns:NAME"),
        ({**BEYOND, "grpc.certificates": "sha256:ab"}, "write dns:NAME"),
        ({**BEYOND, "grpc.certificates": "uri:"}, "write dns:NAME"),
        (
            {**BEYOND, **RED, "grpc.certificates": "dns:A", "tenant.red.certificates": "dns:a"},
            "dns:a is in grpc.certificates and in tenant.red.certificates: whose is it?",
        ),
        (
            {**BEYOND, "grpc.certificates": "uri:x,uri:x"},
            "uri:x is in grpc.certificates and in grpc.certificates",
        ),
    ],
)
def test_mistakes_are_refused(options: dict[str, str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, options)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"grpc.tcp": "127.0.0.1:0"},
        {"grpc.tcp": "[::1]:0"},
        {"grpc.tcp": "localhost:7480"},
        BEYOND,
        {**BEYOND, **RED},
        {**TLS, "grpc.tcp": "127.0.0.1:0"},
        {**BEYOND, "grpc.tcp": "[::]:7480"},
        TLS,
    ],
)
def test_what_is_safe_is_taken(options: dict[str, str]) -> None:
    load(None, options)


def test_names_of_certificates_have_one_spelling() -> None:
    written = ":".join([FINGERPRINT[:2].upper()] * 32)
    options = {**BEYOND, "grpc.certificates": f"dns:Tools.Red,sha256:{written},uri:spiffe://a/B"}
    found = load(None, options).grpc.certificates
    assert found == ("dns:tools.red", f"sha256:{FINGERPRINT}", "uri:spiffe://a/B")
