"""What may happen to a shared folder: full, read only, vanished, writers killed, owners silent."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.clock import SystemClock
from kvtier.io.threads import IoThreads
from kvtier.pools.remote.breaker import BreakerState
from kvtier.pools.remote.engine import RemoteKey, RemoteOutcome
from kvtier.pools.remote.files import (
    MARK_NAME,
    FilesEngine,
    FilesSettings,
    outcome_of,
    prepare_root,
)
from kvtier.pools.remote.files_owner import FilesOwner, OwnerRound, OwnerSettings, keep_bounded
from kvtier.pools.remote.frame import FrameFault
from tests.support.clock import ManualClock
from tests.support.processes import eventually
from tests.support.remote_rig import RemoteRig

SECONDS = 10.0
DONE, ABSENT = RemoteOutcome.DONE, RemoteOutcome.ABSENT


def key_of(name: object) -> RemoteKey:
    return RemoteKey(f"kvtier1/files/{name}")


def block_of(fill: int, count_bytes: int = 1000) -> np.ndarray:
    return np.full(count_bytes, fill, np.uint8)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "share"
    prepare_root(root)
    return root


def play(root: Path, work: Callable[[FilesEngine], Any], capacity_bytes: int = 1 << 30) -> Any:
    async def main() -> Any:
        engine = FilesEngine(FilesSettings(root, capacity_bytes), unique="me")
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


def files_in(root: Path) -> list[Path]:
    return list(root.glob("values/**/files/*/*"))


def owner_of(root: Path, unique: str, capacity_bytes: int = 1 << 30, **more: Any) -> FilesOwner:
    clock = more.pop("clock", None) or SystemClock()
    settings = OwnerSettings(root, capacity_bytes, **more)
    return FilesOwner(settings, unique=unique, clock=clock, pause=lambda: None)


async def put(engine: FilesEngine, *names: object, count_bytes: int = 1000) -> list[RemoteOutcome]:
    values = [(key_of(name), [block_of(7, count_bytes)]) for name in names]
    return await engine.put(values, timeout_seconds=SECONDS)


async def here(engine: FilesEngine, *names: object) -> list[RemoteOutcome]:
    return await engine.exists([key_of(name) for name in names], timeout_seconds=SECONDS)


def test_a_folder_without_its_mark_is_a_share_that_is_not_mounted(root: Path) -> None:
    (root / MARK_NAME).unlink()

    async def work(engine: FilesEngine) -> None:
        assert await put(engine, "a") == [RemoteOutcome.UNREACHABLE]
        assert await here(engine, "a") == [RemoteOutcome.UNREACHABLE]
        reply = await engine.read_record(key_of("r"), timeout_seconds=SECONDS)
        assert reply.outcome is RemoteOutcome.UNREACHABLE
        assert (await engine.health(timeout_seconds=SECONDS)).outcome is RemoteOutcome.UNREACHABLE

    play(root, work)
    assert list(root.iterdir()) == [], "nothing was written below the mount point"


def test_a_folder_that_vanishes_and_comes_back_is_used_again(root: Path) -> None:
    aside = root.with_name("aside")

    async def work(engine: FilesEngine) -> None:
        assert await put(engine, "a") == [DONE]
        os.rename(root, aside)
        assert await put(engine, "b") == [RemoteOutcome.UNREACHABLE]
        assert await here(engine, "a") == [RemoteOutcome.UNREACHABLE]
        os.rename(aside, root)
        assert await put(engine, "b") == [DONE]
        assert await here(engine, "a", "b") == [DONE, DONE]

    play(root, work)


def test_a_folder_that_vanishes_after_a_look_at_it_is_not_made_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, aside = os.stat, root.with_name("aside")

    def look_and_unmount(path: Any, **more: Any) -> os.stat_result:
        found = look(path, **more)
        if str(path) == str(root / MARK_NAME) and (root / "values").exists():
            os.rename(root, aside)
        return found

    async def work(engine: FilesEngine) -> None:
        assert await put(engine, "a") == [DONE]
        shutil.rmtree(root / "values" / "kvtier1", ignore_errors=True)
        monkeypatch.setattr(os, "stat", look_and_unmount)
        assert await put(engine, "b") != [DONE]

    play(root, work)
    assert aside.exists(), "it did vanish"
    assert not root.exists(), "what is written there would hide in the mount point"


@pytest.mark.parametrize(
    ("number", "outcome"),
    [
        (errno.ENOSPC, RemoteOutcome.FULL),
        (errno.EDQUOT, RemoteOutcome.FULL),
        (errno.EROFS, RemoteOutcome.REFUSED),
        (errno.EACCES, RemoteOutcome.REFUSED),
        (errno.ESTALE, RemoteOutcome.UNREACHABLE),
        (errno.EIO, RemoteOutcome.UNREACHABLE),
        (errno.EMFILE, RemoteOutcome.FAILED),
    ],
)
def test_an_error_of_the_file_system_has_a_meaning(number: int, outcome: RemoteOutcome) -> None:
    assert outcome_of(OSError(number, "")) is outcome


MOUNTS = pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0,
    reason="unshare --mount is not permitted here",
)

IN_MOUNT = """
import asyncio, sys
from pathlib import Path
from tests.crash import test_remote_files as t
t.{work}(Path(sys.argv[1]))
"""


def in_mount(root: Path, options: str, work: str, *, before: str = "true") -> None:
    """Run a function of this module with a small tmpfs on the root, seen by it alone."""
    program = IN_MOUNT.format(work=work)
    script = (
        f'mount -t tmpfs -o size=4m tmpfs "$0" && : >"$0/{MARK_NAME}" && {before} '
        f'&& mount -o remount,{options} "$0" && exec "$1" -c "$2" "$0"'
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, str(root), sys.executable, program],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def on_full_disk(root: Path) -> None:
    async def work(engine: FilesEngine) -> None:
        outcomes = await put(engine, *range(6), count_bytes=1 << 20)
        assert RemoteOutcome.FULL in outcomes
        assert set(outcomes) <= {DONE, RemoteOutcome.FULL}
        kept = [n for n, outcome in enumerate(outcomes) if outcome is DONE]
        assert kept, outcomes
        replies = await engine.get(
            [key_of(n) for n in range(6)], value_bytes_max=1 << 30, timeout_seconds=SECONDS
        )
        for n, reply in enumerate(replies):
            assert (reply.outcome is DONE) == (n in kept), "what was refused left no trace"
        assert not list((root / "arriving").iterdir()), "half a value was left behind"
        await engine.delete([key_of(kept[0])], timeout_seconds=SECONDS)
        assert await put(engine, "again", count_bytes=1 << 19) == [DONE]

    play(root, work)


def on_read_only(root: Path) -> None:
    async def work(engine: FilesEngine) -> None:
        assert await put(engine, "a") == [RemoteOutcome.REFUSED]
        assert await here(engine, "a") == [ABSENT]
        outcome = await engine.replace_record(
            key_of("r"), expected=None, value=b"1", timeout_seconds=SECONDS
        )
        assert outcome is RemoteOutcome.REFUSED

    play(root, work)


@MOUNTS
@pytest.mark.slow
def test_a_full_disk_keeps_what_it_has_and_takes_again_later(root: Path) -> None:
    in_mount(root, "rw", "on_full_disk")


@MOUNTS
@pytest.mark.slow
def test_a_read_only_share_refuses_and_is_no_error(root: Path) -> None:
    before = 'mkdir "$0/arriving" "$0/values" "$0/records"'
    in_mount(root, "ro", "on_read_only", before=before)


def test_the_capacity_bounds_what_is_put_between_two_counts(root: Path) -> None:
    async def work(engine: FilesEngine) -> None:
        outcomes = await put(engine, *range(5), count_bytes=1000)
        assert outcomes.count(DONE) == 3
        assert outcomes.count(RemoteOutcome.FULL) == 2

    play(root, work, capacity_bytes=3000)


def test_the_owner_evicts_what_was_got_longest_ago(root: Path) -> None:
    async def fill(engine: FilesEngine) -> None:
        for name in range(10):
            assert await put(engine, name) == [DONE]
        for age, path in enumerate(sorted(files_in(root), key=lambda path: path.name)):
            os.utime(path, (1_000_000 + age, 1_000_000 + age))
        await engine.get([key_of(0)], value_bytes_max=1 << 20, timeout_seconds=SECONDS)

    play(root, fill)
    done = owner_of(root, "one", 10_000, start_ratio=0.9, stop_ratio=0.7).run_round()
    assert (done.evicted_count, done.used_bytes) == (3, 7000)

    async def look(engine: FilesEngine) -> None:
        outcomes = await here(engine, *range(10))
        assert [n for n, outcome in enumerate(outcomes) if outcome is ABSENT] == [1, 2, 3]
        health = await engine.health(timeout_seconds=SECONDS)
        assert health.used_bytes == 7000

    play(root, look)


def test_an_owner_is_followed_only_when_it_has_been_silent_for_its_time(root: Path) -> None:
    clock = ManualClock()
    one, other = (
        owner_of(root, name, clock=clock, owner_seconds=15.0) for name in ("one", "other")
    )
    assert one.run_round().is_owner
    assert not other.run_round().is_owner
    for _ in range(5):
        clock.advance(10.0)
        assert one.run_round().is_owner
        assert not other.run_round().is_owner
    clock.advance(14.9)
    assert not other.run_round().is_owner
    clock.advance(0.2)
    assert other.run_round().is_owner
    assert not one.run_round().is_owner, "the one that was silent does not take it back"


def test_an_owner_that_resigns_is_followed_at_once(root: Path) -> None:
    one, other = owner_of(root, "one"), owner_of(root, "other")
    assert one.run_round().is_owner
    one.resign()
    assert other.run_round().is_owner


def test_values_are_counted_and_evicted_while_they_are_put(root: Path) -> None:
    async def work(engine: FilesEngine) -> None:
        told: asyncio.Queue[OwnerRound | OSError] = asyncio.Queue()
        owner = owner_of(root, "me", 20_000, start_ratio=0.5, stop_ratio=0.25)
        threads = IoThreads("test-owner", count=1)
        keeping = asyncio.ensure_future(keep_bounded(owner, threads, told.put_nowait))
        assert await told.get() == OwnerRound(is_owner=True)
        assert await put(engine, *range(15)) == [DONE] * 15
        evicting = await told.get()
        assert isinstance(evicting, OwnerRound)
        assert (evicting.evicted_count, evicting.used_bytes) == (10, 5000)
        keeping.cancel()
        threads.shutdown(wait=False)
        assert (await engine.health(timeout_seconds=SECONDS)).used_bytes == 5000

    play(root, work, capacity_bytes=20_000)


def test_leftovers_of_dead_writers_are_removed_and_fresh_ones_stay(root: Path) -> None:
    arriving = root / "arriving"
    arriving.mkdir()
    for name, age in (("dead.1", 700.0), ("alive.1", 10.0)):
        (arriving / name).write_bytes(b"half a value")
        os.utime(arriving / name, (time.time() - age,) * 2)
    assert owner_of(root, "one").run_round().stale_count == 1
    assert [path.name for path in arriving.iterdir()] == ["alive.1"]


WRITER = """
import asyncio, sys
from pathlib import Path
import numpy as np
from kvtier.pools.remote.engine import RemoteKey
from kvtier.pools.remote.files import FilesEngine, FilesSettings

