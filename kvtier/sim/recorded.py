"""The requests in a recording, as a trace.

A request is an Acquire: the chain that was asked for, at its time. Its prompt is taken to be its
whole blocks and no more; what was computed of it afterwards is not recorded. Chains that nobody
asked for before they were committed are requests too, at the time of their commit. Namespaces share
no block, and each is a tenant.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvtier.core import events as ev
from kvtier.errors import BadRequest
from kvtier.recording.replaying import recorded_batches
from kvtier.sim.traces import Trace, TracedRequest, numbered
from kvtier.types import NamespaceId

SUFFIX = ".kvrec"


def read_recording(path: Path) -> Trace:
    """BadRequest where it is damaged, or its namespaces have blocks of several sizes."""
    reader = _Reader()
    for _, batch in recorded_batches(path):
        for one in batch.events if batch is not None else ():
            if one.event is not None and one.refused is None:
                reader.read(one.event, one.now)
    sizes = set(reader.block_tokens.values())
    if len(sizes) > 1:
        raise BadRequest(f"{path}: its namespaces have blocks of {sorted(sizes)} tokens")
    if not reader.requests:
        raise BadRequest(f"{path} has no request in it")
    return numbered(path.stem, sizes.pop() if sizes else 16, reader.requests)


class _Reader:
    def __init__(self) -> None:
        self.requests: list[TracedRequest] = []
        self.block_tokens: dict[NamespaceId, int] = {}
        self._numbers: dict[tuple[NamespaceId, bytes], int] = {}
        self._parent: dict[int, int] = {}
        self._asked: set[int] = set()
        self._began: float | None = None

    def read(self, event: ev.Event, now: float) -> None:
        match event:
            case ev.NamespaceOpened(chained=True):
                self.block_tokens[event.namespace] = event.block_tokens
            case ev.Acquire():
                self._add(event.namespace, self._chain(event.namespace, event.hashes, -1), now)
            case ev.Commit():
                parent = -1
                if event.parent is not None:
                    parent = self._numbers.get((event.namespace, event.parent), -1)
                    if parent < 0:
                        return  # Of a chain whose beginning is in a file that has gone.
                chain = self._chain(event.namespace, event.hashes, parent)
                if chain and chain[-1] not in self._asked:
                    self._add(event.namespace, self._above(parent) + chain, now)

    def _chain(self, namespace: NamespaceId, hashes: Sequence[bytes], parent: int) -> list[int]:
        found = []
        for block in hashes:
            number = self._numbers.setdefault((namespace, block), len(self._numbers))
            if self._parent.setdefault(number, parent) != parent:
                break  # Not chained after all: what comes before is one.
            found.append(number)
            parent = number
        return found

    def _above(self, block: int) -> list[int]:
        found = []
        while block >= 0:
            found.append(block)
            block = self._parent[block]
        return found[::-1]

    def _add(self, namespace: NamespaceId, chain: list[int], now: float) -> None:
        if namespace not in self.block_tokens or not chain:
            return
        self._began = now if self._began is None else self._began
        self._asked.update(chain)
        tokens = len(chain) * self.block_tokens[namespace]
        blocks = np.array(chain, dtype=np.int32)
        self.requests.append(
            TracedRequest(now - self._began, tokens, 0, blocks, tenant=int(namespace))
        )
