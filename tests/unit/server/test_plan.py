"""What follows from the configuration and the machine, and what /healthz makes of a late tick."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path

import pytest

from kvtier.config import load
from kvtier.errors import ConfigError
from kvtier.server import plan as module
from kvtier.server.admin import TICK_AGE_SECONDS_MAX, health_of
from kvtier.server.plan import Plan, plan_memory

MIB = 1 << 20


def plan_of(**options: str) -> Plan:
    overrides = {f"dram.{name}": value for name, value in options.items()}
    return plan_memory(load(None, overrides), Path("/s/k.sock"), Path("/state"), generation=1)


def test_budget_is_cut_into_whole_slabs() -> None:
    plan = plan_of(bytes="100MiB", slab_bytes="32MiB")
    assert (plan.slab_bytes, plan.slab_count_max) == (32 * MIB, 3)
    assert plan.tenants[0].grpc_socket == Path("/s/k.grpc.sock")


@pytest.mark.parametrize(
    ("available", "slab", "count"),
    [(8 << 30, 128 * MIB, 16), (1 << 40, 1 << 30, 64), (128 * MIB, 16 * MIB, 2)],
)
def test_auto_is_a_quarter_of_the_memory_but_64_gib_at_most(
    monkeypatch: pytest.MonkeyPatch, available: int, slab: int, count: int
) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda: available)
    plan = plan_of()
    assert (plan.slab_bytes, plan.slab_count_max) == (slab, count)


def test_too_little_memory_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda: MIB)
    with pytest.raises(ConfigError, match="hold no slab"):
        plan_of()


def test_health_fails_when_the_loop_ticked_too_long_ago() -> None:
    assert health_of(TICK_AGE_SECONDS_MAX)[0] is HTTPStatus.OK
    assert health_of(TICK_AGE_SECONDS_MAX + 0.1)[0] is HTTPStatus.SERVICE_UNAVAILABLE
