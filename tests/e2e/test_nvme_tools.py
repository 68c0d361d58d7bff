"""NVMe pools in real files, and the tools for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.pools.nvme_paths import format_paths, open_paths
from tests.support.nvme_pools import (
    GENERATION,
    LENGTH_BYTES,
    POOL_ID,
    ROW_COUNT_MAX,
    SEGMENT_BYTES,
)


def test_a_formatted_pool_is_not_formatted_again_unasked(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    facts = {
        "pool_id": POOL_ID,
        "generation": GENERATION,
        "segment_bytes": SEGMENT_BYTES,
        "row_count_max": ROW_COUNT_MAX,
    }
    [superblock] = format_paths([path], LENGTH_BYTES, **facts)  # type: ignore[arg-type]
    assert path.stat().st_size == LENGTH_BYTES
    assert path.stat().st_blocks * 512 >= LENGTH_BYTES
    assert superblock.geometry.length_bytes <= LENGTH_BYTES
    with pytest.raises(ConfigError, match="is a pool of kvtier already; --force"):
        format_paths([path], 2 * LENGTH_BYTES, **facts)  # type: ignore[arg-type]
    assert path.stat().st_size == LENGTH_BYTES
    [driver] = open_paths([path])
    with pytest.raises(ConfigError, match="in use by another process"):
        format_paths([path], 2 * LENGTH_BYTES, force=True, **facts)  # type: ignore[arg-type]
    driver.close()
    assert path.stat().st_size == LENGTH_BYTES
    format_paths([path], 2 * LENGTH_BYTES, force=True, **facts)  # type: ignore[arg-type]
    (tmp_path / "mine").write_bytes(b"my thesis")
    with pytest.raises(ConfigError, match="holds something that is not kvtier's"):
        format_paths([tmp_path / "new", tmp_path / "mine"], LENGTH_BYTES, **facts)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()
