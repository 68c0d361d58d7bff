"""ArcPolicy keeps the contract of eviction policies."""

from __future__ import annotations

from kvtier.policy.arc import ArcPolicy
from kvtier.policy.eviction import EvictionPolicy
from tests.contract.eviction_contract import EvictionPolicyContract
from tests.support.policy_blocks import FakeBlocks


class TestArcPolicy(EvictionPolicyContract):
    def make_policy(self) -> EvictionPolicy:
        return ArcPolicy(FakeBlocks())
