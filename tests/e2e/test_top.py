"""`kvtier top` in a real pseudo-terminal, on a real daemon that is at work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvtier.cli.main import main
from kvtier.client.client import Client
from kvtier.namespace import NamespaceSpec
from kvtier.types import Role
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.known_blocks import chain_hashes
from tests.support.screen import ScreenProgram, on_screen

pytestmark = pytest.mark.slow

SPEC = NamespaceSpec("top-model", "w", "fp16", "l", 16, 64 << 10)
ENV = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}


def command(daemon: RunningDaemon, *words: str) -> list[str]:
    socket = ("--socket", str(daemon.socket), "--interval", "0.2")
    return [sys.executable, "-m", "kvtier.cli.main", "top", *socket, *words]


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    options = {"log.slow_call_seconds": "0"}
    with running_daemon(dram_bytes="8MiB", slab_bytes="4MiB", options=options) as running:
        running.wait_populated()
        yield running


@contextmanager
def engine_at_work(daemon: RunningDaemon) -> Iterator[None]:
    """Blocks that are there, and calls: slow ones, as this daemon is told to see them."""
    client = Client(str(daemon.socket), role=Role.BOTH, name="loaded engine")
    try:
        assert client.wait_connected(10.0)
        namespace = client.open_namespace(SPEC)
        assert client.wait_namespace(namespace, 10.0)
        hashes = chain_hashes("top", 8)
        client.put(namespace, [(block, bytes(64 << 10)) for block in hashes])
        lease = client.acquire(namespace, hashes, request_id="slow-request")
        client.release([lease])
        yield
    finally:
        client.close()


def shows(*words: str) -> object:
    return lambda text: all(word in text for word in words)


def test_a_person_sees_the_daemon_at_work_and_moves_about(daemon: RunningDaemon) -> None:
    with engine_at_work(daemon), on_screen(command(daemon), env=ENV) as screen:
        text = screen.wait_for(shows("top-model", "loaded engine", "slow-request"), "all lists")
        assert "dram" in text
        assert "ready" in text
        assert any(line.startswith("q quit") for line in screen.lines)
        screen.send("?")
        screen.wait_for(shows("what the keys do", "scroll that list"), "the help")
        screen.send("?")
        screen.wait_for(shows("top-model"), "the picture again")
        _pause(screen)
        screen.send("\t\t")
        screen.wait_for(lambda text: "slow operations" in text, "another focus")
        screen.resize(132, 40)
        screen.wait_for(lambda text: max(map(len, text.splitlines())) > 100, "the wider picture")
        screen.resize(80, 24)
        # Until it is drawn anew the columns to the right are cut off.
        screen.wait_for(shows("slots free", "q quit"), "the narrow one")
        screen.send("q")
        assert screen.wait_end() == 0
        assert screen.settings == screen.before, "the terminal is left as it was found"


def _pause(screen: ScreenProgram) -> None:
    screen.send("p")
    screen.wait_for(shows("PAUSED"), "the pause")
    screen.send("p")
    screen.wait_for(lambda text: "PAUSED" not in text, "its end")


def test_one_frame_for_scripts(daemon: RunningDaemon) -> None:
    done = subprocess.run(
        command(daemon, "--once"), env=ENV, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "kvtier top" in done.stdout
    assert "clients (" in done.stdout


def test_without_a_terminal_it_says_what_to_do(
    daemon: RunningDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--socket", str(daemon.socket)]) == 2
    assert "--once" in capsys.readouterr().err


def test_a_daemon_that_goes_and_comes_back_is_told_of_and_found_again(
    daemon: RunningDaemon,
) -> None:
    with on_screen(command(daemon), env=ENV) as screen:
        screen.wait_for(shows("ready", "kvtier top"), "the daemon")
        daemon.kill()
        screen.wait_for(shows("no answer", "trying again"), "that it is gone")
        daemon.start()
        screen.wait_for(shows("ready, up"), "that it is back")
        screen.send("\x03")
        assert screen.wait_end() == 130
        assert screen.settings == screen.before
