"""What is asked of every system, and in which order: rounds in which all take turns.

A system that fails is left out from there on, with its reason; the others go on. `figures` makes
medians of the samples.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.rivals.drivers.serve import BLOCK_COUNT
from benchmarks.rivals.link import Figures, Link, NotMeasured
from kvtier.cli.output import say
from kvtier.cli.processes import cpu_seconds, memory_of

START_SECONDS_MAX = 90.0
CALL_SECONDS_MAX = 60.0
RESTART_SECONDS_MAX = 20.0
DOWN_SECONDS = 15.0  # Longer than Mooncake's master waits for a client, which is ten.
_PAUSE_SECONDS = 0.15  # After each measure, for what daemons do behind an answer.
_SETTLE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    tokens: int = 131_072
    match_rounds: int = 40
    transfer_rounds: int = 15
    disk_rounds: int = 3
    starts: int = 3
    idle_seconds: float = 15.0
    pool_bytes: int = 1 << 30
    disk_pool_bytes: int = 512 << 20
    # As many as it takes to have every page of a pool touched, by whoever maps it.
    warm_rounds: int = 18


@dataclass(slots=True)
class System:
    """One that is measured, or why it no longer is."""

    name: str
    start: Callable[[str], contextlib.AbstractContextManager[Link]]
    has_disk: bool = True
    about: Figures = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    facts: Figures = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    link: Link | None = None
    pids: list[int] = field(default_factory=list)

    def add(self, **figures: float) -> None:
        for name, figure in figures.items():
            self.samples.setdefault(name, []).append(figure)


class Harness:
    def __init__(self, systems: Sequence[System], sizes: Sizes, folder: Path, tag: str) -> None:
        self._systems = systems
        self._sizes = sizes
        self._folder = folder
        self._tag = tag
        self._life = 0
        self._turn = 0

    def run(self) -> None:
        sizes = self._sizes
        for number in range(sizes.starts - 1):  # One more start comes with the daemons that stay.
            say(f"start {number + 1} of {sizes.starts}")
            for system in self._systems:
                with self._running([system], is_disk=False):
                    pass
        with self._running(self._systems, is_disk=False):
            self._each("daemon", self._measure_memory)
            self._measure_idle()
            self._each("match", self._prepare_match)
            self._rounds("match", sizes.match_rounds, self._match, warm_rounds=3)
            self._rounds("transfer", sizes.transfer_rounds, self._transfer, sizes.warm_rounds)
        with self._running([one for one in self._systems if one.has_disk], is_disk=True):
            self._rounds("disk", sizes.disk_rounds, self._disk, warm_rounds=0)
            self._each("restart", self._restart)

    # ------------------------------------------------------------------------------ the daemons

    @contextlib.contextmanager
    def _running(self, systems: Sequence[System], *, is_disk: bool) -> Iterator[None]:
        """Their daemons, started one after the other."""
        self._life += 1
        with contextlib.ExitStack() as stack:
            for system in systems:
                with self._reasons(system, "disk" if is_disk else "start"):
                    system.link = stack.enter_context(system.start(f"{system.name}-{self._life}"))
                    self._start(system, is_disk)
            try:
                yield
            finally:
                for system in systems:
                    system.link = None

    def _start(self, system: System, is_disk: bool) -> None:
        folder = self._folder / f"{system.name}-{self._life}"
        folder.mkdir()
        assert system.link is not None
        system.about = system.link.ask("about", seconds_max=START_SECONDS_MAX)
        started = system.link.ask(
            "start",
            seconds_max=START_SECONDS_MAX,
            folder=str(folder),
            tag=f"{self._tag}-{self._life}",
            disk=is_disk,
            pool_bytes=self._sizes.disk_pool_bytes if is_disk else self._sizes.pool_bytes,
        )
        system.pids = started["pids"]
        if not is_disk:
            system.add(start_s=started["start_s"])

    @contextlib.contextmanager
    def _reasons(self, system: System, phase: str) -> Iterator[None]:
        """Notes why the phase was not measured, and leaves the system out of what follows."""
        try:
            yield
        except NotMeasured as error:
            say(f"{system.name}: {phase} not measured: {error}")
            system.reasons[phase] = str(error)
            if system.link is not None:
                system.link.end()
            system.link = None

    def _running_ones(self) -> list[System]:
        return [system for system in self._systems if system.link is not None]

    def _each(self, phase: str, measure: Callable[[System, Link], None]) -> None:
        for system in self._running_ones():
            assert system.link is not None
            with self._reasons(system, phase):
                measure(system, system.link)

    def _rounds(
        self,
        phase: str,
        count: int,
        measure: Callable[[System, Link, bool], None],
        warm_rounds: int,
    ) -> None:
        """All take turns; who begins changes from round to round."""
        for number in range(-warm_rounds, count):
            self._turn += 1
            running = self._running_ones()
            first = self._turn % max(1, len(running))
            for system in [*running[first:], *running[:first]]:
                assert system.link is not None
                with self._reasons(system, phase):
                    measure(system, system.link, number >= 0)
            if number in (-warm_rounds, count // 2, count - 1):
                say(f"{phase}: round {number + 1} of {count}")

    # ------------------------------------------------------------------------------ what is asked

    def _measure_memory(self, system: System, _: Link) -> None:
        """Before any block is there: no page of a pool is counted, whoever made it how."""
        system.add(rss_mib=sum(memory_of(pid).own_bytes for pid in system.pids) / 2**20)

    def _measure_idle(self) -> None:
        """All at the same time; nobody asks anything."""
        say(f"idle for {self._sizes.idle_seconds:g} s")
        time.sleep(_SETTLE_SECONDS)
        running = [one for one in self._running_ones() if one.pids]
        before = [sum(map(cpu_seconds, one.pids)) for one in running]
        started = time.monotonic()
        time.sleep(self._sizes.idle_seconds)
        seconds = time.monotonic() - started
        for system, spent in zip(running, before, strict=True):
            used = sum(map(cpu_seconds, system.pids)) - spent
            system.add(idle_core_percent=100 * used / seconds)

    def _prepare_match(self, system: System, link: Link) -> None:
        asked = link.ask("prepare_match", seconds_max=START_SECONDS_MAX, tokens=self._sizes.tokens)
        system.facts["match_asked_count"] = asked["asked_count"]

    def _match(self, system: System, link: Link, counts: bool) -> None:
        found = link.ask("match", seconds_max=CALL_SECONDS_MAX)
        _assert_all_hit(found, system.facts["match_asked_count"])
        if counts:
            system.add(match_ms=found["match_ms"], match_hold_ms=found["hold_ms"])

    def _transfer(self, system: System, link: Link, counts: bool) -> None:
        down = link.ask("offload", seconds_max=CALL_SECONDS_MAX, turn=self._turn)
        time.sleep(_PAUSE_SECONDS)
        up = link.ask("onboard", seconds_max=CALL_SECONDS_MAX)
        time.sleep(_PAUSE_SECONDS)
        link.ask("forget", seconds_max=CALL_SECONDS_MAX)
        _assert_all_hit(up)
        if counts:
            system.add(offload_ms=down["offload_ms"], onboard_ms=up["onboard_ms"])
            system.add(onboard_hold_ms=up["hold_ms"], wrong_count=up["wrong_count"])

    def _disk(self, system: System, link: Link, counts: bool) -> None:
        limit: dict[str, Any] = {"seconds_max": CALL_SECONDS_MAX}
        written = link.ask("write_down", turn=self._turn, **limit)
        link.ask("empty_memory", turn=self._turn, **limit)
        time.sleep(_PAUSE_SECONDS)
        read = link.ask("onboard", wait_seconds=10.0, **limit)
        _assert_all_hit(read)
        if "disk_count" in read and read["disk_count"] != read["hit_count"]:
            raise NotMeasured("its memory was not emptied")
        if counts:
            system.add(disk_write_ms=written["write_ms"], disk_read_ms=read["onboard_ms"])
            system.add(wrong_count=read["wrong_count"])

    def _restart(self, system: System, link: Link) -> None:
        """At once; and for who then has nothing, with a daemon that was gone for a while."""
        for name, down_seconds in (("restart", 0.0), ("restart_later", DOWN_SECONDS)):
            found = self._restart_after(system, link, down_seconds)
            system.facts[name] = found
            if "back_s" in found:
                return

    def _restart_after(self, system: System, link: Link, down_seconds: float) -> Figures:
        """kill -9, and on: what the first answer knows, and when all of it is read back right."""
        started = time.monotonic()
        found = link.ask("restart", seconds_max=START_SECONDS_MAX, down_seconds=down_seconds)
        while time.monotonic() < started + down_seconds + RESTART_SECONDS_MAX:
            read = link.ask("onboard", seconds_max=CALL_SECONDS_MAX, wait_seconds=10.0)
            system.add(wrong_count=read["wrong_count"])
            found["read_count"] = read["hit_count"]
            if read["hit_count"] == found["asked_count"]:
                found["back_s"] = time.monotonic() - started - down_seconds
                break
            time.sleep(_PAUSE_SECONDS)
        return found


def _assert_all_hit(found: Figures, asked_count: int = BLOCK_COUNT) -> None:
    if found["hit_count"] != asked_count:
        raise NotMeasured(f"{found['hit_count']} of {asked_count} blocks are a hit")


def figures(system: System) -> Figures:
    """For the JSON: medians, how far the samples spread, and what was not measured."""
    samples = {name: values for name, values in system.samples.items() if values}
    found: Figures = {name: median(values) for name, values in samples.items()}
    found["wrong_count"] = sum(samples.get("wrong_count", []))
    found["spread"] = {
        name: [min(values), max(values)]
        for name, values in samples.items()
        if name != "wrong_count" and len(values) > 1
    }
    found["rounds"] = {name: len(values) for name, values in samples.items()}
    return {**found, **system.facts, "about": system.about, "not_measured": system.reasons}
