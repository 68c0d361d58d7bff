"""Lines: their forms, the request that they are about, and a flood."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from kvtier.server import logs


class Lines:
    """A logger whose lines are read back."""

    def __init__(self, form: str, lines_max: int) -> None:
        self._stream = io.StringIO()
        root = logging.getLogger()
        self._before = (root.handlers[:], root.level)
        logs.configure(form, "debug", lines_max)
        [self.handler] = root.handlers
        assert isinstance(self.handler, logging.StreamHandler)
        self.handler.setStream(self._stream)
        self.log = logging.getLogger("kvtier.server.test")

    @property
    def lines(self) -> list[str]:
        return self._stream.getvalue().splitlines()

    @property
    def objects(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.lines]

    def write_at(
        self, seconds: float, event: str, level: int = logging.INFO, **fields: object
    ) -> None:
        record = self.log.makeRecord(
            self.log.name, level, __file__, 1, event, (), None, extra=fields
        )
        record.created = seconds
        logging.getLogger().handle(record)

    def end(self) -> None:
        root = logging.getLogger()
        root.handlers[:], level = self._before
        root.setLevel(level)


@pytest.fixture
def lines() -> Iterator[Lines]:
    made = Lines("json", 3)
    yield made
    made.end()


def test_a_line_is_one_object_with_its_event_and_its_fields(lines: Lines) -> None:
    lines.log.info("session opened", extra={"session": 3, "client": 'a "b"\nc', "replaces": None})
    [found] = lines.objects
    assert found.pop("time")
    assert found == {
        "level": "info",
        "event": "session opened",
        "module": "server.test",
        "session": 3,
        "client": 'a "b"\nc',
    }


def test_a_text_line_stays_one_line_whatever_a_client_calls_itself() -> None:
    made = Lines("text", 3)
    try:
        made.log.info("session opened", extra={"client": "a\nb c=d", "session": 3})
        [line] = made.lines
    finally:
        made.end()
    assert line.endswith(r'info session opened client="a\nb c=d" session=3')


def test_lines_in_a_call_of_a_request_name_it(lines: Lines) -> None:
    mark = logs.request_id.set("engine-7")
    lines.log.warning("inside")
    logs.request_id.reset(mark)
    lines.log.warning("outside")
    lines.log.warning("named", extra={"request": "other"})
    assert [one.get("request") for one in lines.objects] == ["engine-7", None, "other"]


def test_a_flood_of_one_event_is_cut_and_counted_and_holds_up_no_other(lines: Lines) -> None:
    for _ in range(10):
        lines.write_at(100.0, "session lost")
    lines.write_at(101.0, "session opened")
    assert [one["event"] for one in lines.objects] == ["session lost"] * 3 + ["session opened"]
    lines.write_at(112.0, "session lost")
    told = lines.objects[4:]
    assert [one["event"] for one in told] == [logs.LEFT_OUT, "session lost"]
    assert (told[0]["of"], told[0]["count"]) == ("session lost", 7)


def test_a_flood_of_one_tenant_holds_up_no_other_s_lines(lines: Lines) -> None:
    for tenant in ["greedy"] * 10 + ["modest"]:
        lines.write_at(100.0, "call refused", tenant=tenant)
    assert [one["tenant"] for one in lines.objects] == ["greedy"] * 3 + ["modest"]
    lines.write_at(112.0, "session lost")
    told = lines.objects[4]
    assert (told["of"], told["count"], told["tenant"]) == ("call refused", 7, "greedy")


def test_what_ends_the_daemon_is_never_left_out(lines: Lines) -> None:
    for _ in range(5):
        lines.write_at(100.0, "daemon failed", logging.CRITICAL)
    assert len(lines.lines) == 5
