"""A second process of a benchmark: one JSON line in, one JSON line out.

A peer is a module below kvtier/cli run with `-m`; its `main` hands a function to `serve`, which is
called with each order. End of input ends the peer, so it never outlives the benchmark.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

from kvtier.cli.private_daemon import end_process
from kvtier.errors import KVTierError, Unavailable

Order = dict[str, object]
E = TypeVar("E")


class Peer:
    """The benchmark's end of a peer."""

    def __init__(self, process: subprocess.Popen[str], name: str) -> None:
        self._process = process
        self._name = name

    def order(self, what: str, **facts: object) -> None:
        """Send an order; `answer` waits for what came of it. Raises as `answer` does."""
        assert self._process.stdin is not None, "stdin is a pipe"
        try:
            self._process.stdin.write(json.dumps({"what": what, **facts}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._has_ended() from None

    def answer(self) -> Order:
        """Raises Unavailable when the peer failed; its own message stands on stderr."""
        assert self._process.stdout is not None, "stdout is a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise self._has_ended()
        return cast(Order, json.loads(line))

    def _has_ended(self) -> Unavailable:
        return Unavailable(f"the benchmark's {self._name} process has ended, see above")

    def ask(self, what: str, **facts: object) -> Order:
        self.order(what, **facts)
        return self.answer()


@contextmanager
def started_peer(module: str) -> Iterator[Peer]:
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield Peer(process, module.rpartition(".")[2])
    finally:
        end_process(process)


def serve(handle: Callable[[Order], Order]) -> int:
    """In the peer: answer orders until the input ends."""
    try:
        for line in sys.stdin:
            answer = handle(cast(Order, json.loads(line)))
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
    except KVTierError as error:
        sys.stderr.write(f"kvtier: {type(error).__name__}: {error}\n")
        return 1
    return 0


def serve_engine(open_engine: Callable[[Order], E], play: Callable[[E, Order], Order]) -> int:
    """As `serve`, of two orders: "open", which makes the engine, and "play"."""
    engine: E | None = None

    def handle(order: Order) -> Order:
        nonlocal engine
        if order["what"] == "open":
            engine = open_engine(order)
            return {}
        if engine is None:
            raise KVTierError("open comes first")
        return play(engine, order)

    return serve(handle)
