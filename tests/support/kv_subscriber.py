"""Reads KV cache events as a router does, with a msgpack of its own: what is where, by medium."""

from __future__ import annotations

import time
from collections import defaultdict
from types import TracebackType
from typing import Any

import msgpack
import zmq

END_MARK = (-1).to_bytes(8, "big", signed=True)
Place = tuple[str, str]  # Medium, locality.


class Subscriber:
    """`books`: by place, the hashes that are there by what was announced."""

    def __init__(self, endpoint: str, replay: str = "", topic: str = "") -> None:
        self.books: dict[Place, set[bytes]] = defaultdict(set)
        self.stored: dict[bytes, dict[str, Any]] = {}  # By hash: the first event with token ids.
        self.next_of: dict[str, int] = {}
        self.gap_count = self.clear_count = self.batch_count = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._socket.connect(endpoint)
        self._replay = replay

    def read(self, seconds: float = 0.2) -> int:
        """Until nothing has come for so long; how many batches came."""
        count = 0
        while self._socket.poll(int(1000 * seconds)):
            self._take(*self._socket.recv_multipart())
            count += 1
        return count

    def skip(self) -> int:
        """Lose what has come."""
        count = 0
        while self._socket.poll(200):
            self._socket.recv_multipart()
            count += 1
        return count

    def ask_replay(self, first: int, topic: bytes | None = None) -> int:
        """From sequence `first` on; how many batches there were."""
        socket = self._context.socket(zmq.DEALER)  # A REQ socket reads one answer only.
        socket.connect(self._replay)
        number = first.to_bytes(8, "big")
        socket.send_multipart([b"", number] if topic is None else [b"", number, topic])
        count = 0
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and socket.poll(5000):
            empty, *frames = socket.recv_multipart()
            assert empty == b""
            if frames[-2] == END_MARK:
                socket.close(linger=0)
                return count
            self._take(*frames, is_replayed=True)
            count += 1
        socket.close(linger=0)
        raise TimeoutError("the answer to a replay has no end")

    def begin_anew(self) -> None:
        """As after a restart of the daemon, whose batches are counted from 0 again."""
        self.read(0.3)
        self.next_of.clear()
        self.ask_replay(0)

    def _take(
        self, topic: bytes, number: bytes, payload: bytes, *, is_replayed: bool = False
    ) -> None:
        name, sequence = topic.decode(), int.from_bytes(number[:8], "big")
        expected = self.next_of.get(name, 0)
        if sequence < expected:
            return  # Seen before.
        if sequence > expected and not is_replayed:
            self.gap_count += 1
            if self._replay:
                self.ask_replay(expected, topic)
                if self.next_of.get(name, 0) > sequence:
                    return
        self.next_of[name] = sequence + 1
        self.batch_count += 1
        _, events, *_ = msgpack.unpackb(payload)
        for event in events:
            self._note(event)

    def _note(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.books.clear()
            self.clear_count += 1
            return
        place = event["medium"], event["locality"]
        if event["type"] == "BlockStored":
            self.books[place].update(event["block_hashes"])
            if event["token_ids"]:
                for block in event["block_hashes"]:
                    self.stored.setdefault(block, event)
        else:
            assert event["type"] == "BlockRemoved"
            self.books[place].difference_update(event["block_hashes"])

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.destroy(linger=0)
