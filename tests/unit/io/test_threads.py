"""Threads for calls that may hang: bounded in number and in what waits for them."""

from __future__ import annotations

import threading

import pytest

from kvtier.io.threads import IoThreads


def test_results_and_errors_come_back() -> None:
    threads = IoThreads("test", count=2)
    assert [threads.submit(pow, 2, n).result(5) for n in range(5)] == [1, 2, 4, 8, 16]
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result(5)
    assert threads.submit(int, "7").result(5) == 7, "the thread lives on"
    threads.shutdown()


def test_no_more_threads_than_asked_for_and_no_more_waiting() -> None:
    threads = IoThreads("bounded", count=2, waiting_max=3)
    hold, begun = threading.Event(), threading.Semaphore(0)

    def hang() -> None:
        begun.release()
        hold.wait(10)

    held = [threads.submit(hang) for _ in range(2)]
    for _ in held:
        assert begun.acquire(timeout=5)
    waiting = [threads.submit(int) for _ in range(3)]
    with pytest.raises(RuntimeError, match="3 calls wait"):
        threads.submit(int)
    hold.set()
    assert [one.result(5) for one in (*held, *waiting)] == [None, None, 0, 0, 0]
    threads.shutdown()


def test_what_was_cancelled_in_time_is_never_begun() -> None:
    threads = IoThreads("cancelled", count=1)
    hold = threading.Event()
    first = threads.submit(hold.wait, 10)
    ran: list[int] = []
    second = threads.submit(ran.append, 1)
    assert second.cancel()
    hold.set()
    assert first.result(5)
    assert threads.submit(int).result(5) == 0
    assert ran == []
    threads.shutdown()


def test_nothing_is_taken_after_the_end() -> None:
    threads = IoThreads("ended", count=1)
    threads.submit(int).result(5)
    threads.shutdown()
    with pytest.raises(RuntimeError, match="closed"):
        threads.submit(int)
