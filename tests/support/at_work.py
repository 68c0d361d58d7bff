"""What a fake engine does all day: it reads its mail and offloads blocks that nobody has seen."""

from __future__ import annotations

from collections.abc import Iterator

from kvtier.types import BlockHash, NamespaceId
from tests.support.fake_engine import FakeEngine
from tests.support.world import HASH_BYTES


def new_blocks() -> Iterator[BlockHash]:
    """For ever; none has a parent."""
    for number in range(1, 1 << 40):
        yield BlockHash(number.to_bytes(HASH_BYTES, "big"))


def read_mail(engine: FakeEngine) -> None:
    """Every process answers what the daemon has asked of it so far."""
    for process in engine.processes:
        if process.session is not None:
            for _ in range(len(engine.world.mail[process.session])):
                engine.read_mail(process)


def put(
    engine: FakeEngine, namespace: NamespaceId, blocks: Iterator[BlockHash], count: int
) -> None:
    """So many blocks, as far as there is room."""
    read_mail(engine)
    engine.reserve(namespace, count)
    engine.world.finish_turns()
    for _ in range(count):
        engine.offload(namespace, [next(blocks)])
    for copy in list(engine.copies):
        engine.run_copy(copy)
    for offload in list(engine.offloads):
        engine.commit(offload)
    engine.world.finish_work()
