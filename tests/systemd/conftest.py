"""One machine for all tests here; each begins with a stopped daemon and files as delivered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.support.systemd_machine import Impossible, SystemdMachine, systemd_machine


@pytest.fixture(scope="session")
def booted() -> Iterator[SystemdMachine]:
    with contextlib.ExitStack() as stack:
        try:
            machine = stack.enter_context(systemd_machine())
        except Impossible as reason:
            pytest.skip(str(reason))
        yield machine


@pytest.fixture
def machine(booted: SystemdMachine) -> Iterator[SystemdMachine]:
    booted.renew()
    yield booted
    booted.renew()
