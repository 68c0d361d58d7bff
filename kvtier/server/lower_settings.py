"""What the configuration says of each tier below memory, as the core wants it."""

from __future__ import annotations

from kvtier.config import Config
from kvtier.config_remote import RemoteConfig
from kvtier.config_values import AUTO
from kvtier.core.settings import LowerSettings
from kvtier.policy.admission import Admission
from kvtier.server.nvme_paths import NvmePaths
from kvtier.types import TierName

UNLIMITED_BYTES_PER_HOUR = 2.0**60
# Other nodes write there too, but it is the largest of all tiers.
REMOTE_STAY_SECONDS_MIN = 3600.0
HOURS_OF_AUTO = 24  # What nvme.write_bytes_per_hour is by itself: the whole pool once in so long.


def lower_settings(config: Config, paths: NvmePaths | None) -> dict[TierName, LowerSettings]:
    """The tiers below memory, the fastest first."""
    found: dict[TierName, LowerSettings] = {}
    if config.cxl.is_set:
        # Memory does not wear: whatever has its checksum is copied at once.
        found[TierName.CXL] = LowerSettings(
            write_bytes_per_hour=UNLIMITED_BYTES_PER_HOUR,
            is_compared=False,
            admission=Admission.ALL,
        )
    found[TierName.NVME] = _nvme_settings(config, paths)
    if config.remote.is_set:
        found[TierName.REMOTE] = _remote_settings(config.remote)
    return found


def _remote_settings(config: RemoteConfig) -> LowerSettings:
    admission, given = Admission(config.admission), config.write_bytes_per_hour
    is_bounded = given != AUTO
    if admission is Admission.FORECAST and not is_bounded:
        admission = Admission.REUSED  # Nothing would say how likely is enough.
    return LowerSettings(
        write_bytes_per_hour=given if is_bounded else UNLIMITED_BYTES_PER_HOUR,
        admission=admission,
        is_spare_written=False,
        is_filling_free=False,
        forecast_seconds_min=REMOTE_STAY_SECONDS_MIN,
    )


def _nvme_settings(config: Config, paths: NvmePaths | None) -> LowerSettings:
    if paths is None:
        return LowerSettings()
    given = config.nvme.write_bytes_per_hour
    return LowerSettings(
        write_bytes_per_hour=paths.capacity_bytes / HOURS_OF_AUTO if given == AUTO else given,
        admission=Admission(config.nvme.admission),
    )
