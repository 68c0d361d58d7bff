"""What a running daemon takes anew from its configuration, upon SIGHUP: lists of certificates.

The file is read again as it was at the start, with the same words of the command line before it. A
mistake anywhere in it leaves the former lists in force; what else has changed needs a restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import fields, replace

from kvtier.config import Config
from kvtier.config_tenant import TenantConfig
from kvtier.errors import ConfigError
from kvtier.server.certificates import grants_of
from kvtier.server.tls_door import TlsDoor

log = logging.getLogger(__name__)


class Reloading:
    """Lives on the event loop."""

    def __init__(
        self, config: Config, read: Callable[[], Config] | None, door: TlsDoor | None
    ) -> None:
        """`read`: the configuration as it is now; raises ConfigError. None: there is no file."""
        self._config = config
        self._read = read
        self._door = door
        self._told = asyncio.Event()

    @property
    def is_possible(self) -> bool:
        return self._read is not None

    def ask(self) -> None:
        """Soon; once for all that ask until then."""
        self._told.set()

    async def run(self) -> None:
        while True:  # Until it is cancelled.
            await self._told.wait()
            self._told.clear()
            await self._reload()

    async def _reload(self) -> None:
        assert self._read is not None, "asked without a file"
        try:
            found = await asyncio.to_thread(self._read)
        except ConfigError as error:
            log.warning("configuration cannot be used", extra={"reason": str(error)})
            return
        config = with_lists_of(self._config, found)
        grants = grants_of(config)
        if self._door is not None:
            self._door.regrant(grants)
        facts = {"names": len(grants), "restart": " ".join(differences(config, found)) or None}
        log.info("lists of certificates read again", extra=facts)


def with_lists_of(config: Config, found: Config) -> Config:
    """`config` with the lists of certificates in `found`, of the tenants that there are."""
    grpc = replace(
        config.grpc,
        certificates=found.grpc.certificates,
        reader_certificates=found.grpc.reader_certificates,
        operator_certificates=found.grpc.operator_certificates,
    )
    tenants = {
        name: _with_lists(its, found.tenant.get(name, TenantConfig()))
        for name, its in config.tenant.items()
    }
    return replace(config, grpc=grpc, tenant=tenants)


def differences(config: Config, found: Config) -> list[str]:
    """Names of options, and of tenants, that are not the same in both."""
    before, after = _options(config), _options(found)
    return sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )


def _with_lists(its: TenantConfig, found: TenantConfig) -> TenantConfig:
    return replace(
        its,
        certificates=found.certificates,
        reader_certificates=found.reader_certificates,
        admin_certificates=found.admin_certificates,
    )


def _options(config: Config) -> dict[str, object]:
    sections: Mapping[str, object] = {
        **{one.name: getattr(config, one.name) for one in fields(config) if one.name != "tenant"},
        **{f"tenant.{name}": its for name, its in config.tenant.items()},
    }
    return {
        f"{section}.{one.name}": getattr(its, one.name)
        for section, its in sections.items()
        for one in fields(its)  # type: ignore[arg-type]  # All of them are dataclasses.
    }
