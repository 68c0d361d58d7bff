"""Whose namespaces are is remembered for as long as anything may be left of them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from kvtier.config import Config
from kvtier.config_tenant import TenantConfig
from kvtier.server import owners as owners_module
from kvtier.server.owners import Owners
from kvtier.server.tenants import owners_of
from tests.support.recording_core import RecordingManager
from tests.unit.server.test_namespaces import SPEC, namespaces_of

ONE, TWO = bytes(16), bytes([1]) * 16


def test_a_later_life_knows_whose_they_are(tmp_path: Path) -> None:
    Owners(tmp_path / "owners").note(ONE, "red")
    assert Owners(tmp_path / "owners").known() == {ONE: "red"}


def test_what_nothing_is_left_of_is_forgotten(tmp_path: Path) -> None:
    owners = Owners(tmp_path)
    owners.note(ONE, "red")
    owners.note(TWO, "blue")
    owners.keep_only({TWO})
    assert owners.known() == Owners(tmp_path).known() == {TWO: "blue"}
    assert len(list(tmp_path.iterdir())) == 1


def test_where_another_tier_outlives_the_daemon_nothing_is_forgotten(tmp_path: Path) -> None:
    owners = Owners(tmp_path, is_nvme_all=False)
    owners.note(ONE, "red")
    owners.keep_only(())
    assert Owners(tmp_path).known() == {ONE: "red"}


def test_there_are_so_many_at_most_and_the_newest_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners_module, "OWNERS_MAX", 1)
    Owners(tmp_path).note(ONE, "red")
    [first] = tmp_path.iterdir()
    os.utime(first, (1.0, 1.0))
    Owners(tmp_path).note(TWO, "blue")
    assert Owners(tmp_path).known() == {TWO: "blue"}
    assert not first.exists()


def test_without_tiers_that_outlive_the_daemon_nothing_is_left_to_remember(tmp_path: Path) -> None:
    config = Config(tenant={"red": TenantConfig(socket="/run/red.sock")})
    Owners(tmp_path / "owners").note(ONE, "red")
    owners = owners_of(config, tmp_path)
    assert owners is not None
    assert owners.known() == {}


def test_of_a_namespace_that_is_open_it_is_remembered_whatever_is_on_nvme(tmp_path: Path) -> None:
    owners = Owners(tmp_path / "owners")
    owners.note(ONE, "red")
    namespaces = namespaces_of(RecordingManager(), tmp_path, owners)

    async def open_and_keep() -> None:
        await namespaces.open(SPEC)
        await namespaces.keep_owners(set())

    asyncio.run(open_and_keep())
    assert set(owners.known()) == {SPEC.fingerprint()}
