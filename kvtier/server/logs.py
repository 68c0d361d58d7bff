"""Log lines: one an event, a constant message, the values as fields.

The message is the event's name: events and their fields are declared in log_events.py, and a test
holds the code to it. A line that is written while a call of a request is worked off says which.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime

LIMIT_SECONDS = 10.0
LEFT_OUT = "lines left out"
request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The engine's id of the request that the call under way is about."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z info session opened session=1 role=both`."""

    def format(self, record: logging.LogRecord) -> str:
        words = [_instant(record), record.levelname.lower(), record.getMessage()]
        words += [f"{name}={_word(value)}" for name, value in _fields(record).items()]
        line = " ".join(words)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": _instant(record),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "module": record.name.removeprefix("kvtier."),
            **_fields(record),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class RequestIds(logging.Filter):
    """Adds the request that a line is about, where the line itself does not name it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "request", None) is None and (current := request_id.get()):
            record.request = current
        return True


class RateLimit(logging.Filter):
    """Lets `lines_max` lines of one event pass in `LIMIT_SECONDS`, and tells how many it did not.

    By the records' own time. What ends the daemon always passes. Each tenant's are counted by
    themselves: nobody can drown what is said of others.
    """

    def __init__(self, handler: logging.Handler, lines_max: int) -> None:
        super().__init__()
        self._handler = handler
        self._lines_max = lines_max
        self._began_at = 0.0
        # By event and tenant, since `_began_at`.
        self._counts: dict[tuple[str, str | None], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not 0 <= record.created - self._began_at < LIMIT_SECONDS:
            self.tell()
            self._began_at = record.created
        # Events are constants: a library that makes its messages up is counted by its place.
        event = record.msg if record.name.startswith("kvtier") else f"{record.name}:{record.lineno}"
        key = event, getattr(record, "tenant", None)
        count = self._counts[key] = self._counts.get(key, 0) + 1
        return count <= self._lines_max or record.levelno >= logging.CRITICAL

    def tell(self) -> None:
        """One line for each event of which lines were left out."""
        counts, self._counts = self._counts, {}
        for (event, tenant), count in counts.items():
            if count > self._lines_max:
                fields = {"of": event, "count": count - self._lines_max, "tenant": tenant}
                extra = {"name": __name__, "msg": LEFT_OUT, "levelno": logging.WARNING}
                record = logging.makeLogRecord({**extra, "levelname": "WARNING", **fields})
                self._handler.emit(record)


def configure(form: str, level: str, lines_max: int = 1000) -> None:
    """Send everything to standard error in this form."""
    handler = logging.StreamHandler(sys.stderr)
    limit = RateLimit(handler, lines_max)
    handler.addFilter(limit)
    handler.addFilter(RequestIds())
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # They tell of things that the daemon counts itself.
    for library in ("asyncio", "grpc"):
        logging.getLogger(library).setLevel(logging.WARNING)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(record).items()
        if name not in _STANDARD and value is not None
    }


def _instant(record: logging.LogRecord) -> str:
    instant = datetime.fromtimestamp(record.created, UTC)
    return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _word(value: object) -> str:
    """Quoted where a space, a quote or a line break would make the line ambiguous."""
    text = str(value)
    if text and text.isprintable() and not set(text) & {" ", '"', "="}:
        return text
    return json.dumps(text)