async def main():
    engine = FilesEngine(FilesSettings(Path(sys.argv[1]), 1 << 30), unique=sys.argv[2])
    for turn in range(1_000_000):
        fill = turn % 251
        values = [(RemoteKey(f"kvtier1/files/{n}"), [np.full(1 << 20, fill, np.uint8)])
                  for n in range(4)]
        await engine.put(values, timeout_seconds=30.0)

asyncio.run(main())
"""


@pytest.mark.slow
def test_two_processes_that_write_the_same_and_are_killed_leave_whole_values_only(
    root: Path,
) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(root), f"writer{n}"]) for n in range(2)
    ]
    try:
        eventually(lambda: len(files_in(root)) == 4, "values are there")

        async def look(engine: FilesEngine) -> int:
            seen = 0
            for turn in range(60):
                if turn == 30:
                    for writer in writers:
                        writer.send_signal(signal.SIGKILL)
                replies = await engine.get(
                    [key_of(n) for n in range(4)], value_bytes_max=1 << 20, timeout_seconds=SECONDS
                )
                for reply in replies:
                    assert reply.value is not None
                    assert len(set(reply.value[:: 1 << 10].tolist())) == 1, "a torn value"
                    seen += 1
            return seen

        assert play(root, look) == 240
    finally:
        for writer in writers:
            writer.kill()
            writer.wait(10)


def rig_play(root: Path, work: Callable[[RemoteRig], Any], **more: Any) -> None:
    async def main() -> None:
        settings = FilesSettings(root, 1 << 30, thread_count=4)
        rig = RemoteRig(FilesEngine(settings, unique="me"), **more)
        try:
            await work(rig)
        finally:
            await rig.close()

    asyncio.run(main())


def path_of(root: Path, rig: RemoteRig, number: int) -> Path:
    name = rig.key_of(number).rpartition("/")[2]
    [path] = root.glob(f"values/**/{name}")
    return path


def test_a_file_that_is_another_block_or_torn_is_a_miss(root: Path) -> None:
    async def work(rig: RemoteRig) -> None:
        assert await rig.put(range(4)) == [DONE] * 4
        paths = [path_of(root, rig, number) for number in range(4)]
        shutil.copyfile(paths[1], paths[0])
        os.truncate(paths[2], 60_000)
        with open(paths[3], "r+b") as file:  # noqa: ASYNC230  # A test may wait.
            file.seek(9_000)
            file.write(b"other")
        endings = await rig.get(range(4))
        assert endings == [FrameFault.HASH, DONE, FrameFault.LENGTH, FrameFault.TORN]

    rig_play(root, work)


def test_a_call_that_hangs_in_the_kernel_costs_its_deadline_and_one_thread(root: Path) -> None:
    """A named pipe without a writer hangs whoever opens it, as a dead file server does."""

    async def work(rig: RemoteRig) -> None:
        assert await rig.put([1, 2]) == [DONE, DONE]
        path = path_of(root, rig, 1)
        aside = path.with_name("aside")
        os.rename(path, aside)
        os.mkfifo(path)
        for _ in range(3):
            began = time.monotonic()
            assert await rig.get([1], timeout_seconds=0.1) == [RemoteOutcome.TIMED_OUT]
            assert time.monotonic() - began < 1.0
        assert rig.breaking.reading_state is BreakerState.OPEN
        await asyncio.sleep(0.25)
        assert await rig.get([2]) == [DONE], "the fourth thread serves"
        assert rig.breaking.reading_state is BreakerState.CLOSED
        with open(path, "wb"):  # noqa: ASYNC230  # The pipe is read to its end: three come back.
            pass
        os.rename(aside, path)
        assert await rig.get([1, 2]) == [DONE, DONE]

    rig_play(root, work)


def test_when_all_threads_hang_nobody_waits_beyond_the_deadline_nor_at_the_end(root: Path) -> None:
    program = HANGING.format(root=str(root))
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert time.monotonic() - began < 20.0


HANGING = """
import os, asyncio, time
from pathlib import Path
from tests.crash.test_remote_files import *

async def work(rig):
    assert await rig.put(range(6)) == [DONE] * 6
    for number in range(6):
        path = path_of(Path({root!r}), rig, number)
        path.unlink()
        os.mkfifo(path)
    began = time.monotonic()
    endings = await rig.get(range(6), timeout_seconds=0.2)
    assert set(endings) == {{RemoteOutcome.TIMED_OUT}}, endings
    assert time.monotonic() - began < 2.0

rig_play(Path({root!r}), work)
"""


def test_a_share_that_goes_away_opens_the_breaker_and_closes_it_when_it_is_back(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    aside = root.with_name("aside")

    async def work(rig: RemoteRig) -> None:
        assert await rig.put([1]) == [DONE]
        os.rename(root, aside)
        endings = [(await rig.get([1]))[0] for _ in range(5)]
        assert endings == [RemoteOutcome.UNREACHABLE] * 3 + [RemoteOutcome.OFF] * 2
        os.rename(aside, root)
        await asyncio.sleep(0.25)
        assert await rig.get([1]) == [DONE]

    with caplog.at_level("INFO"):
        rig_play(root, work)
    states = [record.__dict__["after"] for record in caplog.records if "breaker" in record.message]
    assert states == ["open", "half_open", "closed"], "one line a change"
