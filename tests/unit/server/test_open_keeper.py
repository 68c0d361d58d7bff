"""With whom memory is left, by the configuration and by what there is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier import config
from kvtier.config_restart import RestartConfig
from kvtier.errors import ConfigError
from kvtier.server.keeping import Keeper, open_keeper
from tests.support.parking_places import FakeFdStore, HolderProcess


def keeper(restart: RestartConfig, environment: dict[str, str] | None = None) -> Keeper:
    return open_keeper(restart, environment or {}, [])


@pytest.mark.parametrize("keep", ["auto", "systemd", "holder", "off"])
def test_where_there_is_nobody_the_daemon_does_without(keep: str, tmp_path: Path) -> None:
    holder = str(tmp_path / "nobody.sock") if keep != "systemd" else ""
    assert not keeper(RestartConfig(keep=keep, holder=holder)).is_on


@pytest.mark.parametrize(("keep", "is_on"), [("auto", True), ("holder", True), ("off", False)])
def test_a_holder_is_asked_where_it_is_wanted(keep: str, is_on: bool, tmp_path: Path) -> None:
    holder = HolderProcess(tmp_path / "hold.sock")
    found = keeper(RestartConfig(keep=keep, holder=str(holder.path)))
    assert found.is_on == is_on
    found.close()
    holder.end()


@pytest.mark.parametrize(
    ("keep", "is_on"), [("auto", True), ("systemd", True), ("holder", False), ("off", False)]
)
def test_the_store_of_the_unit_is_used_where_it_is_wanted(
    keep: str, is_on: bool, tmp_path: Path
) -> None:
    store = FakeFdStore(tmp_path / "notify")
    environment = {"NOTIFY_SOCKET": str(store.path), "FDSTORE": "4096"}
    restart = RestartConfig(keep=keep, holder=str(tmp_path / "nobody.sock"))
    found = keeper(restart, environment)
    assert found.is_on == is_on
    found.close()
    store.close()


def test_what_was_handed_over_and_nobody_wants_is_closed() -> None:
    reader, writer = os.pipe()
    open_keeper(RestartConfig(keep="off"), {}, [("slab-1", writer)])
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_holder_without_its_path_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match=r"restart\.holder"):
        config.load(None, {"restart.keep": "holder"})
