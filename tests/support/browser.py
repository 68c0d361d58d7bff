"""A headless Chromium that opens one page, and a go-between that sees all it asks for.

Chromium runs on a time of its own, which stands still while it waits for an answer; so the
go-between answers slowly where real time has to pass. What is asked of any other place than this
machine comes by it as well, as Chromium takes it for its proxy.
"""

from __future__ import annotations

import http.server
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BINARY = shutil.which("chromium-headless-shell") or shutil.which("chromium")
needs_browser = pytest.mark.skipif(BINARY is None, reason="no chromium is installed")


class GoBetween(http.server.ThreadingHTTPServer):
    """Hands everything on to `target`; `slow_path` takes that many seconds."""

    def __init__(self, target: str, slow_path: str, seconds: float) -> None:
        self.target = target
        self.slow_path = slow_path
        self.seconds = seconds
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: GoBetween

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if not self.path.startswith("/"):
            self.send_error(502, "this is outside")
            return
        if self.path == self.server.slow_path:
            time.sleep(self.server.seconds)
        request = f"http://{self.server.target}{self.path}"
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                status, headers, body = answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            status, headers, body = error.code, error.headers, error.read()
        self.send_response(status)
        for name in ("Content-Type", "Content-Security-Policy", "Content-Length"):
            if name in headers:
                self.send_header(name, headers[name])
        self.end_headers()
        self.wfile.write(body)

    def do_CONNECT(self) -> None:
        self.server.asked.append(self.path)
        self.send_error(502, "this is outside")

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """What was asked is in `asked`."""


@contextmanager
def go_between(target: str, slow_path: str, seconds: float) -> Iterator[GoBetween]:
    server = GoBetween(target, slow_path, seconds)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def opened(
    between: GoBetween, path: str, folder: Path, *, milliseconds: int, size: str = "1080,960"
) -> str:
    """The page's elements after that many milliseconds of its time."""
    return _run([*_command(between, folder, milliseconds, size), "--dump-dom", between.url + path])


def picture(between: GoBetween, path: str, to: Path, *, milliseconds: int, size: str) -> None:
    """The page as a PNG, for the documents."""
    command = _command(between, to.parent, milliseconds, size)
    _run([*command, f"--screenshot={to}", between.url + path])


def _command(between: GoBetween, folder: Path, milliseconds: int, size: str) -> list[str]:
    return [
        *(str(BINARY), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--disable-background-networking", "--no-first-run", "--disable-component-update"),
        *(f"--user-data-dir={folder / 'profile'}", f"--window-size={size}"),
        f"--proxy-server={between.url}",
        f"--virtual-time-budget={milliseconds}",
    ]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
