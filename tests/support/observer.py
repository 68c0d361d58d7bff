"""The test's own client: reads everything back, and counts slots."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtier.client import Client, ClientSettings, Namespace
from kvtier.errors import KVTierError
from kvtier.types import Role
from kvtier.v1 import kvtier_pb2 as pb
from tests.support import known_blocks
from tests.support.known_blocks import SHARD_BYTES, chain_hashes, check_payload, spec_of
from tests.support.processes import eventually

SETTINGS = ClientSettings(timeout_seconds=10.0, admin_timeout_seconds=10.0, retry_seconds_max=0.1)


class Observer:
    """A process that is neither killed nor stopped, and its findings."""

    def __init__(self, client: Client, namespace: Namespace) -> None:
        self.client = client
        self.namespace = namespace
        self.hit_count = 0

    def read(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks are hits, with the right bytes in the arena."""
        hits = known_blocks.onboard(self.client, self.namespace, hashes)
        self.hit_count += hits
        return hits

    def read_chain(self, label: str, count: int) -> int:
        return self.read(chain_hashes(label, count))

    def get(self, hashes: Sequence[bytes]) -> int:
        """The same as `read`, by value."""
        found = self.client.get(self.namespace, hashes)
        for one, data in zip(hashes, found, strict=False):
            check_payload(one, data, "got by value")
        return len(found)

    def get_chain(self, label: str, count: int) -> int:
        return self.get(chain_hashes(label, count))

    def offload(self, label: str, count: int) -> int:
        return known_blocks.offload(self.client, self.namespace, chain_hashes(label, count))

    def dram(self) -> pb.TierStats:
        (tier,) = [one for one in self.client.stats().tiers if one.tier == "dram"]
        return tier

    def check(self) -> None:
        """No invariant is violated and every slot is in exactly one state."""
        assert list(self.client.check().violations) == []
        tier = self.dram()
        taken = tier.ready_count + tier.reserved_count + tier.held_count
        assert tier.free_count + taken == tier.slot_count, tier
        assert tier.quarantined_count <= tier.reserved_count + tier.held_count, tier

    def wait_settled(self, seconds: float = 30.0) -> None:
        """Until nothing is reserved, quarantined or held: what is taken holds a block."""

        def is_settled() -> bool:
            tier = self.dram()
            return not (tier.reserved_count or tier.quarantined_count or tier.held_count)

        eventually(is_settled, "every slot returned", seconds)
        self.check()
        tier = self.dram()
        assert tier.free_count + tier.ready_count == tier.slot_count, tier

    def wait_back(self, seconds: float = 30.0) -> None:
        """Until the client has reconnected by itself and maps slots again."""

        found = ""

        def is_back() -> bool:
            nonlocal found
            try:
                found = str(self.client.stats())
            except KVTierError as error:
                found = f"{type(error).__name__}: {error}"
                return False
            return self.client.arena(self.namespace).mapped_slot_count > 0

        try:
            eventually(is_back, "the client reconnected by itself", seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.namespace}: {found}") from None


@contextlib.contextmanager
def observing(
    socket: Path, salt: str = "", *, needs_slots: bool = True, shard_bytes: int = SHARD_BYTES
) -> Iterator[Observer]:
    with Client(socket, role=Role.BOTH, name="observer", settings=SETTINGS) as client:
        namespace = client.open_namespace(spec_of(salt, shard_bytes))
        assert client.wait_namespace(namespace, 30), namespace.error
        observer = Observer(client, namespace)
        if needs_slots:
            observer.wait_back()
        yield observer
