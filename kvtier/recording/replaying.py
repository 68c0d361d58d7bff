"""Feeds a recording to a core of its own and compares what that decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvtier.core.events import Event, Refitted
from kvtier.core.instructions import Continue, Instruction, Refit
from kvtier.core.manager import BlockManager
from kvtier.errors import BadRequest, KVTierError
from kvtier.policy.eviction import PolicyMaker
from kvtier.recording.decisions import Decisions
from kvtier.recording.files import Batch, Header, Recorded, RecordingFile, file_name
from kvtier.recording.values import Names
from kvtier.types import NamespaceId


@dataclass(frozen=True, slots=True)
class Difference:
    """The first event that led to something else than in the recording."""

    number: int
    event: Event
    refused: str | None  # In the recording.
    refused_now: str | None
    found: list[Instruction]  # Now.


@dataclass(slots=True)
class Replayed:
    """How far a replay has come. `reason` is why the recording ends, "" as long as it goes on."""

    event_count: int = 0
    seconds: float = 0.0
    reason: str = ""
    difference: Difference | None = None


def recorded_batches(path: Path) -> Iterator[tuple[Header, Batch | None]]:
    """All batches of a recording, from this file on; (header, None) when it was ended in order.

    Raises BadRequest where a file is damaged, breaks off, or is not there though the recording
    goes on.
    """
    while True:  # Ends: each time with a later file.
        file = RecordingFile(path)
        try:
            for batch in file.batches():
                yield file.header, batch
        finally:
            file.close()
        assert file.end is not None, "batches end with the file's end"
        if file.end.reason != "goes on":
            yield file.header, None
            return
        path = path.parent / file_name(file.header.recording, file.header.number + 1)
        if not path.exists():
            raise BadRequest(f"the recording goes on in {path.name}, which is not in {path.parent}")


class Replay:
    """A core that is told what another was told."""

    def __init__(self, header: Header, make_policy: PolicyMaker) -> None:
        if header.number:
            raise BadRequest(
                f"this file begins in mid-life, at event {header.event_first}: what the core knew "
                f"then is not in it. Begin with {file_name(header.recording, 0)}; if that has "
                "made room for others, only a recording with more of recorder.bytes can be replayed"
            )
        self.manager = BlockManager(header.manager, make_policy=make_policy)
        self.state = Replayed()
        self._names = Names()
        self._decisions = Decisions(self._names)
        self._continues: dict[int, Event] = {}
        self._continue_count = 0
        self._refits: dict[NamespaceId, list[Callable[[], object]]] = {}
        self._began: float | None = None

    def run(self, batch: Batch) -> Difference | None:
        """Until the first difference."""
        for recorded in batch.events:
            found = self._step(recorded)
            if found is not None:
                self.state.difference = found
                return found
        if self._decisions.digest() != batch.digest:
            raise BadRequest(f"the digest at event {self.state.event_count - 1} differs")
        return None

    def _step(self, recorded: Recorded) -> Difference | None:
        event = self._event_of(recorded)
        found: list[Instruction] = []
        refused = None
        try:
            found = self.manager.handle(event, recorded.now)
        except (KVTierError, AssertionError) as error:
            refused = type(error).__name__
        state = self.state
        number = state.event_count
        state.event_count += 1
        if self._began is None:
            self._began = recorded.now
        state.seconds = recorded.now - self._began
        if self._decisions.note(found, refused) != recorded.mark:
            return Difference(number, event, recorded.refused, refused, found)
        for one in found:
            if isinstance(one, Continue):
                self._continues[self._continue_count] = one.event
                self._continue_count += 1
            elif isinstance(one, Refit):
                self._refits.setdefault(one.namespace, []).append(one.work)
        return None

    def _event_of(self, recorded: Recorded) -> Event:
        if recorded.event is None:
            assert recorded.continued is not None, "an event or the number of one"
            event = self._continues.pop(recorded.continued, None)
            if event is None:
                raise BadRequest(f"event {self.state.event_count} continues what nobody began")
            return event
        if isinstance(recorded.event, Refitted):
            works = self._refits.get(recorded.event.namespace)
            if not works:
                raise BadRequest(f"event {self.state.event_count} answers what nobody asked")
            return replace(recorded.event, result=works.pop(0)())
        return recorded.event
