"""Waiting for blocks of lower tiers: for how long, in which threads, and where blocks came from."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from kvtier.connector.settings import ConnectorSettings
from kvtier.types import TierName

log = logging.getLogger(__name__)


def request_wait_seconds(settings: ConnectorSettings, reading_seconds: float | None) -> float:
    """How long a request may wait for its answer if that long takes what has to be promoted for it;
    None: nothing has to be."""
    if reading_seconds is None:
        return settings.onboard_wait_seconds
    promoting_seconds = max(settings.nvme_wait_seconds_min, 2 * reading_seconds)
    # The maximum is of this part only: else a longer wait for answers would leave none for it.
    return settings.onboard_wait_seconds + min(settings.nvme_wait_seconds_max, promoting_seconds)


def sources_of(
    tiers: Sequence[tuple[TierName, int]], leased_count: int, first: int, count: int
) -> tuple[tuple[TierName, int], ...]:
    """Where the `count` leased blocks from index `first` on came from.

    `tiers` are runs in chain order; they end where the lease ends.
    """
    found = []
    run_first = leased_count - sum(run_count for _, run_count in tiers)
    for tier, run_count in tiers:
        run_end = run_first + run_count
        here_count = min(run_end, first + count) - max(run_first, first)
        if here_count > 0:
            found.append((tier, here_count))
        run_first = run_end
    return tuple(found)


class WaitingThreads:
    """At most `count_max` threads, started by demand; each runs one call at a time.

    Not joined by `close`: a call under way ends at its deadline, or with its client.
    """

    def __init__(self, *, count_max: int, name: str) -> None:
        self._count_max = count_max
        self._name = name
        # Who runs calls has bounded them to `count_max` under way.
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # bounded: see above
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    @property
    def thread_count(self) -> int:
        return len(self._threads)

    def run(self, call: Callable[[], None]) -> None:
        """Run it now, or as soon as a thread is free. From one thread only."""
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._count_max:
            self._start_another()
        if self._threads:
            self._calls.put(call)
        else:  # Nobody else ever would.
            call()

    def close(self) -> None:
        """End every thread, after the calls given to `run` before."""
        for _ in self._threads:
            self._calls.put(None)

    def _start_another(self) -> None:
        number = len(self._threads)
        thread = threading.Thread(target=self._run, name=f"{self._name}-{number}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # The machine, or a container's limit, has none to give.
            log.warning("connector calls that wait have no thread of their own: %s", error)
            return
        self._threads.append(thread)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            self._idle.release()
