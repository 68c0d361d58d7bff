"""The control thread and the threads beside it, with real threads that wait for the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from kvtier.connector.control import ControlThread
from kvtier.connector.waiting import WaitingThreads
from kvtier.errors import KVTierError, Unavailable

ANSWER_SECONDS_MAX = 10.0
WAITING_MAX = 3


@pytest.fixture
def control() -> Iterator[ControlThread]:
    made = ControlThread(background_max=4, waiting_max=WAITING_MAX, name="test-control")
    yield made
    made.close(ANSWER_SECONDS_MAX)
    for thread in threading.enumerate():
        if thread.name.startswith("test-control"):
            thread.join(ANSWER_SECONDS_MAX)


def thread_names() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("test-control")]


class Answers:
    """What has come, taken out by hand as hooks do."""

    def __init__(self, control: ControlThread) -> None:
        self.found: list[object] = []
        self._control = control

    def note(self, answer: object) -> None:
        self.found.append(answer)

    def wait(self, count: int) -> list[object]:
        polled = threading.Event()
        for _ in range(int(ANSWER_SECONDS_MAX / 0.001)):
            self._control.drain(100)
            if len(self.found) >= count:
                break
            polled.wait(0.001)
        return self.found


def blocked(begun: threading.Semaphore, go: threading.Event, name: str) -> Callable[[], str]:
    def call() -> str:
        begun.release()
        assert go.wait(ANSWER_SECONDS_MAX)
        return name

    return call


def test_calls_that_wait_hold_up_no_other_and_run_together(control: ControlThread) -> None:
    answers, begun, go = Answers(control), threading.Semaphore(0), threading.Event()
    for index in range(WAITING_MAX):
        assert control.ask_waiting(blocked(begun, go, f"wait {index}"), answers.note)
    for _ in range(WAITING_MAX):
        assert begun.acquire(timeout=ANSWER_SECONDS_MAX)
    assert control.ask(lambda: "urgent", answers.note, urgent=True)
    assert control.ask(lambda: "background", answers.note, urgent=False)
    assert answers.wait(2) == ["urgent", "background"]
    go.set()
    assert sorted(map(str, answers.wait(5)[2:])) == ["wait 0", "wait 1", "wait 2"]


@pytest.mark.parametrize("running_count", [0, 1])
def test_machine_without_another_thread_to_give_ends_no_call(
    control: ControlThread, monkeypatch: pytest.MonkeyPatch, running_count: int
) -> None:
    """In a container with a limit; the engine steps on until all its calls have been answered."""
    answers = Answers(control)
    for index in range(running_count):
        control.ask_waiting(lambda: "before", answers.note)
        answers.wait(index + 1)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    begun, go = threading.Semaphore(0), threading.Event()
    control.ask_waiting(blocked(begun, go, "one"), answers.note)
    assert begun.acquire(timeout=ANSWER_SECONDS_MAX)
    control.ask_waiting(lambda: "two", answers.note)
    control.ask(lambda: "urgent", answers.note, urgent=True)
    go.set()
    found = answers.wait(running_count + 3)[running_count:]
    assert sorted(map(str, found)) == ["one", "two", "urgent"]


def test_more_waits_than_threads_come_one_after_another(control: ControlThread) -> None:
    answers, begun, go = Answers(control), threading.Semaphore(0), threading.Event()
    for index in range(4 * WAITING_MAX):
        control.ask_waiting(blocked(begun, go, f"wait {index}"), answers.note)
    for _ in range(WAITING_MAX):
        assert begun.acquire(timeout=ANSWER_SECONDS_MAX)
    assert not begun.acquire(timeout=0.02), "more calls at once than threads allowed"
    go.set()
    assert len(answers.wait(4 * WAITING_MAX)) == 4 * WAITING_MAX
    assert len(thread_names()) == 1 + WAITING_MAX


def test_waits_one_after_another_take_few_threads(control: ControlThread) -> None:
    assert len(thread_names()) == 1, "threads that nobody needs yet"
    waiting, count = WaitingThreads(count_max=50, name="test-control-few"), 50
    done = threading.Semaphore(0)
    for _ in range(count):
        waiting.run(done.release)
        assert done.acquire(timeout=ANSWER_SECONDS_MAX)
    # More than one when a call comes before the last thread has said that it is free.
    assert waiting.thread_count <= count // 5
    waiting.close()


def test_wait_that_fails_answers_with_its_error(control: ControlThread) -> None:
    answers = Answers(control)

    def fail() -> str:
        raise Unavailable("slow")

    def break_down() -> str:
        raise ZeroDivisionError

    control.ask_waiting(fail, answers.note)
    control.ask_waiting(break_down, answers.note)
    assert all(isinstance(one, KVTierError) for one in answers.wait(2))
    control.ask_waiting(lambda: "goes on", answers.note)
    assert answers.wait(3)[2] == "goes on"


def test_closing_waits_for_no_wait_and_its_threads_end_with_their_calls(
    control: ControlThread,
) -> None:
    answers, begun, go = Answers(control), threading.Semaphore(0), threading.Event()
    control.ask_waiting(blocked(begun, go, "wait"), answers.note)
    assert begun.acquire(timeout=ANSWER_SECONDS_MAX)
    threads = [one for one in threading.enumerate() if one.name.startswith("test-control")]
    control.close(ANSWER_SECONDS_MAX)
    assert len(thread_names()) == 1, "the control thread has not ended, or waited for"
    assert not control.ask_waiting(lambda: "late", answers.note)
    go.set()
    for thread in threads:
        thread.join(ANSWER_SECONDS_MAX)
    assert thread_names() == []
