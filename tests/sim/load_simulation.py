"""What the NVMe tier is good for: ten times more is asked for than fits in memory, nothing fails.

The disk is slow and stalls now and then, and no more may be written to it than its budget allows.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.manager import BlockManager
from kvtier.core.settings import ManagerConfig
from kvtier.core.stats import LowerCounts
from kvtier.types import BlockHash, NamespaceId, TierName
from tests.sim.simulation import SLOT_BYTES
from tests.sim.tiered_simulation import TIERED, TieredSimulation
from tests.support.fake_disk import FakeDisk
from tests.support.footprint import footprint_bytes
from tests.support.world import OnOutcome, World, chain

MEMORY_SLOTS = 192
CONVERSATION_BLOCKS = 16
WORKING_SET_TIMES = 10
WINDOW_SECONDS = 10.0
FOOTPRINT_SECONDS = 2.0
SNAPSHOT_SECONDS = 0.5
CRASH_SECONDS = 2.0

LOADED = replace(TIERED, slab_count_max=MEMORY_SLOTS // 16)


@dataclass
class Seen:
    """What went on in one window of time."""

    demoted: Counter[NamespaceId] = field(default_factory=Counter)
    promoted: Counter[NamespaceId] = field(default_factory=Counter)


class WatchedWorld(World):
    """Counts what instructions ask for."""

    def __init__(
        self,
        config: ManagerConfig,
        *,
        make_manager: Callable[[ManagerConfig], BlockManager] | None = None,
    ) -> None:
        super().__init__(config, make_manager=make_manager)
        self.windows: list[Seen] = []
        self.life_counts: Counter[int] = Counter()  # By segment.
        self.largest_moves: Counter[str] = Counter()  # Blocks begun in one event.
        self._begun: Counter[str] = Counter()

    def start(self, event: ev.Event, on_outcome: OnOutcome | None = None) -> None:
        self._begun.clear()
        super().start(event, on_outcome)
        for kind, count in self._begun.items():
            self.largest_moves[kind] = max(self.largest_moves[kind], count)

    def _run(self, done: ins.Instruction, on_outcome: OnOutcome | None) -> None:
        match done:
            case ins.Demote():
                self.window.demoted[done.namespace] += len(done.slots)
                self._begun["demote"] += len(done.slots)
            case ins.Promote():
                self.window.promoted[done.namespace] += len(done.slots)
                self._begun["promote"] += len(done.slots)
            case ins.BlocksRemoved(tier=TierName.DRAM):
                self._begun["evict"] += len(done.hashes)
            case ins.WriteLowerGone():
                self._begun["forget"] += len(done.lower_slots)
            case ins.BindSegments():
                self.life_counts.update(header.segment for header in done.headers)
        super()._run(done, on_outcome)

    @property
    def window(self) -> Seen:
        number = int(self.now / WINDOW_SECONDS)
        while len(self.windows) <= number:
            self.windows.append(Seen())
        return self.windows[number]


class LoadSimulation(TieredSimulation):
    """`play` it; then `crash` it, once."""

    faults = False
    config = LOADED
    request_seconds = 0.25
    hold_seconds = 0.4
    conversation_count = MEMORY_SLOTS * WORKING_SET_TIMES // CONVERSATION_BLOCKS
    skew = 0.03
    world_class = WatchedWorld
    world: WatchedWorld

    def __init__(self, seed: int, *, seconds: float, bytes_per_hour: float | None = None) -> None:
        self.seconds = seconds
        if bytes_per_hour is not None:
            nvme = replace(LOADED.lower[TierName.NVME], write_bytes_per_hour=bytes_per_hour)
            self.config = replace(LOADED, lower={TierName.NVME: nvme})
        self.stood: deque[tuple[float, dict[NamespaceId, set[BlockHash]]]] = deque(maxlen=20)
        super().__init__(seed)
        self.footprints: list[int] = []
        self.at(FOOTPRINT_SECONDS, self._measure)
        self.at(SNAPSHOT_SECONDS, self._note_standing)

    @property
    def counts(self) -> LowerCounts:
        counts = self.world.manager.stats().nvme
        assert counts is not None
        return counts

    def make_disks(self) -> dict[TierName, FakeDisk]:
        """Four times as much as fits in memory."""
        nvme = FakeDisk(
            segment_bytes=16 * SLOT_BYTES, segment_count=48, row_count_max=16, lane_count=2
        )
        return {TierName.NVME: nvme}

    def next_prompt(self, namespace: NamespaceId) -> str:
        paths = self.conversations[namespace]
        number = min(int(self.chance.expovariate(self.skew)), len(paths) - 1)
        return paths[number][: self.chance.randint(CONVERSATION_BLOCKS // 2, CONVERSATION_BLOCKS)]

    def crash(self) -> tuple[int, int]:
        """Kill the daemon. Of the blocks whose whole prefix stood on NVMe two seconds before, and
        that have not been given up since: (how many, how many of them come back)."""
        world = self.world
        limit = world.now - CRASH_SECONDS
        before = [whole for at, whole in self.stood if at <= limit][-1]
        stood = {
            namespace: blocks & whole_prefixes(world.namespaces[namespace].on_nvme)
            for namespace, blocks in before.items()
        }
        self.disk.sync()  # What has been written outlives the process.
        self.restart(lambda page: False)
        world.open_nvme(self.disk)
        world.finish_turns()
        prefixes = [(one, prefix_of(block)) for one, blocks in stood.items() for block in blocks]
        back = [world.match(one, prefix).matched_count == len(prefix) for one, prefix in prefixes]
        return len(back), sum(back)

    def _new_path(self) -> str:
        return "".join(self.chance.choice("abcdef") for _ in range(CONVERSATION_BLOCKS))

    def _measure(self) -> None:
        self.footprints.append(footprint_bytes(self.world.manager))
        self.at(self.world.now + FOOTPRINT_SECONDS, self._measure)

    def _note_standing(self) -> None:
        whole = {one: whole_prefixes(its.on_nvme) for one, its in self.world.namespaces.items()}
        self.stood.append((self.world.now, whole))
        self.at(self.world.now + SNAPSHOT_SECONDS, self._note_standing)


def whole_prefixes(blocks: set[BlockHash]) -> set[BlockHash]:
    """Those all of whose parents are among them."""
    return {block for block in blocks if blocks.issuperset(prefix_of(block))}


def prefix_of(block: BlockHash) -> list[BlockHash]:
    return chain(block.decode().lstrip("."))
