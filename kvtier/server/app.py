"""The daemon: builds all parts, runs them in one TaskGroup, drains and ends.

Order of a start: lock, sockets bound, READY, and only then is the pool populated in the background.
Order of an end: refuse new work, wait for what is held (at most `drain_seconds`), stop answering,
stop threads, remove the sockets.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import uvloop

from kvtier.config import Config
from kvtier.config_values import format_bytes
from kvtier.core.events import DrainStarted
from kvtier.errors import ConfigError
from kvtier.paths import default_socket_path
from kvtier.server import logs
from kvtier.server.activation import Listeners, take_passed
from kvtier.server.build import Parts, build
from kvtier.server.heap import keep_message_memory
from kvtier.server.instance import (
    claimed,
    clear_way,
    default_state_dir,
    locked,
    notify_systemd,
    raise_open_files,
    watchdog_seconds,
)
from kvtier.server.keeping import open_keeper
from kvtier.server.nvme_paths import OpenDriver, open_file
from kvtier.server.passage import CONNECTIONS_MAX
from kvtier.server.plan import Plan, plan_memory
from kvtier.server.reloading import Reloading
from kvtier.server.tenants import check_users_visible
from kvtier.server.threads import call_soon
from kvtier.server.tls_door import HANDSHAKES_MAX

log = logging.getLogger(__name__)

# A thread that computes in Python delays the event loop by this at most (the default is 5 ms).
SWITCH_SECONDS = 0.0005
HOUSEKEEPING_SECONDS = 5.0
DRAIN_POLL_SECONDS = 0.05
GRPC_GRACE_SECONDS = 0.5
IO_THREADS = "kvtier-io"  # How the names of drivers' threads begin.
WATCHDOG_SHARE = 3  # Two pings may be late before the service manager misses one.
FILES_RESERVE = 128  # Ours: libraries, epoll, slabs' table, gRPC connections of a few tools.


def serve(
    config: Config,
    open_driver: OpenDriver = open_file,
    *,
    read_again: Callable[[], Config] | None = None,
) -> int:
    """Run the daemon until it is told to end; the exit code. `open_driver`: of the NVMe tier;
    `read_again`: the configuration's file, for SIGHUP."""
    if sys.flags.optimize:
        raise ConfigError("python -O strips the assertions kvtier relies on: start it without -O")
    keep_message_memory()
    logs.configure(config.log.format, config.log.level, config.log.lines_max)
    passed = take_passed(os.environ)
    listeners = Listeners([one for one in passed if one.is_listener])
    plan = replace(_plan(config), listeners=listeners)
    left = [(one.name, one.fd) for one in passed if not one.is_listener]
    check_users_visible(config.tenant.values())
    with locked(plan.state_dir), _claimed(plan):
        keeper = open_keeper(config.restart, os.environ, left)
        if keeper.former is not None:
            plan = replace(plan, generation=keeper.former.inventory.generation)
        plan = replace(plan, keeper=keeper)
        sessions_max = config.server.sessions_max * len(plan.tenants)
        looked_at = sum(one.names_users for one in plan.tenants)
        looked_at += len(plan.tenants) if config.grpc.has_tls else 0
        connections_max = looked_at * CONNECTIONS_MAX + HANDSHAKES_MAX
        raise_open_files(3 * (sessions_max + connections_max) + plan.slab_count_max + FILES_RESERVE)
        _prepare(plan)
        sys.setswitchinterval(SWITCH_SECONDS)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run_daemon(config, plan, open_driver, read_again))


@contextmanager
def _claimed(plan: Plan) -> Iterator[None]:
    with ExitStack() as places:
        for tenant in plan.tenants:
            places.enter_context(claimed(tenant.socket))
        yield


def _prepare(plan: Plan) -> None:
    kinds = {one.socket: socket.SOCK_SEQPACKET for one in plan.tenants}
    lanes = {one.lane_socket: socket.SOCK_STREAM for one in plan.tenants}
    plan.listeners.prepare(kinds | lanes)
    for one in plan.tenants:
        clear_way(one.grpc_socket, socket.SOCK_STREAM)
        if one.names_users:
            clear_way(one.inner_grpc_socket, socket.SOCK_STREAM)
        clear_way(one.inner_tls_socket, socket.SOCK_STREAM)


