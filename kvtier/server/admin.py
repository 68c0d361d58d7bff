"""HTTP for people and Prometheus: a status page, /metrics and /healthz, on loopback, in threads of
its own.

Threads, because /healthz must answer when the event loop does not, and whatever other connections
do: browsers open some that stay silent. Whatever touches the daemon's state runs on the loop; the
threads only wait for it.
"""

from __future__ import annotations

import asyncio
import http.server
import json
import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from importlib.resources import files
from ipaddress import ip_address
from typing import Any, TypeVar

from prometheus_client import Metric

from kvtier.clock import Clock
from kvtier.config_address import split_address
from kvtier.errors import ConfigError
from kvtier.metrics.registry import samples_of, text_of
from kvtier.server.core_loop import CoreLoop
from kvtier.server.reporter import Reporter
from kvtier.version import VERSION

# The loop ticks once a second at least; three missed ticks are no hiccup.
TICK_AGE_SECONDS_MAX = 3.0
ANSWER_SECONDS_MAX = 5.0
REQUEST_SECONDS_MAX = 5.0  # A silent client's connection and thread are given up after this.
CONNECTIONS_MAX = 128  # Twice what fifty open pages need; more are closed at once.
# All open pages are told the same moment: what it costs the loop does not grow with their number.
STATUS_SECONDS = 1.0
TEXT = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
log = logging.getLogger(__name__)

JSON = "application/json"
# The page is whole in itself: whatever a name in it might try, nothing is loaded from elsewhere.
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
)
METRICS_TEXT = "text/plain; version=0.0.4; charset=utf-8"

ADVICE_PATH = "/advice.json"
PAGE_PATHS = ("/", "/status", "/status.json", ADVICE_PATH)
STRANGE_NAME = b"the status page answers under localhost and loopback addresses only\n"

T = TypeVar("T")
Answer = tuple[HTTPStatus, str, bytes]
NO_ANSWER: Answer = (
    HTTPStatus.SERVICE_UNAVAILABLE,
    TEXT,
    b"the event loop does not answer\n",
)


class AdminServer:
    """Listens when made; answers after `start`."""

    def __init__(
        self,
        address: str,
        core: CoreLoop,
        reporter: Reporter,
        clock: Clock,
        advice: Callable[[], dict[str, Any]],
    ) -> None:
        """`advice`: what /advice.json tells; called on the event loop."""
        self._core = core
        self._advice = advice
        self._reporter = reporter
        self._clock = clock
        self._page = files("kvtier.server").joinpath("status_page.html").read_bytes()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._status_lock = threading.Lock()
        self._status_told: tuple[float, Answer] | None = None  # Until when, and what.
        host, port = split_address("admin.address", address)
        try:
            self._server = _Server((host, port), self._answer)
        except OSError as error:
            raise ConfigError(
                f"admin.address {address}: {error.strerror}; choose another port, or off"
            ) from None
        bound = self._server.server_address
        self.address = f"{host if ':' not in host else f'[{host}]'}:{bound[1]}"

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        serve = threading.Thread(
            target=self._server.serve_forever, args=(1.0,), name="kvtier-admin", daemon=True
        )
        serve.start()

    def close(self) -> None:
        """The thread is a daemon thread: nothing waits for it."""
        self._server.socket.close()

    def _answer(self, path: str) -> Answer:
        if path == "/metrics":
            return self._told(METRICS_TEXT, text_of)
        if path == "/status.json":
            return self._recent_status()
        if path == ADVICE_PATH:
            return self._on_loop(JSON, self._tell_advice)
        if path in ("/", "/status"):
            return HTTPStatus.OK, HTML, self._page
        if path == "/healthz":
            return self._health()
        return HTTPStatus.NOT_FOUND, TEXT, b"here are /status, /metrics and /healthz\n"

    def _told(self, kind: str, words: Callable[[list[Metric]], bytes]) -> Answer:
        """What the event loop gathers, put into words here."""
        return self._on_loop(kind, self._gather, words)

    def _on_loop(
        self,
        kind: str,
        ask: Callable[[], Coroutine[Any, Any, T]],
        words: Callable[[T], bytes] = lambda told: json.dumps(told).encode(),
    ) -> Answer:
        assert self._loop is not None, "asked before the start"
        work = asyncio.run_coroutine_threadsafe(ask(), self._loop)
        try:
            return HTTPStatus.OK, kind, words(work.result(ANSWER_SECONDS_MAX))
        except TimeoutError:
            work.cancel()
            return NO_ANSWER

    def _recent_status(self) -> Answer:
        if not self._status_lock.acquire(timeout=ANSWER_SECONDS_MAX):
            return NO_ANSWER
        try:
            if self._status_told is None or self._clock.now() >= self._status_told[0]:
                answer = self._told(JSON, self._status)
                self._status_told = self._clock.now() + STATUS_SECONDS, answer
            return self._status_told[1]
        finally:
            self._status_lock.release()

    def _status(self, families: list[Metric]) -> bytes:
        samples = samples_of(families)
        told = {
            "version": VERSION,
            "uptime_seconds": samples["kvtier_uptime_seconds"],
            # The page has no use for the buckets, which are most of it.
            "samples": {name: one for name, one in samples.items() if "_bucket{" not in name},
        }
        return json.dumps(told).encode()

    async def _tell_advice(self) -> dict[str, Any]:
        return self._advice()

    async def _gather(self) -> list[Metric]:
        return self._reporter.gather()

    def _health(self) -> Answer:
        return health_of(self._clock.now() - self._core.ticked_at)


def health_of(tick_age_seconds: float) -> Answer:
    """What /healthz says when the loop ticked this long ago."""
    if tick_age_seconds > TICK_AGE_SECONDS_MAX:
        text = f"the event loop has not ticked for {tick_age_seconds:.1f} s\n"
        return HTTPStatus.SERVICE_UNAVAILABLE, TEXT, text.encode()
    return HTTPStatus.OK, TEXT, b"ok\n"


def names_loopback(host: str) -> bool:
    """Whether a request's Host is this node itself. A page of another site can make a browser ask
    us under that site's own name, which it has pointed at 127.0.0.1, and then read the answer."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    try:
        return ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return name in ("", "localhost")


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    request_queue_size = CONNECTIONS_MAX

    def __init__(self, address: tuple[str, int], answer: Callable[[str], Answer]) -> None:
        self.answer = answer
        self._places = threading.Semaphore(CONNECTIONS_MAX)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Without the base class's reverse DNS query, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Without the base class's traceback, which a client could have by hanging up."""
        error = sys.exception()
        if not isinstance(error, OSError):
            log.error("callback failed", extra={"reason": "a request by HTTP", "error": error})


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = REQUEST_SECONDS_MAX
    server: _Server

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in PAGE_PATHS and not names_loopback(self.headers.get("Host", "")):
            status, kind, body = HTTPStatus.FORBIDDEN, TEXT, STRANGE_NAME
        else:
            status, kind, body = self.server.answer(path)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        if kind == HTML:
            self.send_header("Content-Security-Policy", PAGE_POLICY)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Scrapes are no events."""
