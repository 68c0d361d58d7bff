"""Where the slabs of a memory tier come from: this machine's memory, one node's, or a device's.

A source makes slabs and ends them; how many there may be is the stock's business, what they are for
the pool's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from kvtier.clock import Clock
from kvtier.errors import ConfigError
from kvtier.io.budget import available_bytes
from kvtier.io.nodes import node_room_bytes, read_node, read_nodes
from kvtier.io.numa import count_pages_by_node, elsewhere_text
from kvtier.io.sysfs import SYSFS
from kvtier.pools.slabs import PageKind, Slab, best_page_kind, populate_slab, punch_slab
from kvtier.types import SlabId

# Later looks at where a slab lies ask for so many of its pages: some microseconds.
SAMPLE_PAGES = 64


class SlabSource(Protocol):
    """What a stock needs; methods may be called from several threads."""

    @property
    def name(self) -> str:
        """For people: "memory", "node 1", "/dev/dax0.0"."""
        ...

    def room_bytes(self) -> int | None:
        """What could be populated now without harm to others; None when nobody tells."""
        ...

    def populate(
        self,
        slab_id: SlabId,
        slab_bytes: int,
        *,
        clock: Clock,
        is_cancelled: Callable[[], bool],
    ) -> Slab:
        """A slab that reads zeros, all its pages there; raises OSError and PopulateCancelled."""
        ...

    def adopt(self, slab: Slab) -> None:
        """This slab is in use, and was populated by a former life of the daemon."""
        ...

    def end(self, slab: Slab) -> None:
        """Nobody uses the slab any more: its bytes go back where they came from."""
        ...


class MemorySource:
    """Memfds in this machine's memory, or in that of one node; implements `SlabSource`."""

    def __init__(
        self, node: int | None = None, sysfs: Path = SYSFS, *, punches: bool = True
    ) -> None:
        """Raises ConfigError for a node that cannot give memory. `punches`: what is given back is
        empty at once for all who map it; else they keep it as it is."""
        if node is not None:
            assert_usable(node, sysfs)
        self.node = node
        self._sysfs = sysfs
        self._punches = punches
        self._wanted: PageKind | None = None

    @property
    def name(self) -> str:
        return "memory" if self.node is None else f"node {self.node}"

    def room_bytes(self) -> int | None:
        """On one node the node's: past its end the kernel does not refuse, it kills processes."""
        answers = [available_bytes()]
        if self.node is not None:
            answers.append(node_room_bytes(self.node, self._sysfs))
        known = [answer for answer in answers if answer is not None]
        return min(known) if known else None

    def populate(
        self,
        slab_id: SlabId,
        slab_bytes: int,
        *,
        clock: Clock,
        is_cancelled: Callable[[], bool],
    ) -> Slab:
        return populate_slab(
            slab_id,
            slab_bytes,
            self._page_kind(),
            clock=clock,
            is_cancelled=is_cancelled,
            node=self.node,
        )

    def adopt(self, slab: Slab) -> None:
        pass

    def end(self, slab: Slab) -> None:
        if self._punches:
            punch_slab(slab)
        else:
            os.close(slab.fd)
            slab.mapping.close()

    def _page_kind(self) -> PageKind:
        """Asked in a thread at the first slab: the answer costs up to one huge page's first touch.

        Two threads may both ask; the answer is the same.
        """
        if self._wanted is None:
            self._wanted = best_page_kind()
        return self._wanted


class SpreadSource:
    """Memfds on several nodes, as many on each; implements `SlabSource`."""

    def __init__(self, nodes: Sequence[int], sysfs: Path = SYSFS) -> None:
        """Raises ConfigError for a node that cannot give memory."""
        assert nodes, "slabs must lie somewhere"
        self._sources = {node: MemorySource(node, sysfs) for node in nodes}
        self._lock = threading.Lock()  # Guards the rest.
        self._counts = dict.fromkeys(nodes, 0)  # Slabs alive or in the making.

    @property
    def name(self) -> str:
        return f"nodes {', '.join(map(str, self._counts))}"

    def room_bytes(self) -> int | None:
        """Of the node that the next slab goes to."""
        with self._lock:
            node = self._next()
        return self._sources[node].room_bytes()

    def populate(
        self,
        slab_id: SlabId,
        slab_bytes: int,
        *,
        clock: Clock,
        is_cancelled: Callable[[], bool],
    ) -> Slab:
        with self._lock:
            node = self._next()
            self._counts[node] += 1
        try:
            return self._sources[node].populate(
                slab_id, slab_bytes, clock=clock, is_cancelled=is_cancelled
            )
        except BaseException:
            with self._lock:
                self._counts[node] -= 1
            raise

    def adopt(self, slab: Slab) -> None:
        with self._lock:
            if slab.node in self._counts:
                self._counts[slab.node] += 1

    def end(self, slab: Slab) -> None:
        punch_slab(slab)
        with self._lock:
            if slab.node in self._counts:  # Else it was adopted, from a life with other nodes.
                self._counts[slab.node] -= 1

    def _next(self) -> int:
        return min(self._counts, key=lambda node: self._counts[node])


def memory_source(nodes: Sequence[int]) -> SlabSource:
    """Of this machine's memory; `nodes`: where it must lie, anywhere when empty.

    Raises ConfigError for a node that cannot give memory.
    """
    return SpreadSource(nodes) if len(nodes) > 1 else MemorySource(nodes[0] if nodes else None)


def assert_usable(node: int, sysfs: Path = SYSFS) -> None:
    """Raise ConfigError unless this node has memory."""
    found = read_node(node, sysfs)
    if found is not None and found.memory_bytes > 0:
        return
    others = ", ".join(str(one.index) for one in read_nodes(sysfs) if one.memory_bytes > 0)
    what = "is not online" if found is None else "has no memory"
    raise ConfigError(f"NUMA node {node} {what}; those with memory: {others or 'none told'}")


def placement_finding(slab: Slab) -> str:
    """What is wrong with where a slab's pages lie, by a sample; empty when nothing is.

    They lay right when the slab was populated. Under memory pressure a kernel whose demotion is
    switched on (`numa/demotion_enabled`) may have moved some since.
    """
    if slab.node is None:
        return ""
    step_bytes = max(slab.length_bytes // SAMPLE_PAGES, 1)
    try:
        counts = count_pages_by_node(slab.mapping, step_bytes=step_bytes)
    except OSError as error:
        return f"slab {slab.id}: {error.strerror}"
    text = elsewhere_text(counts, slab.node)
    return text and f"slab {slab.id}: {text}"
