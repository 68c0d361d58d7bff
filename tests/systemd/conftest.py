"""One machine for all tests here; each begins with a stopped daemon and files as delivered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.systemd_machine import SystemdMachine, systemd_machine, why_impossible


@pytest.fixture(scope="session")
def booted() -> Iterator[SystemdMachine]:
    if reason := why_impossible():
        pytest.skip(reason)
    with systemd_machine() as machine:
        yield machine


@pytest.fixture
def machine(booted: SystemdMachine) -> Iterator[SystemdMachine]:
    booted.renew()
    yield booted
    booted.renew()
