"""Which shards an engine's workers hold, and the namespace that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvtier.checksum import combine_checksums, shard_checksum
from kvtier.connector.jobs import FailReason, StepOutcome
from kvtier.connector.settings import ConnectorSettings
from kvtier.connector.sharding import Place, whole_namespace
from kvtier.errors import ConfigError
from kvtier.namespace import NamespaceSpec
from tests.support.connector_rig import (
    SHARD_BYTES,
    Rig,
    begin,
    committed,
    content_of,
    numbered_chain,
    spec_of,
)

Parts = dict[Place, NamespaceSpec]


def stages(sizes: Sequence[int], *, replicas: int = 1) -> Parts:
    """An engine of pipeline stages of these sizes, of which every rank has `replicas`."""
    spec, parts, rank_count = spec_of(), Parts(), len(sizes) * replicas
    for rank in range(rank_count):
        stage, replica = divmod(rank, replicas)
        layers = f"layers of {sizes[stage]} bytes"
        place = Place(rank, rank_count, stage, replica, replicas, f"stage {stage}")
        parts[place] = replace(spec, shard_bytes=sizes[stage], extra={"layers": layers})
    return parts


def test_shard_is_as_large_as_the_largest_and_there_are_as_many_as_differ() -> None:
    whole = whole_namespace(stages([4096, 2048], replicas=2))
    assert (whole.shard_count, whole.shard_bytes) == (2, 4096)


def test_one_rank_alone_or_replicas_alone_are_the_namespace_of_their_shard() -> None:
    alone = stages([4096])
    assert whole_namespace(alone) == next(iter(alone.values()))
    assert whole_namespace(stages([4096], replicas=4)) == next(iter(alone.values()))


@pytest.mark.parametrize(
    "other",
    [
        stages([2048, 4096]),  # Order.
        stages([4096, 4096]),  # Sizes.
        stages([4096, 2048, 2048]),  # Count.
        stages([4096]),
    ],
)
def test_count_order_and_sizes_of_shards_make_another_namespace(other: Parts) -> None:
    ours, theirs = whole_namespace(stages([4096, 2048])), whole_namespace(other)
    assert ours.fingerprint() != theirs.fingerprint()


def test_order_is_told_although_all_shards_have_one_form() -> None:
    """As those of tensor parallelism have: what they hold is told by words alone."""
    spec = spec_of()
    words = ["heads 0", "heads 1"]
    ours, theirs = (
        whole_namespace({Place(n, 2, n, part=word): spec for n, word in enumerate(order)})
        for order in (words, words[::-1])
    )
    assert ours.fingerprint() != theirs.fingerprint()


def test_rank_with_weights_of_its_own_makes_a_namespace_of_its_own() -> None:
    parts = stages([4096, 2048])
    last = max(parts, key=lambda place: place.rank)
    other = parts | {last: replace(parts[last], weights="v2")}
    assert whole_namespace(parts).fingerprint() != whole_namespace(other).fingerprint()


def test_ranks_that_do_not_make_one_engine_are_refused() -> None:
    parts = stages([4096, 2048])
    first = next(iter(parts))
    with pytest.raises(ConfigError, match="do not make one engine"):
        whole_namespace({first: parts[first]})
    with pytest.raises(ConfigError, match="differ in block_tokens"):
        whole_namespace(parts | {first: replace(parts[first], block_tokens=99)})
    replicas = stages([4096], replicas=2)
    first = next(iter(replicas))
    with pytest.raises(ConfigError, match="in different forms"):
        whole_namespace(replicas | {first: replace(replicas[first], layout="y")})


def test_shard_of_two_workers_is_stored_by_one_of_them_in_turns() -> None:
    rig = Rig(worker_count=4, replica_count=2)
    for number in range(4):
        rig.offload(f"r{number}", numbered_chain(2, f"r{number} "))
    stored = [len(copier.copied_out) for copier in rig.copiers]
    assert stored == [4, 4, 4, 4], "each of two shards, 8 blocks, is stored once, in turns"
    assert len(rig.namespace.resident) == 8
    assert rig.scheduler.stats().offloaded_bytes == 8 * 2 * SHARD_BYTES
    rig.check_nothing_held()


def test_all_workers_of_a_shard_load_it() -> None:
    rig = Rig(worker_count=4, replica_count=2)
    chain = numbered_chain(3)
    rig.offload("a", chain)
    assert rig.onboard("b", chain, first=20) == 3
    assert rig.step() == StepOutcome(onboarded=("b",))
    for rank, copier in enumerate(rig.copiers):
        wanted = [content_of(block_hash, rank // 2) for block_hash in chain]
        assert np.array_equal(copier.blocks[20:23], wanted)
    rig.check()


def test_block_of_replicas_is_committed_after_all_of_them_have_reported() -> None:
    """The one that stores nothing reports at once: it must not stand for the other."""
    rig = Rig(worker_count=2, replica_count=2)
    begin(rig, "a", numbered_chain(2))
    rig.plan()
    assert len(rig.lanes[0].copies) + len(rig.lanes[1].copies) == 1
    rig.results()
    rig.answer()
    assert rig.client.commits == []
    rig.copy()
    rig.results()
    rig.answer()
    assert committed(rig) == numbered_chain(2)


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_failure_of_any_worker_fails_the_load_on_all(failing: int) -> None:
    rig = Rig(worker_count=4, replica_count=2)
    rig.offload("a", numbered_chain(3))
    rig.onboard("b", numbered_chain(3), first=20)
    rig.copiers[failing].failures = 1
    assert rig.step() == StepOutcome(failed=("b",))


@pytest.mark.parametrize("failing", [0, 1])
def test_failure_of_any_shard_drops_the_block(failing: int) -> None:
    rig = Rig(worker_count=2)
    rig.copiers[failing].failures = 1
    begin(rig, "a", numbered_chain(2))
    rig.step()
    assert rig.namespace.resident == {}
    assert rig.scheduler.stats().dropped_blocks[FailReason.COPY] == 2


def test_checksums_of_replicated_shards_are_those_of_the_workers_that_stored() -> None:
    settings = ConnectorSettings(worker_count=4, stock_blocks=8, worker_checksums=True)
    rig = Rig(worker_count=4, replica_count=2, settings=settings)
    chain = numbered_chain(2)
    rig.offload("a", chain)
    for commit in rig.client.commits:
        shards = [shard_checksum(content_of(commit.block_hash, shard)) for shard in (0, 1)]
        assert commit.checksum == combine_checksums(shards)


@pytest.mark.parametrize(
    "places",
    [
        [Place(0, 2, 0, 0, 2), Place(1, 2, 0, 0, 2)],  # Both the same replica.
        [Place(0, 2, 0), Place(1, 2, 2)],  # No shard 1.
        [Place(0, 2, 0, 0, 2), Place(1, 2, 1)],  # A replica that is missing.
        [Place(0, 2, 0), Place(1, 2, 0)],  # Two for one shard that say they are alone.
    ],
)
def test_places_that_leave_a_shard_to_nobody_are_refused(places: list[Place]) -> None:
    with pytest.raises(ConfigError, match="do not make one engine"):
        whole_namespace(dict.fromkeys(places, spec_of()))
