"""`[restart]`: with whom memory is left while the daemon is restarted."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.config_values import Choice, PathValue, option
from kvtier.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RestartConfig:
    """What is in DRAM outlives the daemon where somebody keeps its memory meanwhile; see
    operations.md."""

    keep: str = option(
        "auto",
        Choice("auto", "systemd", "holder", "off"),
        "Who keeps it. systemd: the FD store of the unit. holder: a `kvtier hold` process. auto: "
        "systemd where the unit has an FD store, else the holder if there is a path for it, else "
        "nobody.",
    )
    holder: str = option("", PathValue(), "Socket of the holder, as `kvtier hold` was given it.")


def check_restart(restart: RestartConfig) -> None:
    if restart.keep == "holder" and not restart.holder:
        raise ConfigError('restart.keep is "holder": say with restart.holder where it listens')
