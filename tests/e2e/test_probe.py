"""A daemon starts with what the probe of this machine has proposed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.cli.main import main
from tests.support.daemon import RunningDaemon


@pytest.mark.slow
def test_a_daemon_starts_with_the_configuration_that_was_proposed_here(
    tmp_path: Path, socket_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kvtier.toml"
    assert main(["probe", "--write", str(file)]) == 0
    assert f"kvtier serve --config {file}" in capsys.readouterr().err
    # All as proposed but for the size, since the tests share the machine.
    daemon = RunningDaemon(socket_dir, {"dram.bytes": "64MiB", "admin.address": "off"})
    daemon.program += ["--config", str(file)]
    daemon.start()
    assert daemon.ready["budget"] == "64MiB"
    assert daemon.terminate() == 0
