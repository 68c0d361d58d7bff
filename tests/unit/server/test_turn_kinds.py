"""Words of engines for kinds of turns: a few numbers."""

from __future__ import annotations

from kvtier.policy.eviction import TURN_KINDS_MAX
from kvtier.server.turn_kinds import TurnKinds
from kvtier.types import NamespaceId

ONE, OTHER = NamespaceId(1), NamespaceId(2)


def test_each_word_has_its_number_in_each_namespace() -> None:
    kinds = TurnKinds()
    assert [kinds.number(ONE, word) for word in ("tool", "user", "tool")] == [1, 2, 1]
    assert kinds.number(OTHER, "user") == 1


def test_words_too_many_share_the_last_number_and_take_no_memory() -> None:
    kinds = TurnKinds()
    found = [kinds.number(ONE, f"w{number}") for number in range(1000)]
    assert found[:TURN_KINDS_MAX] == list(range(1, 1 + TURN_KINDS_MAX))
    assert set(found[TURN_KINDS_MAX:]) == {TURN_KINDS_MAX}
    assert len(kinds._numbers[ONE]) < TURN_KINDS_MAX
    assert kinds.number(ONE, "w0") == 1
