"""Epochs are durable, never zero, never used twice; a damaged record begins a new one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from kvtier.errors import KVTierError
from kvtier.server.epochs import EpochStore

FINGERPRINT = b"f" * 16


def store_of(directory: Path, draws: Iterable[int]) -> EpochStore:
    return EpochStore(directory, iter(draws).__next__)


def test_epoch_survives_the_store(tmp_path: Path) -> None:
    assert store_of(tmp_path, [7]).ensure(FINGERPRINT) == 7
    assert store_of(tmp_path, [8]).ensure(FINGERPRINT) == 7


def test_renewed_epoch_is_durable_when_it_is_told(tmp_path: Path) -> None:
    store = store_of(tmp_path, [7, 8])
    store.ensure(FINGERPRINT)
    assert store.renew(FINGERPRINT) == 8
    assert store_of(tmp_path, []).ensure(FINGERPRINT) == 8


def test_zero_and_used_epochs_are_drawn_again(tmp_path: Path) -> None:
    store = store_of(tmp_path, [7, 0, 8, 7, 8, 9])
    assert store.ensure(FINGERPRINT) == 7
    assert store.renew(FINGERPRINT) == 8
    assert store.renew(FINGERPRINT) == 9


def test_namespaces_do_not_share_epochs(tmp_path: Path) -> None:
    store = store_of(tmp_path, [7, 8])
    assert (store.ensure(FINGERPRINT), store.ensure(b"g" * 16)) == (7, 8)


@pytest.mark.parametrize("place", [0, 4, 20, 24, -1])
def test_any_flipped_bit_means_a_new_epoch(tmp_path: Path, place: int) -> None:
    store = store_of(tmp_path, [7])
    store.ensure(FINGERPRINT)
    path = store.path_of(FINGERPRINT)
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)
    assert store_of(tmp_path, [9]).ensure(FINGERPRINT) == 9


@pytest.mark.parametrize("length", [0, 3, 24, 31])
def test_torn_record_means_a_new_epoch(tmp_path: Path, length: int) -> None:
    store = store_of(tmp_path, [7])
    store.ensure(FINGERPRINT)
    path = store.path_of(FINGERPRINT)
    path.write_bytes(path.read_bytes()[:length])
    assert store_of(tmp_path, [9]).ensure(FINGERPRINT) == 9


def test_record_that_cannot_be_written_is_told_and_changes_nothing(tmp_path: Path) -> None:
    store = store_of(tmp_path, [7, 8])
    store.ensure(FINGERPRINT)
    store.path_of(FINGERPRINT).with_suffix(".new").mkdir()
    with pytest.raises(KVTierError, match="nothing was changed"):
        store.renew(FINGERPRINT)
    assert store.ensure(FINGERPRINT) == 7


def test_current_epochs_are_those_of_every_readable_record(tmp_path: Path) -> None:
    store = store_of(tmp_path, [7, 8, 9, 10])
    assert store.current_epochs() == {}
    store.ensure(FINGERPRINT)
    store.renew(FINGERPRINT)
    for other in (b"g" * 16, b"h" * 16):
        store.ensure(other)
    store.path_of(b"h" * 16).write_bytes(b"torn")
    (tmp_path / "note.epoch").write_bytes(b"not ours")
    (tmp_path / "abcd.epoch").write_bytes(b"nor this")
    assert store_of(tmp_path, []).current_epochs() == {FINGERPRINT: 8, b"g" * 16: 9}
