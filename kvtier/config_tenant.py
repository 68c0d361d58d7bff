"""`[tenant.NAME]`: who shares the daemon, each behind a socket of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvtier.config_grpc import CertificateNames
from kvtier.config_values import Choice, Count, Fraction, Names, PathValue, option
from kvtier.errors import ConfigError

SHARED = "*"
"""In place of a tenant's name: of namespaces that several tenants share."""

TENANTS_MAX = 64
LIST_MAX = 256
ID_MAX = (1 << 32) - 2  # The last one stands for none.
PRIORITIES = ("high", "normal", "low")
NAME_FORM = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


@dataclass(frozen=True, slots=True)
class Ids:
    """A list of numbers of users or groups; on the command line with commas between them."""

    what: str

    def check(self, name: str, value: object) -> object:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name} is {value!r}: it must be a list such as [1001, 1002]")
        for one in value:
            if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one <= ID_MAX:
                raise ConfigError(f"{name} has {one!r}: a {self.what} is a number, as `id` says")
        _check_count(name, len(value))
        return tuple(value)

    def from_text(self, text: str) -> object:
        parts = text.split(",") if text else []
        return [int(part) if part.isdecimal() else part for part in parts]

    def describe(self) -> str:
        return f"a list of {self.what}s"

    def show(self, value: object) -> str:
        assert isinstance(value, tuple)
        return str(list(value))


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """One tenant of several; NAME has small letters, digits, - and _. With any of them,
    `server.socket` is the operator's: whoever may connect there sees the counts of all tenants, and
    alone may Drain and Check."""

    socket: str = option(
        "",
        PathValue(),
        "Session socket of this tenant and of nobody else; gRPC's and the lane's stand beside it. "
        "Whoever connects there is this tenant.",
    )
    uids: tuple[int, ...] = option(
        (),
        Ids("user"),
        "Users who may connect, as the kernel names them (SO_PEERCRED), as engines. With uids, "
        "gids, readers and admins all empty: whoever the socket's mode lets in, as administrator.",
    )
    gids: tuple[int, ...] = option(
        (), Ids("group"), "Groups whose members may connect, as engines."
    )
    readers: tuple[int, ...] = option(
        (),
        Ids("user"),
        "Users who may connect, but only ask: Match, Get, Watch, List, Explain, Stats.",
    )
    admins: tuple[int, ...] = option(
        (),
        Ids("user"),
        "Users who may connect, and may do everything within the tenant: Evict, Pin, Clear and "
        "Purge too.",
    )
    certificates: tuple[str, ...] = option(
        (),
        CertificateNames(),
        "Who may put, get and prefetch blocks by value at `grpc.tcp`, for this tenant; see [grpc].",
    )
    reader_certificates: tuple[str, ...] = option((), CertificateNames(), "Who may only ask there.")
    admin_certificates: tuple[str, ...] = option(
        (), CertificateNames(), "Who may do everything within the tenant there."
    )
    shared_models: tuple[str, ...] = option(
        (),
        Names("models"),
        "Models whose blocks this tenant shares with every tenant that names them too. All of them "
        "can read, write and clear those, and can tell what the others asked.",
    )

    minimum: float = option(
        0.0,
        Fraction(0.0, 1.0),
        "Part of DRAM, of the NVMe pool and of what may be written there that is this tenant's "
        "whenever it wants it: others have what it does not use until then.",
    )
    maximum: float = option(
        1.0, Fraction(0.01, 1.0), "Part of each of these that it never has more of."
    )
    weight: float = option(
        1.0,
        Fraction(0.01, 100.0),
        "How what is between minimum and maximum is divided among tenants that want it; that of "
        "server.socket, and shared namespaces together, have 1.",
    )
    priority: str = option(
        "normal",
        Choice(*PRIORITIES),
        "Whose blocks are read from lower tiers first, for those who wait and for prefetches; but "
        "one batch in 16 is of who has waited longest. "
        "Tenants of one priority take turns, by weight.",
    )
    calls_per_second: int = option(
        0,
        Count(0, 1_000_000),
        "More calls in a second, a second's worth of them at once, are refused (LimitExceeded); "
        "Commit, Abort and Release, which give back what was taken, only a second's worth later. "
        "0: as many as come.",
    )

    @property
    def names_users(self) -> bool:
        """Whether the socket's mode alone does not decide who may connect."""
        return bool(self.uids or self.gids or self.readers or self.admins)


