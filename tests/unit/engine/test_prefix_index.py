"""The table of chained hashes and the radix tree find the same blocks, whatever comes and goes."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.engine.compared.radix_tree import RadixTree
from kvtier.engine.config import IndexKind, SamplingParams
from kvtier.engine.hashing import HashChain
from kvtier.engine.prefix_index import ChainedHashes, Prefix
from tests.support.tiny_models import prompt_of, tiny_engine

BLOCK_TOKENS = 3
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
SALTS = st.sampled_from([None, "a"])


def prefix_of(token_ids: list[int], salt: str | None = None) -> Prefix:
    chain = HashChain(seed="test", block_tokens=BLOCK_TOKENS, cache_salt=salt)
    chain.extend(token_ids)
    return Prefix(token_ids, chain.hashes, salt)


def test_tree_knows_how_much_of_the_next_block_is_there() -> None:
    tree = RadixTree(BLOCK_TOKENS)
    cached = prefix_of([1, 2, 3, 4, 5, 6])
    for index, block in enumerate((10, 11)):
        assert tree.add(cached, index, block)
    asked = prefix_of([1, 2, 3, 4, 5, 9, 9, 9])
    assert tree.match(asked) == [10]
    assert tree.extra_count(asked) == 2
    assert tree.extra_count(prefix_of([9, 9, 9])) == 0
    assert tree.extra_count(prefix_of([1, 2, 3, 4, 5, 9], "salted")) == 0


def test_tree_splits_where_prompts_part_and_forgets_what_is_empty() -> None:
    tree = RadixTree(BLOCK_TOKENS)
    first, second = prefix_of([1] * 9), prefix_of([1] * 6 + [2] * 3)
    for index in range(3):
        tree.add(first, index, index)
    assert not tree.add(second, 1, 7), "it has a home"
    assert tree.add(second, 2, 3)
    assert (tree.match(first), tree.match(second)) == ([0, 1, 2], [0, 1, 3])
    for block in (2, 3, 1, 0):
        tree.remove(block)
    assert (len(tree), tree.match(first)) == (0, [])
    assert all(not root.children for root in tree._roots.values())


def test_engine_gives_equal_tokens_and_hits_with_either_and_counts_the_rest() -> None:
    shared = prompt_of(18, seed=1)
    prompts = [[*shared, *prompt_of(count, seed=count)] for count in (5, 9, 2, 13)]
    results = {}
    for kind in IndexKind:
        engine = tiny_engine(prefix_index=kind, device_block_count=24)
        results[kind] = [
            engine.generate([prompt], SamplingParams(tokens_max=7))[0] for prompt in prompts
        ]
        assert engine.check_invariants() == []
        # Each prompt but the first has two tokens of the fifth block in common with one before.
        is_tree = kind is IndexKind.RADIX
        assert engine.scheduler.sub_block_token_count == (6 if is_tree else 0)
    for one, other in zip(results[IndexKind.HASHES], results[IndexKind.RADIX], strict=True):
        assert one.token_ids == other.token_ids
        assert one.engine_cache_count == other.engine_cache_count


class IndexMachine(RuleBasedStateMachine):
    """Both, beside a dict from (salt, tokens up to a block's end) to its device block."""

    def __init__(self) -> None:
        super().__init__()
        self.indexes = (ChainedHashes(), RadixTree(BLOCK_TOKENS))
        self.homes: dict[tuple[str | None, tuple[int, ...]], int] = {}
        self.next_block = 0

    @rule(tokens=PROMPTS, salt=SALTS, data=st.data())
    def add(self, tokens: list[int], salt: str | None, data: st.DataObject) -> None:
        prefix = prefix_of(tokens, salt)
        if not prefix.hashes:
            return
        index = data.draw(st.integers(0, len(prefix.hashes) - 1))
        key = (salt, tuple(tokens[: (index + 1) * BLOCK_TOKENS]))
        for one in self.indexes:
            assert one.add(prefix, index, self.next_block) == (key not in self.homes)
        self.homes.setdefault(key, self.next_block)
        self.next_block += 1

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if not self.homes:
            return
        key = data.draw(st.sampled_from(sorted(self.homes, key=repr)))
        block = self.homes.pop(key)
        for one in self.indexes:
            one.remove(block)
            one.remove(block)  # Of no prefix now: nothing.

    @rule(tokens=PROMPTS, salt=SALTS)
    def match(self, tokens: list[int], salt: str | None) -> None:
        expected = []
        for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
            if (home := self.homes.get((salt, tuple(tokens[:end])))) is None:
                break
            expected.append(home)
        prefix = prefix_of(tokens, salt)
        assert [one.match(prefix) for one in self.indexes] == [expected, expected]

    @invariant()
    def both_have_the_same(self) -> None:
        for one in self.indexes:
            assert len(one) == len(self.homes)
            assert all(block in one for block in self.homes.values())


IndexMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestPrefixIndex = IndexMachine.TestCase
