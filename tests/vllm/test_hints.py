"""What requests say of their users' sessions reaches the daemon."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connector.vllm.hints import hints_of, onboard_wish_of
from kvtier.policy.load_or_recompute import OnboardWish
from tests.vllm.scheduler_rig import SchedulerRig, prompt_of

pytestmark = pytest.mark.vllm


def hints(said: Any) -> list[Any]:
    return hints_of(SimpleNamespace(kv_transfer_params=said))


def test_words_of_a_request_become_hints_and_what_is_not_understood_none() -> None:
    assert hints({"kvtier": {"session_end": True}}) == [{"session_end": True}]
    assert hints({"kvtier": {"paused_seconds": 30}}) == [{"paused_seconds": 30.0}]
    told = hints({"kvtier": {"turn_kind": "tool", "paused_seconds": 5.5}})
    assert told == [{"turn_kind": "tool"}, {"paused_seconds": 5.5}]
    assert hints({"kvtier": {"session_end": True, "paused_seconds": 1}}) == [{"session_end": True}]
    for nonsense in (
        None, [], {"kvtier": None}, {"kvtier": False}, {"kvtier": {"session_end": 1}},
        {"kvtier": {"paused_seconds": float("nan")}}, {"kvtier": {"paused_seconds": -1}},
        {"kvtier": {"paused_seconds": True}}, {"kvtier": {"paused_seconds": "5"}},
        {"kvtier": {"turn_kind": "x" * 33}}, {"kvtier": {"turn_kind": 7}},
    ):  # fmt: skip
        assert hints(nonsense) == [], nonsense


def test_wish_of_a_request_is_one_of_few_words() -> None:
    def wish(said: Any) -> OnboardWish | None:
        return onboard_wish_of(SimpleNamespace(kv_transfer_params=said))

    for said, wanted in (
        ({"kvtier": False}, OnboardWish.NEVER), ({"kvtier": {"onboard": False}}, OnboardWish.NEVER),
        ({"kvtier": {"onboard": "never"}}, OnboardWish.NEVER),
        ({"kvtier": {"onboard": "always"}}, OnboardWish.ALWAYS),
        ({"kvtier": {"onboard": "auto"}}, OnboardWish.AUTO),
        ({"kvtier": {"onboard": "often"}}, None), ({"kvtier": {"onboard": True}}, None),
        ({"kvtier": {"onboard": ["auto"]}}, None), ({}, None), (None, None),
    ):  # fmt: skip
        assert wish(said) is wanted, said


def test_hint_is_sent_when_what_the_request_computed_is_there(tiny_llama: Path) -> None:
    """Else it would say nothing of the last blocks: they are stored as the request ends."""
    rig = SchedulerRig(tiny_llama)
    rig.add("a", prompt_of(100), tokens=4, kvtier={"turn_kind": "tool", "paused_seconds": 9})
    rig.run()
    rig.step()
    assert rig.client.hints == [(6, {"turn_kind": "tool"}), (6, {"paused_seconds": 9.0})]
    rig.check_nothing_left()
    assert not rig.side._hints


def test_hint_of_an_aborted_request_is_of_what_it_had_computed(tiny_llama: Path) -> None:
    rig = SchedulerRig(tiny_llama)
    rig.add("a", prompt_of(200), tokens=40, kvtier={"session_end": True})
    for _ in range(2):
        rig.step()
    rig.abort("a")
    rig.run()
    rig.step()
    rig.check_nothing_left()
    assert [hint for _, hint in rig.client.hints] == [{"session_end": True}]
