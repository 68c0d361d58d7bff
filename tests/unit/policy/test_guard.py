"""The guard: whether what was learned beats age alone, on a sample of the chains."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.policy import guard
from kvtier.policy.curves import CurvesPolicy
from kvtier.policy.eviction import Evictable, EvictionOrder
from kvtier.policy.guard import AgeAlone, Guard, ShadowCache
from tests.support.policy_blocks import FakeBlocks

CHAIN = 10


class Youngest:
    """Learned to keep what nobody comes back to."""

    def of(self, kind: int, used_at: float) -> float:
        return -used_at

    def of_all(self, used_at: np.ndarray) -> np.ndarray:
        return -used_at


def chain(number: int) -> np.ndarray:
    return (np.arange(CHAIN) + 1000 * number + 1).astype(np.uint64)


def kinds() -> np.ndarray:
    return np.ones(CHAIN, np.int16)


def test_shadow_evicts_the_tails_of_what_its_worth_says_and_counts_leading_blocks() -> None:
    shadow = ShadowCache(AgeAlone())
    for number in range(3):
        shadow.use(chain(number).tolist(), float(number + 1), kinds())
    shadow.shrink(25)
    shadow.use(chain(0).tolist(), 4.0, kinds())
    assert shadow.hit_count == 5
    shadow.use(chain(2).tolist(), 5.0, kinds())
    assert shadow.hit_count == 15
    shadow.end(chain(2).tolist())
    shadow.shrink(20)
    shadow.use(chain(1).tolist(), 6.0, kinds())
    assert shadow.hit_count == 25, "the ended session was not the first to go"


def guarded(learned: guard.Worth, count: int) -> Guard:
    """Many chains that come again soon, in a cache that holds what comes between."""
    found = Guard(learned, count)
    now = 1.0
    for number in range(4000):
        now += 0.2
        for one in (number, max(0, number - 200)):
            found.on_request(chain(one), 0, now, 1)
        found.note_full(count, now)
    return found


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BLOCKS_MIN", 200)


@pytest.mark.usefixtures("few")
def test_what_was_learned_gives_way_where_age_alone_has_more_hits() -> None:
    found = guarded(Youngest(), 8000)
    learned, by_age = found.hit_counts
    assert by_age > 2 * learned > 0
    assert found.order is EvictionOrder.BY_AGE
    assert guarded(AgeAlone(), 8000).order is EvictionOrder.LEARNED


@pytest.mark.usefixtures("few")
def test_windows_without_hits_do_not_bring_back_what_has_lost() -> None:
    found = guarded(Youngest(), 8000)
    hits = found.hit_counts
    for number in range(4000, 4000 + 5 * int(3 * guard.WINDOW_SECONDS)):
        found.on_request(chain(number), 0, 0.2 * number, 1)
    assert found.hit_counts == hits
    assert found.order is EvictionOrder.BY_AGE


def test_guard_is_off_where_a_sample_would_be_too_small() -> None:
    assert guarded(Youngest(), 8000).order is EvictionOrder.UNGUARDED


@pytest.mark.usefixtures("few")
def test_chains_of_one_system_prompt_are_not_all_sampled_nor_all_left_out() -> None:
    policy = CurvesPolicy(FakeBlocks(count_max=1 << 16))
    assert policy._guard is not None
    none, prompt = np.zeros(0, np.int32), (np.arange(8) + 1).astype(np.uint64)
    for number in range(2000):
        policy.on_request(none, np.concatenate([prompt, chain(number + 1)]), float(number))
    chains = (len(policy._guard._learned) - len(prompt)) / CHAIN
    bits = policy._guard._bits
    assert 0.5 < chains / (2000 / 2**bits) < 2


def test_policy_evicts_by_age_while_its_guard_says_so() -> None:
    policy = CurvesPolicy(FakeBlocks())
    for row in range(4):
        policy.on_insert(np.array([row], np.int32), float(row))
        policy.on_leaf(row)
    policy._worth.of_all = Youngest().of_all  # type: ignore[method-assign]
    assert next(iter(policy.nominate(1, lambda _: Evictable.YES))) == (3,)
    assert policy._guard is not None
    policy._guard.order = EvictionOrder.BY_AGE
    policy._guard.note_full = lambda *_: None  # type: ignore[method-assign]
    assert next(iter(policy.nominate(1, lambda _: Evictable.YES))) == (0,)