def check_tenants(tenants: Mapping[str, TenantConfig], own: str, own_socket: str) -> None:
    """What no single option can say; raises ConfigError. `own`: of `server.tenant`."""
    if own == SHARED:
        raise ConfigError(f"server.tenant is {own!r}, which stands for shared namespaces")
    if len(tenants) > TENANTS_MAX:
        raise ConfigError(f"{len(tenants)} tenants: a daemon may have {TENANTS_MAX}")
    places = {_place(own_socket): "server.socket"} if own_socket else {}
    for name, tenant in tenants.items():
        if not NAME_FORM.fullmatch(name):
            raise ConfigError(
                f"[tenant.{name}]: a name has small letters, digits, - and _, 63 at most"
            )
        if name == own:
            raise ConfigError(f"[tenant.{name}] is what server.tenant is called: choose another")
        if not tenant.socket:
            raise ConfigError(f"tenant.{name}.socket is empty: each tenant needs its own path")
        place = _place(tenant.socket)
        if place in places:
            raise ConfigError(
                f"tenant.{name}.socket and that of {places[place]} are one place: choose another"
            )
        places[place] = f"tenant.{name}"
        _check_sides(name, tenant)
        if tenant.minimum > tenant.maximum:
            raise ConfigError(
                f"tenant.{name}.minimum is {tenant.minimum:g}: it may be at most "
                f"tenant.{name}.maximum ({tenant.maximum:g})"
            )
    guaranteed = sum(one.minimum for one in tenants.values())
    if guaranteed > 1.0 + 1e-9:
        raise ConfigError(
            f"the minima of the tenants are {guaranteed:g} together: they may be 1 at most"
        )
    _check_shared(tenants)


def certificate_lists(tenants: Mapping[str, TenantConfig]) -> dict[str, tuple[str, ...]]:
    """The lists of certificates, by option."""
    kinds = ("certificates", "reader_certificates", "admin_certificates")
    return {
        f"tenant.{name}.{kind}": getattr(tenant, kind)
        for name, tenant in tenants.items()
        for kind in kinds
    }


def sharers(tenants: Mapping[str, TenantConfig]) -> dict[str, frozenset[str]]:
    """Shared models, each with the tenants that share it."""
    models = {model for tenant in tenants.values() for model in tenant.shared_models}
    return {
        model: frozenset(name for name, one in tenants.items() if model in one.shared_models)
        for model in models
    }


def _place(path: str) -> str:
    """Without its suffix: sockets that stand beside it are named by the rest."""
    return os.path.realpath(Path(path).expanduser().with_suffix(""))


def _check_sides(name: str, tenant: TenantConfig) -> None:
    both = set(tenant.readers) & {*tenant.uids, *tenant.admins}
    if both:
        raise ConfigError(f"user {min(both)} is in tenant.{name}.readers and in another list there")


def _check_shared(tenants: Mapping[str, TenantConfig]) -> None:
    for model, names in sharers(tenants).items():
        if len(names) == 1:
            raise ConfigError(
                f"tenant.{next(iter(names))}.shared_models names {model!r}, and no other tenant "
                "does: it is shared where two name it"
            )


def _check_count(name: str, count: int) -> None:
    if count > LIST_MAX:
        raise ConfigError(f"{name} has {count} entries: it may have at most {LIST_MAX}")


def all_ids(tenants: Iterable[TenantConfig]) -> set[int]:
    """Every user that some tenant names."""
    return {one for it in tenants for one in (*it.uids, *it.readers, *it.admins)}
