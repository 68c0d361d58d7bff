"""Calls begin in turn, one of each tenant."""

from __future__ import annotations

import asyncio

from kvtier.server.turnstile import Turnstile


def passed(turnstile: Turnstile, tenants: list[str]) -> list[str]:
    """In which order calls of these tenants begin that were made all at once."""
    order: list[str] = []

    async def call(tenant: str) -> None:
        await turnstile.enter(tenant)
        order.append(tenant)

    async def run() -> None:
        await asyncio.gather(*map(call, tenants))

    asyncio.run(run())
    return order


def test_one_call_waits_for_one_of_somebody_elses_hundred() -> None:
    order = passed(Turnstile(is_needed=True), ["greedy"] * 100 + ["modest"])
    assert order.index("modest") <= 1
    assert len(order) == 101


def test_calls_of_one_tenant_keep_their_order_and_pass_at_once_where_there_is_no_other() -> None:
    turnstile = Turnstile(is_needed=False)
    assert passed(turnstile, ["only"] * 3) == ["only"] * 3
    assert turnstile.waiting_count == 0


def test_a_call_that_is_cancelled_holds_nobody_up() -> None:
    async def run() -> None:
        turnstile = Turnstile(is_needed=True)
        first = asyncio.create_task(turnstile.enter("a"))
        second = asyncio.create_task(turnstile.enter("a"))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait_for(second, 1)
        assert turnstile.waiting_count == 0

    asyncio.run(run())
