"""`kvtier top`: what a daemon is doing, in a terminal, drawn anew every second.

`?` shows the keys. With --once it prints one frame as text, for scripts. When the daemon is gone it
says so and goes on trying. Exit codes: 0; 2 without a terminal; 3 when no daemon answers --once.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing

from rich.console import Console
from rich.live import Live

from kvtier.cli.connect import add_socket_argument, connected, tool_settings
from kvtier.cli.top_rates import Sample
from kvtier.cli.top_screen import LISTS, ORDERS, View, frame
from kvtier.cli.top_terminal import Terminal
from kvtier.client.client import Client
from kvtier.client.settings import ClientSettings
from kvtier.errors import BadRequest, KVTierError
from kvtier.paths import default_socket_path
from kvtier.types import Role

INTERVALS = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
REDRAW_SECONDS_MAX = 1.0
_NAME = "kvtier top"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_socket_argument(parser)
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="between two answers (1)"
    )
    parser.add_argument(
        "--once", action="store_true", help="print one frame as text, after one interval"
    )


def run(arguments: argparse.Namespace) -> int:
    address = str(arguments.socket or default_socket_path())
    view, settings = View(address, arguments.interval), tool_settings(arguments)
    if arguments.once:
        return _print_once(view, settings)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise BadRequest("kvtier top draws in a terminal, and this is none: use --once")
    with closing(Client(address, role=Role.TOOL, name=_NAME, settings=settings)) as client:
        return _Top(view, client).run()


def _print_once(view: View, settings: ClientSettings) -> int:
    with connected(view.address, name=_NAME, settings=settings) as client:
        view.before = Sample(time.monotonic(), client.stats())
        time.sleep(view.interval_seconds)
        view.sample = Sample(time.monotonic(), client.stats())
    console = Console(width=shutil.get_terminal_size().columns, no_color=True)
    with console.capture() as captured:
        console.print(frame(view, height=None, now=time.monotonic()))
    for line in captured.get().splitlines():
        print(line.rstrip())
    return 0


class _Asking:
    """Asks the daemon again and again, in a thread: a daemon that hangs holds no key up."""

    def __init__(self, client: Client, interval_seconds: float, wake: Callable[[], None]) -> None:
        self.interval_seconds = interval_seconds
        self._client = client
        self._wake = wake
        self._is_over = threading.Event()
        self._hurry = threading.Event()
        self._lock = threading.Lock()
        self._answer: Sample | KVTierError | None = None
        self._thread = threading.Thread(target=self._run, name="kvtier-top", daemon=True)
        self._thread.start()

    def take(self) -> Sample | KVTierError | None:
        """What came since the last call; None: nothing."""
        with self._lock:
            answer, self._answer = self._answer, None
            return answer

    def set_interval(self, seconds: float) -> None:
        self.interval_seconds = seconds
        self._hurry.set()

    def close(self) -> None:
        self._is_over.set()
        self._hurry.set()

    def _run(self) -> None:
        while not self._is_over.is_set():
            answer: Sample | KVTierError
            try:
                answer = Sample(time.monotonic(), self._client.stats())
            except KVTierError as error:
                answer = error
            with self._lock:
                self._answer = answer
            self._wake()
            if self._hurry.wait(self.interval_seconds):
                self._hurry.clear()


class _Top:
    def __init__(self, view: View, client: Client) -> None:
        self._view = view
        self._terminal = Terminal()
        self._asking = _Asking(client, view.interval_seconds, self._terminal.wake)
        self._is_over = False

    def run(self) -> int:
        console = Console()
        try:
            with (
                self._terminal.keys_at_once(),
                Live(console=console, screen=True, auto_refresh=False) as live,
            ):
                while not self._is_over:
                    height = console.size.height
                    picture = frame(self._view, height=height, now=time.monotonic())
                    live.update(picture, refresh=True)
                    for key in self._terminal.wait_keys(REDRAW_SECONDS_MAX):
                        self._on_key(key)
                    self._take_answer()
        finally:
            self._asking.close()
        return 0

    def _take_answer(self) -> None:
        view, answer = self._view, self._asking.take()
        if answer is None:
            return
        if isinstance(answer, KVTierError):
            if not view.trouble:
                view.trouble_since = time.monotonic()
            view.trouble = str(answer)
            return
        view.trouble = ""
        if not view.is_paused:
            view.before, view.sample = view.sample, answer

    def _on_key(self, key: str) -> None:
        view = self._view
        match key:
            case "q":
                self._is_over = True
            case "?" | "h":
                view.shows_help = not view.shows_help
            case "p" | " ":
                view.is_paused = not view.is_paused
            case "s":
                view.order = (view.order + 1) % len(ORDERS)
            case "r":
                view.is_reversed = not view.is_reversed
            case "tab":
                view.focus, view.offset = (view.focus + 1) % len(LISTS), 0
            case "up" | "k":
                view.offset = max(0, view.offset - 1)
            case "down" | "j":
                view.offset = min(view.offset + 1, self._rows_of_focus() - 1)
            case "+" | "-":
                self._change_interval(faster=key == "+")

    def _rows_of_focus(self) -> int:
        sample = self._view.sample
        if sample is None:
            return 1
        stats = sample.stats
        lists = (stats.namespaces, stats.sessions, stats.slow_calls)
        return max(1, len(lists[self._view.focus]))

    def _change_interval(self, *, faster: bool) -> None:
        current = self._view.interval_seconds
        if faster:
            chosen = max((one for one in INTERVALS if one < current), default=current)
        else:
            chosen = min((one for one in INTERVALS if one > current), default=current)
        self._view.interval_seconds = chosen
        self._asking.set_interval(chosen)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError("between 0.1 and 3600 seconds")
    return seconds
