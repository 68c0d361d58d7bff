"""The curves of live traffic: of all requests and of each tenant."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from kvtier.core.events import Acquire, Commit
from kvtier.errors import UnknownNamespace
from kvtier.server.hit_curves import TENANTS_MAX, HitCurves
from kvtier.server.namespaces import Namespaces, OpenedNamespace
from kvtier.types import BlockHash, LeaseId, NamespaceId, SessionId
from tests.support.clock import ManualClock
from tests.support.known_blocks import chain_hashes, spec_of


class FewNamespaces:
    """Namespace n is tenant n's, but for 99, whose blocks are unchained."""

    def get(self, namespace: int) -> OpenedNamespace:
        if namespace > 99:
            raise UnknownNamespace("none")
        spec = replace(spec_of(), tenant=f"t{namespace}", chained=namespace != 99)
        return OpenedNamespace(NamespaceId(namespace), spec, b"", 1 << 20, 64)


def curves_of(dram_bytes: int = 64 << 20, *, has_tenants: bool = True) -> HitCurves:
    return HitCurves(
        cast(Namespaces, FewNamespaces()),
        ManualClock(),
        dram_bytes=dram_bytes,
        nvme_bytes=1 << 30,
        has_tenants=has_tenants,
    )


def acquire(namespace: int, label: str, **more: object) -> Acquire:
    hashes = [BlockHash(one) for one in chain_hashes(label, 8)]
    return Acquire(SessionId(1), NamespaceId(namespace), hashes, 9.0, **more)  # type: ignore[arg-type]


def test_each_tenant_has_its_curve_and_all_have_one() -> None:
    curves = curves_of()
    for _ in range(3):
        curves.on_acquire(acquire(1, "a"))
    curves.on_acquire(acquire(2, "b"))
    told = curves.told()
    assert [one["tenant"] for one in told["curves"]] == ["", "t1", "t2"]
    whole, one, two = told["curves"]
    assert one["points"][-1][1] == 16 / 24
    assert whole["points"][-1][1] == 16 / 32
    assert two["points"] == []
    assert (told["dram_bytes"], told["nvme_bytes"]) == (64 << 20, 1 << 30)


def test_a_daemon_of_one_tenant_keeps_one_curve() -> None:
    curves = curves_of(has_tenants=False)
    curves.on_acquire(acquire(1, "a"))
    assert [one["tenant"] for one in curves.told()["curves"]] == [""]


def test_of_a_tenant_that_is_forgotten_no_samples_stay_but_those_of_all() -> None:
    for has_tenants in (True, False):
        curves = curves_of(has_tenants=has_tenants)
        curves.on_acquire(acquire(1, "a"))
        curves.forget("t1")
        left = [one["tenant"] for one in curves.told()["curves"]]
        assert left == ([""] if has_tenants else [])


def test_slices_after_the_first_and_what_engines_skip_do_not_count() -> None:
    curves = curves_of()
    curves.on_acquire(acquire(1, "a"))
    curves.on_acquire(acquire(1, "a", lease=LeaseId(1), done_count=4))
    curves.on_acquire(acquire(1, "a", skip_count=6))
    hashes = acquire(1, "a").hashes
    curves.on_commit(
        Commit(SessionId(1), NamespaceId(1), hashes, cast("object", None), None, 1)  # type: ignore[arg-type]
    )
    assert curves.told()["curves"][0]["points"][-1][1] == 2 / 10


def test_tenants_beyond_the_bound_are_in_the_curve_of_all_only() -> None:
    curves = curves_of()
    for tenant in range(1, 3 + TENANTS_MAX):
        curves.on_acquire(acquire(tenant, "a"))
    assert len(curves.told()["curves"]) == 1 + TENANTS_MAX


def test_unchained_and_unknown_namespaces_are_left_out() -> None:
    curves = curves_of()
    curves.on_acquire(acquire(99, "a"))
    curves.on_acquire(acquire(100, "a"))
    assert curves.told()["curves"] == []


def test_large_memory_is_sampled_thinly() -> None:
    curves = curves_of(dram_bytes=65_536 << 20)
    curves.on_acquire(acquire(1, "a"))
    assert curves.told()["curves"][0]["rate"] == 1 / 16
