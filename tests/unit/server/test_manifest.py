"""The manifest is the old one or the new one, wherever its writer died; what is foreign is told."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvtier.server import manifest as module
from kvtier.server.manifest import HALF_BYTES, Manifest, ManifestFile, ParkedSet, read_manifest

SET = ParkedSet("00" * 16, ("slab-1", "slab-2"), 32, 16, 4096, 4000)
OLD = Manifest(generation=7, table_version=1, slot_next=48, sets=(SET,))
NEW = Manifest(generation=7, table_version=1, slot_next=64)


@pytest.fixture
def file() -> Iterator[ManifestFile]:
    file = ManifestFile()
    yield file
    file.close()


def test_what_was_written_last_is_read(file: ManifestFile) -> None:
    for manifest in (OLD, NEW, OLD):
        file.write(manifest)
        assert read_manifest(file.fd) == manifest


def test_a_later_life_goes_on_where_this_one_ended(file: ManifestFile) -> None:
    file.write(OLD)
    later = ManifestFile(os.dup(file.fd))
    later.write(NEW)
    assert read_manifest(file.fd) == NEW
    later.close()


def test_a_torn_writing_leaves_the_one_before(file: ManifestFile) -> None:
    file.write(NEW)
    file.write(OLD)
    before = os.pread(file.fd, 400, HALF_BYTES)
    file.write(NEW)
    after = os.pread(file.fd, 400, HALF_BYTES)
    for cut in range(400):
        os.pwrite(file.fd, before, HALF_BYTES)
        os.pwrite(file.fd, after[:cut], HALF_BYTES)
        assert read_manifest(file.fd) in (OLD, NEW)
    assert read_manifest(file.fd) == NEW


def test_an_empty_one_is_told(file: ManifestFile) -> None:
    assert read_manifest(file.fd) == "the manifest is torn, or none"


def test_a_version_that_is_not_known_is_told(
    file: ManifestFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "VERSION", 9)
    file.write(OLD)
    monkeypatch.undo()
    assert read_manifest(file.fd) == "the manifest has version 9, this daemon reads version 1"
