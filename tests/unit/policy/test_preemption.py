"""The rule for swap or recompute, on rates that are told."""

from __future__ import annotations

from kvtier.policy.preemption import Preemption, PreemptionRule, Victim

# 10 blocks and a tail of 5 tokens: 1.65 s to compute.
VICTIM = Victim(token_count=165, block_count=10, block_tokens=16)


def measured(blocks_per_second: float, token_seconds: float = 0.01) -> PreemptionRule:
    rule = PreemptionRule(Preemption.AUTO)
    rule.note_prefill(token_seconds)
    rule.note_queued(10)
    rule.note_arrived(10, 0.0, 10 / blocks_per_second)
    return rule


def test_what_takes_less_is_chosen() -> None:
    assert measured(blocks_per_second=10).choose("a", VICTIM) is Preemption.SWAP  # 1 s + 0.05 s.
    assert measured(blocks_per_second=5).choose("a", VICTIM) is Preemption.RECOMPUTE  # 2.05 s.


def test_blocks_before_it_in_the_queue_count() -> None:
    rule = measured(blocks_per_second=10)
    rule.note_queued(7)
    assert rule.choose("a", VICTIM) is Preemption.RECOMPUTE  # 1.7 s + 0.05 s.
    rule.note_failed(7)
    assert rule.choose("b", VICTIM) is Preemption.SWAP


def test_unknown_tier_is_tried_and_a_slow_one_tried_again_now_and_then() -> None:
    rule = PreemptionRule(Preemption.AUTO)
    assert rule.choose("first", VICTIM) is Preemption.SWAP
    rule = measured(blocks_per_second=10 / 3.24)  # 3.29 s: twice the time.
    choices = [rule.choose(str(number), VICTIM) for number in range(64)]
    assert choices.count(Preemption.SWAP) == 2


def test_onboards_that_queue_up_are_not_taken_for_a_slow_tier() -> None:
    rule = PreemptionRule(Preemption.AUTO)
    for number in range(1, 4):  # All asked for at 0, one a second.
        rule.note_queued(10)
        rule.note_arrived(10, 0.0, float(number))
    assert rule.blocks_per_second == 10


def test_regret_is_what_the_other_way_would_have_saved() -> None:
    rule = measured(blocks_per_second=10)
    rule.choose("a", VICTIM)
    rule.note_asked("a", 20.0)
    rule.note_asked("a", 21.0)  # It still waits.
    rule.note_back("a", 160, 23.0)  # 3 s, and 5 tokens to compute: 3.05 s instead of 1.65 s.
    assert abs(rule.regret_seconds[Preemption.SWAP] - 1.4) < 1e-9
    rule.choose("b", VICTIM)
    rule.note_asked("b", 30.0)
    rule.note_back("b", 160, 30.5)
    assert abs(rule.regret_seconds[Preemption.SWAP] - 1.4) < 1e-9, "no regret: it was better"


def test_recomputing_is_regretted_when_the_tier_turns_out_faster() -> None:
    rule = measured(blocks_per_second=1)
    assert rule.choose("a", VICTIM) is Preemption.RECOMPUTE
    assert rule.is_recomputed("a")
    rule.blocks_per_second = 20
    rule.note_back("a", 0, 5.0)
    assert abs(rule.regret_seconds[Preemption.RECOMPUTE] - (1.65 - 0.55)) < 1e-9
    assert not rule.is_recomputed("a")


def test_mode_that_is_set_is_kept_to() -> None:
    for mode in (Preemption.SWAP, Preemption.RECOMPUTE):
        rule = PreemptionRule(mode)
        assert rule.choose("a", VICTIM) is mode
        assert rule.counts == {mode: 1}
