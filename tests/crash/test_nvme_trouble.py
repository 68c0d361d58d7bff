"""A disk in trouble below the driver of a whole daemon, at each call of its lives: both laws hold,
what the trouble did not hit comes back, and no engine hears of it.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from kvtier.pools.superblock import fitting_geometry
from tests.support.forms import is_torture, state_finding
from tests.support.nvme_daemon import make_pool
from tests.support.nvme_script import CHAIN, FIRST, SECOND, Life, Script, Told
from tests.support.troubled_disk import Disk, Place, Trouble

SEGMENT_BYTES = 2 << 20  # 16 blocks: three chains and a part of a fourth.
POOL_BYTES = 18 << 20
STALL_SECONDS = 0.9
LONG_STALL_SECONDS = 5.0
# Beyond what a call may take, and beyond the longest pause of this machine.
CALL_SECONDS = 1.0
# Less than a stall: what is in memory does not wait for it.
HOT_SECONDS = 0.45
LONG_HOT_SECONDS = 1.0
# What ends in the same life as it began, or is seen by nobody.
SILENT = {Trouble.SHORT_ONCE, Trouble.STALL, Trouble.BIT_FLIP}
# Where it comes in the short form.
SHORT_FORM = {
    Trouble.EIO: Place(1, "blocks", "write", 5),
    Trouble.SHORT_ONCE: Place(1, "blocks", "read", 1),
    Trouble.SHORT: Place(1, "table", "write", 1),
    Trouble.BIT_FLIP: Place(1, "blocks", "read", 0),
    Trouble.NO_SPACE: Place(1, "table", "write", 1),
    Trouble.GONE: Place(2, "blocks", "read", 0),
    Trouble.STALL: Place(1, "blocks", "read", 0),
}


def play(
    directory: Path,
    trouble: Trouble | None = None,
    at: Place | None = None,
    *,
    stall_seconds: float = STALL_SECONDS,
) -> tuple[Told, Disk]:
    """The script on a new pool."""
    shutil.rmtree(directory)
    directory.mkdir()
    pool = directory / "pool"
    make_pool(pool, pool_bytes=POOL_BYTES, segment_bytes=SEGMENT_BYTES)
    geometry = fitting_geometry(POOL_BYTES, path_count=1, segment_bytes=SEGMENT_BYTES)
    disk = Disk(geometry, trouble, at, stall_seconds)
    return Script(directory, disk, pool).run(), disk


def check_bounds(told: Told, where: str, *, hot_seconds_max: float = HOT_SECONDS) -> None:
    """Law 2."""
    margin = CALL_SECONDS + told.pause_seconds
    late = {call: seconds for call, seconds in told.overtime.items() if seconds > margin}
    assert not late, f"{where}: {late} beyond what they may take"
    assert told.hot_misses == 0, f"{where}: {told.hot_misses} misses of a block in memory"
    was_up = any(not life.refusal for life in told.lives[:2])
    assert bool(told.hot_hits) == was_up, where
    hot_seconds_max += told.pause_seconds
    assert told.hot_seconds <= hot_seconds_max, f"{where}: {told.hot_seconds} s"


def check_state(life: Life, trouble: Trouble, at: Place, where: str) -> None:
    """The state that the metric tells is one of those that the trouble may bring, and it is said
    once."""
    allowed = {"on"}
    if trouble is Trouble.GONE and life.was_hit:
        allowed = {"on", "off"} if at.kind == "read" else {"off"}
    elif trouble is Trouble.NO_SPACE and life.was_hit:
        allowed = {"on", "read_only"} if at.kind == "read" else {"read_only"}
    elif trouble in (Trouble.EIO, Trouble.SHORT) and life.was_hit:
        allowed = {"on", "read_only", "off"}
    assert life.state in allowed, f"{where}: {life}"
    told = [line for line in life.log_lines if line == "nvme tier is worse off"]
    assert told == life.log_lines, f"{where}: {life}"
    # Trouble may come as late as the close, when nobody asks for the state any more.
    assert (life.state != "on") <= len(told) <= 1, f"{where}: {life}"


def check_told(trouble: Trouble, at: Place, life: Life, where: str) -> None:
    """A tier hit by an error of the disk is not used on as if all were well."""
    is_record = at.area in ("headers", "table") and at.kind == "write"
    if not life.was_hit or not (is_record or at.area == "blocks"):
        return
    if trouble is Trouble.EIO or (trouble is Trouble.NO_SPACE and at.kind == "write"):
        assert life.state == "read_only", f"{where}: {life}"
    if trouble is Trouble.GONE:
        assert life.state == "off", f"{where}: {life}"


def missing_max(trouble: Trouble, at: Place) -> int:
    """Chains that may come short in a life with the trouble."""
    if trouble is Trouble.STALL:
        return 2  # One that waits for the call, and a prefetch for which that leaves no room.
    # One that the call is about. A header is worth a segment, and so is a page of the table.
    is_record = at.area in ("headers", "table") and trouble is not Trouble.SHORT_ONCE
    return 4 if is_record else 1


def lost_max(trouble: Trouble, at: Place) -> int:
    """Chains of which a part may be lost for good."""
    if trouble not in (Trouble.BIT_FLIP, Trouble.SHORT):
        return 0  # An error is no reason to forget what is on the disk.
    return {"blocks": 1, "table": 4, "headers": 4}.get(at.area, 0)


def check_usefulness(told: Told, trouble: Trouble, at: Place, where: str) -> None:
    """What was safe, and not hit, comes back: at once if the tier can be read, and in the end."""
    lost_count_max = lost_max(trouble, at)
    for life in told.lives[:2]:
        missing = [name for name in life.short if name in told.safe]
        if life.state in ("on", "read_only"):
            assert len(missing) <= missing_max(trouble, at), f"{where}: {life}"
        if not life.was_hit:
            assert not life.short, f"{where}: {life}"
    last = told.lives[2]
    assert last.state == "on", f"{where}: {last}"
    back = [name for name, count in last.hits.items() if count == CHAIN]
    lost = [name for name in told.safe if name not in back]
    assert len(lost) <= lost_count_max, f"{where}: {lost} lost of {told.safe}"
    if trouble in SILENT:
        assert len(back) >= len(FIRST + SECOND) - lost_count_max, f"{where}: {last}"


def check_all(told: Told, disk: Disk, trouble: Trouble, at: Place) -> None:
    where = f"{trouble}, {at}"
    check_bounds(told, where)
    for number, life in enumerate(told.lives, start=1):
        if life.refusal:
            assert trouble is Trouble.GONE, f"{where}: {life}"
            assert "cannot be read" in life.refusal, f"{where}: {life}"
            continue
        check_state(life, trouble, at, where)
        if number == at.life:
            check_told(trouble, at, life, where)
    if disk.is_hit:
        check_usefulness(told, trouble, at, where)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[Place]:
    """Of the first two lives without trouble."""
    told, disk = play(tmp_path_factory.mktemp("d"))
    assert not any(life.short or life.refusal for life in told.lives)
    assert told.safe == FIRST + SECOND
    check_bounds(told, "no trouble")
    found = [place for place in disk.calls if place.life < 3]
    kinds = Counter((place.life, place.area, place.kind) for place in found)
    assert len(kinds) >= 19, f"the script does not do everything: {kinds}"
    return found


@pytest.mark.full_form
@pytest.mark.slow
@pytest.mark.parametrize("trouble", list(Trouble))
def test_trouble_at_any_call_costs_what_it_hits_and_no_engine_an_error(
    trouble: Trouble, calls: list[Place], socket_dir: Path
) -> None:
    places = calls if is_torture() else [SHORT_FORM[trouble]]
    missed = []
    for at in places:
        told, disk = play(socket_dir, trouble, at)
        check_all(told, disk, trouble, at)
        if not disk.is_hit:
            missed.append(at)
    assert len(missed) <= len(places) // 10, f"never called in its run: {missed}"
    if is_torture():
        state_finding(f"{trouble}: {len(places) - len(missed)} of {len(places)} calls hit")


@pytest.mark.torture
def test_stall_of_seconds_at_each_kind_of_call_delays_only_who_needs_it(
    calls: list[Place], socket_dir: Path
) -> None:
    first = {(one.life, one.area, one.kind): one for one in reversed(calls)}
    for at in first.values():
        told, disk = play(socket_dir, Trouble.STALL, at, stall_seconds=LONG_STALL_SECONDS)
        where = f"a long stall, {at}"
        assert disk.is_hit, where
        check_bounds(told, where, hot_seconds_max=LONG_HOT_SECONDS)
        last = told.lives[2]
        lost = [name for name in told.safe if last.hits[name] < CHAIN]
        assert not lost, f"{where}: {lost}"
        assert {life.state for life in told.lives} == {"on"}, f"{where}: {told.lives}"
    state_finding(f"{len(first)} stalls of {LONG_STALL_SECONDS} s")