class _Stopped(Exception):
    """Not an error: the orderly end of the TaskGroup."""


async def run_daemon(
    config: Config,
    plan: Plan,
    open_driver: OpenDriver,
    read_again: Callable[[], Config] | None = None,
) -> int:
    """From binding the sockets to the last line of the log; the exit code."""
    parts = await build(config, plan, open_driver)
    tls_door = None if parts.remote_door is None else parts.remote_door.tls_door
    daemon = Daemon(config, parts, Reloading(config, read_again, tls_door))
    exit_code = 0
    try:
        await daemon.run()
    except* _Stopped:
        pass
    except* Exception as failures:  # Our own mistakes: each is told with its traceback.
        exit_code = 1
        for failure in failures.exceptions:
            log.critical("daemon failed", exc_info=failure)
    finally:
        await daemon.close()
    return exit_code


class Daemon:
    """The running daemon."""

    def __init__(self, config: Config, parts: Parts, reloading: Reloading) -> None:
        self._config = config
        self._parts = parts
        self._reloading = reloading
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Ends by raising: _Stopped after a signal, anything else when something failed."""
        parts = self._parts
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        if self._reloading.is_possible:
            loop.add_signal_handler(signal.SIGHUP, self._reloading.ask)
        threading.excepthook = partial(self._on_thread_error, loop, threading.excepthook)
        async with asyncio.TaskGroup() as tasks:
            parts.core.start(tasks, parts.effects)
            if parts.events is not None:
                parts.events.start()
            if parts.remote is not None and parts.search is not None:
                parts.remote.start(tasks)
                parts.search.start(tasks)
            lease = self._config.lease  # After whoever wants to hear of namespaces.
            await parts.adopter.begin(lease.seconds_max + lease.margin_seconds)
            parts.mover.start(tasks)
            parts.refitting.start(tasks)
            for door in parts.doors:
                door.socket.start(tasks)
            tasks.create_task(self._housekeep())
            tasks.create_task(self._reloading.run())
            if (limit_seconds := watchdog_seconds(os.environ)) is not None:
                tasks.create_task(self._feed_watchdog(limit_seconds))
            for door in parts.doors:
                await door.start(tasks)
            if parts.remote_door is not None:
                await parts.remote_door.start(tasks)
            if parts.admin is not None:
                parts.admin.start(loop)
            self._announce()
            parts.adopter.start(tasks)
            parts.slabs.start(tasks)
            if parts.cxl is not None:
                parts.cxl.start()
            if parts.nvme is not None:
                parts.nvme.start(tasks)
            parts.purging.start(tasks)
            gc.collect()
            gc.freeze()  # What exists now lives as long as we do: never traverse it again.
            await self._stop.wait()
            await self._drain()
            parts.plan.keeper.end_taking_over()
            raise _Stopped

    async def close(self) -> None:
        parts = self._parts
        for door in parts.doors:
            door.socket.close()
            door.lane.close()
        await self._stop_grpc()
        if parts.admin is not None:
            parts.admin.close()
        parts.plan.keeper.close()
        parts.sessions.close()
        if parts.events is not None:
            parts.events.close()
        parts.slabs.stop()
        parts.mover.stop()
        is_quiet = parts.remote is None or await parts.remote.close()
        if parts.cxl is not None:
            parts.cxl.stop()
            parts.cxl.close()
        is_quiet &= parts.nvme is None or await parts.nvme.close()
        if parts.recorder is not None:
            parts.recorder.close()
        if is_quiet:
            parts.pool.close()  # Else a thread may still read or write there.
        self._remove_sockets()
        log.info("daemon ended")

    def _announce(self) -> None:
        """READY: sockets answer. The pool is populated from now on."""
        plan = self._parts.plan
        facts = {
            "socket": plan.socket,
            "pages": plan.page_kind,
            "budget": format_bytes(plan.slab_count_max * plan.slab_bytes),
            "slab": format_bytes(plan.slab_bytes),
            "generation": f"{plan.generation:016x}",  # As `kvtier stats` tells it.
            "admin": self._parts.admin.address if self._parts.admin else "off",
            "tcp": self._parts.tcp_address or "off",
        }
        line = " ".join(["READY", *(f"{name}={value}" for name, value in facts.items())])
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        log.info("daemon ready", extra=facts)
        notify_systemd(os.environ, "READY=1")

    async def _drain(self) -> None:
        """Until nothing is held, at most `drain_seconds`."""
        notify_systemd(os.environ, "STOPPING=1")
        self._parts.purging.stop()
        core, nvme = self._parts.core, self._parts.nvme
        for door in self._parts.doors:
            door.socket.close()
        core.post(DrainStarted())
        for _ in range(int(self._config.server.drain_seconds / DRAIN_POLL_SECONDS)):
            if not self._held_count():
                break
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        log.info("drained", extra={"held": self._held_count()})
        for door in self._parts.doors:
            door.lane.close()
        # While the TaskGroup still works off what calls have begun.
        await self._stop_grpc()
        if self._parts.search is not None:
            self._parts.search.stop()
        if self._parts.remote is not None:
            await self._parts.remote.stop()
        if nvme is not None:
            await nvme.stop()

    async def _stop_grpc(self) -> None:
        remote = self._parts.remote_door
        stops = [door.stop_grpc(GRPC_GRACE_SECONDS) for door in self._parts.doors]
        if remote is not None:
            stops.append(remote.stop_grpc(GRPC_GRACE_SECONDS))
        await asyncio.gather(*stops)

    def _held_count(self) -> int:
        """What an end would cut off; blocks that are going down too, as long as they do."""
        stats = self._parts.core.stats()
        reserved = sum(one.reserved_count for one in stats.namespaces)
        held = stats.lease_count + reserved + self._parts.data.active_count
        if stats.nvme is None:
            return held
        return held + self._parts.mover.waiting_count + stats.nvme.demoting_count

    async def _housekeep(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_SECONDS)
            self._parts.sessions.expire_greeted()
            self._parts.sessions.keep()

    async def _feed_watchdog(self, limit_seconds: float) -> None:
        """From the event loop: when it hangs, the service manager ends us, and starts us again."""
        while True:
            notify_systemd(os.environ, "WATCHDOG=1")
            await asyncio.sleep(limit_seconds / WATCHDOG_SHARE)

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            log.warning("second signal, ending at once", extra={"signal": number})
            self._remove_sockets()
            os._exit(128 + number)
        log.info("draining", extra={"signal": number})
        self._stop.set()

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """A callback raised. Our own assertions end the daemon; libraries' hiccups are told."""
        error = context.get("exception")
        if isinstance(error, AssertionError):
            self._parts.core.fail(error)
            return
        log.error("callback failed", extra={"reason": context.get("message"), "error": error})

    def _on_thread_error(
        self,
        loop: asyncio.AbstractEventLoop,
        before: Callable[[threading.ExceptHookArgs], object],
        failed: threading.ExceptHookArgs,
    ) -> None:
        """A thread that reads or writes blocks ended with a mistake of ours: so do we."""
        before(failed)
        if failed.thread is not None and failed.thread.name.startswith(IO_THREADS):
            error = failed.exc_value or failed.exc_type()
            call_soon(loop, partial(self._parts.core.fail, error))

    def _remove_sockets(self) -> None:
        plan = self._parts.plan
        for tenant in plan.tenants:
            for path in tenant.paths:
                plan.listeners.remove(path)


def _plan(config: Config) -> Plan:
    server = config.server
    socket_path = Path(server.socket).expanduser() if server.socket else default_socket_path()
    state_dir = (
        Path(server.state_dir).expanduser() if server.state_dir else default_state_dir(os.environ)
    )
    return plan_memory(config, socket_path.absolute(), state_dir, generation=_draw_generation())


def _draw_generation() -> int:
    return secrets.randbits(63) + 1
