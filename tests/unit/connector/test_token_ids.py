"""Commits carry token ids where the daemon publishes events, of all their blocks or of none."""

from __future__ import annotations

from tests.support.connector_rig import Rig, committed, numbered_chain


def tokens_of(block: int) -> list[int]:
    return [1000 + block, 2000 + block]


def offload(rig: Rig, request_id: str, chain: list[bytes], *, first: int, told: bool) -> None:
    device_blocks = list(range(first, first + len(chain)))
    rig.scheduler.on_new_request(request_id, chain, tokens_of if told else None)
    rig.answer()
    rig.compute(chain, device_blocks)
    rig.scheduler.on_blocks_full(request_id, chain, device_blocks)
    for _ in range(4):
        rig.step()


def test_each_block_comes_with_its_own_tokens() -> None:
    rig = Rig()
    rig.client.wants_token_ids = True
    chain = numbered_chain(5)
    offload(rig, "a", chain[:2], first=0, told=True)
    offload(rig, "b", chain, first=8, told=True)
    assert committed(rig) == chain
    assert rig.client.tokens_of == {one: tokens_of(place) for place, one in enumerate(chain)}


def test_nobody_is_told_who_did_not_ask() -> None:
    rig = Rig()
    offload(rig, "a", numbered_chain(3), first=0, told=True)
    assert len(committed(rig)) == 3
    assert rig.client.tokens_of == {}


def test_request_whose_tokens_do_not_make_its_hashes_is_told_by_hash_alone() -> None:
    rig = Rig()
    rig.client.wants_token_ids = True
    offload(rig, "a", numbered_chain(3), first=0, told=False)
    assert len(committed(rig)) == 3
    assert rig.client.tokens_of == {}
