"""Network namespaces on one bridge: nodes of a cluster, each with an address of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


@dataclass(frozen=True, slots=True)
class Network:
    """`host` is the address on the bridge, of whoever is in no namespace of ours."""

    host: str
    names: tuple[str, ...]
    addresses: tuple[str, ...]

    def command(self, node: int) -> list[str]:
        """What a program's words follow to run in this node's namespace."""
        return ["ip", "netns", "exec", self.names[node]]


@contextlib.contextmanager
def network(node_count: int) -> Iterator[Network]:
    """Skips the test where namespaces cannot be made."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    number = os.getpid() % 250
    bridge = f"kvbr{os.getpid() % 100_000}"
    names = tuple(f"kvtier-{os.getpid()}-{node}" for node in range(node_count))
    addresses = tuple(f"10.213.{number}.{node + 1}" for node in range(node_count))
    host = f"10.213.{number}.254"
    try:
        _ip("link", "add", bridge, "type", "bridge")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no bridge can be made: {error.stderr.strip()}")
    try:
        _ip("addr", "add", f"{host}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for node, (name, address) in enumerate(zip(names, addresses, strict=True)):
            near, far = f"{bridge}n{node}"[-15:], f"{bridge}f{node}"[-15:]
            _ip("netns", "add", name)
            _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
            _ip("link", "set", near, "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", far)
            _ip("-n", name, "link", "set", far, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield Network(host, names, addresses)
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", bridge)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)
