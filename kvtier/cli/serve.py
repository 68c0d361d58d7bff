"""`kvtier serve`: run the daemon."""

from __future__ import annotations

import argparse
import faulthandler
from functools import partial
from pathlib import Path

from kvtier import config
from kvtier.errors import ConfigError

# Shorthands for the options people set most; everything else goes through --set.
_SHORTHANDS = {
    "socket": "server.socket",
    "state_dir": "server.state_dir",
    "dram_bytes": "dram.bytes",
    "slab_bytes": "dram.slab_bytes",
    "grpc_tcp": "grpc.tcp",
    "admin": "admin.address",
    "log_format": "log.format",
    "log_level": "log.level",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file")
    parser.add_argument("--socket", metavar="PATH", help="session socket")
    parser.add_argument("--state-dir", metavar="DIR", help="lock and durable epochs")
    parser.add_argument("--dram-bytes", metavar="SIZE", help='DRAM budget, such as "4GiB"')
    parser.add_argument("--slab-bytes", metavar="SIZE", help="size of one slab")
    parser.add_argument(
        "--grpc-tcp",
        metavar="ADDRESS:PORT",
        help="also listen here; beyond loopback only with [grpc] tls_certificate",
    )
    parser.add_argument("--admin", metavar="ADDRESS:PORT", help='/metrics and /healthz, or "off"')
    parser.add_argument("--log-format", metavar="text|json")
    parser.add_argument("--log-level", metavar="LEVEL")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.OPTION=VALUE",
        dest="settings",
        help="set any option of docs/configuration.md; may be repeated",
    )


def run(arguments: argparse.Namespace) -> int:
    read = partial(config.load, arguments.config, _overrides(arguments))
    loaded = read()
    from kvtier.server.app import serve  # Late: a mistake in the options is told at once.

    faulthandler.enable()  # A crash below Python leaves its stacks in the log.
    return serve(loaded, read_again=None if arguments.config is None else read)


def _overrides(arguments: argparse.Namespace) -> dict[str, object]:
    overrides: dict[str, object] = {}
    for setting in arguments.settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting}: write SECTION.OPTION=VALUE")
        overrides[name] = value
    for attribute, name in _SHORTHANDS.items():
        value = getattr(arguments, attribute)
        if value is not None:
            overrides[name] = value
    return overrides
