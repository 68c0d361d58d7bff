"""Handlers in a thread that lives only while there is work."""

from __future__ import annotations

import threading
import time

import pytest

from kvtier.client.callbacks import Callbacks


def test_joining_while_the_thread_is_being_started_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start
    is_starting = threading.Event()

    def slow_start(thread: threading.Thread) -> None:
        if thread.name == "kvtier-callbacks":
            is_starting.set()
            time.sleep(0.05)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", slow_start)
    callbacks, done = Callbacks(), threading.Event()
    submitting = threading.Thread(target=callbacks.submit, args=(done.set,))
    submitting.start()
    assert is_starting.wait(5)
    callbacks.join(5.0)
    assert done.is_set()
    submitting.join()
