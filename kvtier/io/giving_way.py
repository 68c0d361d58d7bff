"""A thread that gives way to others while it is in a call that takes a core for nothing.

Some libraries wait by asking without a rest. Where cores are few, those who do what is waited for
have to share them with whoever asks: on two busy cores a put of 64 MiB to Mooncake took 302 ms
instead of 340 when the thread that asks gave way, and 67 ms of processor time instead of 84.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Others weigh more than twice as much. With more steps the end of a call would be seen late where
# all cores are busy.
NICE_STEPS = 4


class GivingWay:
    """Lowers the priority of threads for a while, in a process that may raise it again.

    That takes CAP_SYS_NICE or an RLIMIT_NICE. Elsewhere nothing is done: a thread that kept its low
    priority would be put aside, on a busy machine, while it has the interpreter's lock.
    """

    def __init__(self) -> None:
        """Blocks for as long as a thread takes to begin and end."""
        self.is_possible = False
        trial = threading.Thread(target=self._try, name="kvtier-giving-way", daemon=True)
        trial.start()
        trial.join()

    @contextmanager
    def given(self) -> Iterator[None]:
        """For the calling thread alone."""
        if not self.is_possible:
            yield
            return
        thread = threading.get_native_id()
        before = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, before + NICE_STEPS)
        try:
            yield
        finally:
            os.setpriority(os.PRIO_PROCESS, thread, before)

    def _try(self) -> None:
        """In a thread that ends with its priority, whatever that is then."""
        thread = threading.get_native_id()
        try:
            before = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, before + 1)
            os.setpriority(os.PRIO_PROCESS, thread, before)
        except OSError:
            return
        self.is_possible = True
