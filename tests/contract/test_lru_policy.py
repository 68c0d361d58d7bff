"""LruPolicy keeps the contract of eviction policies."""

from __future__ import annotations

from kvtier.policy.eviction import EvictionPolicy
from kvtier.policy.lru import LruPolicy
from tests.contract.eviction_contract import EvictionPolicyContract


class TestLruPolicy(EvictionPolicyContract):
    def make_policy(self) -> EvictionPolicy:
        return LruPolicy()
