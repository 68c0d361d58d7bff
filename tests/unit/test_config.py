"""Every mistake in the configuration is one line that names the option."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kvtier import config
from kvtier.config import MIB, Config, load, parse, slab_bytes_for
from kvtier.config_values import AUTO, Emulation, format_bytes
from kvtier.errors import ConfigError


def test_defaults_are_valid_without_a_file() -> None:
    assert load(None) == Config()
    assert load(None).dram.bytes == AUTO


def test_file_sets_options_and_leaves_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    file.write_text('[dram]\nbytes = "1.5GiB"\n[lease]\nseconds_max = 30\n')
    loaded = load(file)
    assert loaded.dram.bytes == 1536 * MIB
    assert loaded.lease.seconds_max == 30.0
    assert loaded.server == Config().server


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    file.write_text('[dram]\nbytes = "1GiB"\n')
    assert load(file, {"dram.bytes": "64MiB"}).dram.bytes == 64 * MIB
    assert load(file, {"server.sessions_max": "7"}).server.sessions_max == 7


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"dram": {"byts": 1}}, "unknown option dram.byts: did you mean 'bytes'?"),
        ({"drm": {}}, "unknown section [drm]: did you mean 'dram'?"),
        ({"dram": 3}, "dram is a section: write it as a table [dram]"),
        (
            {"dram": {"bytes": "4GB"}},
            "dram.bytes is '4GB': it must be a size such as 4GiB (units: KiB, MiB, GiB, TiB)",
        ),
        ({"dram": {"bytes": True}}, 'dram.bytes is True: it must be a size such as "4GiB"'),
        ({"dram": {"bytes": 5}}, "dram.bytes is 5: it may be auto, or 2MiB to 64TiB"),
        (
            {"server": {"sessions_max": 1.5}},
            "server.sessions_max is 1.5: it must be a whole number",
        ),
        ({"dram": {"nodes": ["near"]}}, "dram.nodes has 'near': a node is a number, 0 to 1023"),
        ({"dram": {"nodes": 1}}, "dram.nodes is 1: it must be a list such as [0, 1]"),
        ({"dram": {"nodes": [1, 1]}}, "dram.nodes names a node twice: [1, 1]"),
        ({"dram": {"nodes": [1024]}}, "dram.nodes is 1024: it may be 0 to 1023"),
        ({"server": {"sessions_max": 0}}, "server.sessions_max is 0: it may be 1 to 4096"),
        ({"lease": {"seconds_max": "60"}}, "lease.seconds_max is '60': it must be a number"),
        ({"lease": {"seconds_max": math.nan}}, "lease.seconds_max is nan: it may be 1 to 3600"),
        ({"log": {"format": "xml"}}, "log.format is 'xml': it may be text, json"),
        (
            {"nvme": {"paths": "/dev/nvme1n1"}},
            "nvme.paths is '/dev/nvme1n1': it must be a list such as [\"/dev/nvme1n1\"]",
        ),
        ({"nvme": {"paths": [1]}}, "nvme.paths is 1: it must be a text in quotes"),
        ({"nvme": {"paths": [""]}}, "nvme.paths has an empty path: leave it out"),
        (
            {"nvme": {"paths": ["/p"] * 65}},
            "nvme.paths has 65 paths: it may have at most 64",
        ),
        ({"nvme": {"table_seconds": 2}}, "nvme.table_seconds is 2.0: it may be 0.05 to 1"),
        ({"server": {"socket": 1}}, "server.socket is 1: it must be a text in quotes"),
        (
            {"admin": {"address": "0.0.0.0:9464"}},
            "admin.address is '0.0.0.0:9464': only loopback addresses may be listened on",
        ),
        (
            {"admin": {"address": "9464"}},
            "admin.address is '9464': write ADDRESS:PORT, such as \"127.0.0.1:9464\"",
        ),
    ],
)
def test_mistake_is_one_line_that_names_the_option(tables: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(tables)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    "overrides",
    [
        {"dram.slab_bytes": "3MiB"},
        {"dram.slab_bytes": "64MiB", "dram.bytes": "32MiB"},
        {"dram.watermark_start": "0.5", "dram.watermark_stop": "0.9"},
        {"bytes": "64MiB"},
        {"nvme.paths": "/pool/a,/pool/b,/pool/a"},
        {"nvme.paths": "/pool/a,/pool/../pool/a"},
    ],
)
def test_options_that_contradict_each_other_are_refused(overrides: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        load(None, overrides)


def test_nodes_are_a_list_of_numbers() -> None:
    assert load(None).dram.nodes == ()
    assert load(None, {"dram.nodes": "1"}).dram.nodes == (1,)
    assert load(None, {"dram.nodes": "0,2"}).dram.nodes == (0, 2)
    assert load(None, {"dram.nodes": ""}).dram.nodes == ()
    assert parse({"dram": {"nodes": [0]}}).dram.nodes == (0,)


@pytest.mark.parametrize(
    ("emulate", "line"),
    [
        ("4GB/s", "cxl.emulate is '4GB/s': it may be off, or a table such as"),
        ({"latency": "1us"}, "it may be off, or a table such as"),
        ({"bandwidth": "4GB/s", "burst": 1}, "it may be off, or a table such as"),
        (
            {"bandwidth": "4GiB"},
            "cxl.emulate.bandwidth is '4GiB': write a number with its unit (MB/s, GB/s)",
        ),
        ({"bandwidth": 4}, "cxl.emulate.bandwidth is 4: write a number with its unit"),
        (
            {"bandwidth": "4GB/s", "latency": "9"},
            "cxl.emulate.latency is '9': write a number with its unit (ns, us, ms)",
        ),
        ({"bandwidth": "0GB/s"}, "cxl.emulate.bandwidth is 0.0: it may be 1e+06 to 1e+12"),
    ],
)
def test_what_a_tier_is_to_seem_like_is_a_bandwidth_and_a_latency(
    emulate: object, line: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        parse({"cxl": {"emulate": emulate}})
    assert line in str(raised.value)


def test_emulation_is_a_table_and_has_a_comma_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    file.write_text(
        '[cxl]\nbytes = "1GiB"\nemulate = { bandwidth = "2.5GB/s", latency = "400ns" }\n'
    )
    assert load(file).cxl.emulate == Emulation(2.5e9, pytest.approx(400e-9))
    assert load(file, {"cxl.emulate": "off"}).cxl.emulate is None
    assert load(file, {"cxl.emulate": "80MB/s"}).cxl.emulate == Emulation(80e6, 0.0)
    assert load(file, {"cxl.emulate": "1GB/s,2us"}).cxl.emulate == Emulation(1e9, 2e-6)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"node": "1", "dax": "/dev/dax0.0"}, "cxl.node and cxl.dax are set: the tier is one"),
        ({"emulate": "1GB/s"}, "cxl.emulate needs cxl.bytes"),
        ({"single_tenant": "true"}, "cxl.single_tenant is about cxl.dax and cxl.node"),
        ({"node": "1", "onboard": "direct"}, "so it needs cxl.single_tenant"),
        ({"single_tenant": "yes"}, "cxl.single_tenant is 'yes': it may be true or false"),
        ({"slab_bytes": "5MB"}, "cxl.slab_bytes is '5MB': it must be a size"),
        ({"slab_bytes": "3MiB"}, "it must be a multiple of 2 MiB"),
        ({"node": "near"}, "cxl.node is 'near': it may be none, or 0 to 1023"),
    ],
)
def test_a_cxl_tier_is_one_kind_of_memory(overrides: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(None, {f"cxl.{name}": value for name, value in overrides.items()})
    assert line in str(raised.value)


def test_one_file_by_two_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "pool")
    with pytest.raises(ConfigError, match="one file twice"):
        load(None, {"nvme.paths": f"{tmp_path / 'pool'},{tmp_path / 'link'}"})


def test_paths_are_a_list_in_a_file_and_have_commas_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    file.write_text('[nvme]\npaths = ["/pool/a", "/dev/disk/by-path/pci-0000:01:00.0"]\n')
    assert load(file).nvme.paths == ("/pool/a", "/dev/disk/by-path/pci-0000:01:00.0")
    assert load(file, {"nvme.paths": "/b,/c"}).nvme.paths == ("/b", "/c")
    assert load(file, {"nvme.paths": ""}).nvme.paths == ()


def test_broken_toml_and_missing_file_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[dram\n")
    with pytest.raises(ConfigError, match="no valid TOML"):
        load(broken)
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("budget", "slab"),
    [
        (2 * MIB, 2 * MIB),
        (33 * MIB, 16 * MIB),
        (64 * MIB, 16 * MIB),
        (512 * MIB, 32 * MIB),
        (4096 * MIB, 256 * MIB),
        (65536 * MIB, 1024 * MIB),
    ],
)
def test_slab_size_follows_the_budget(budget: int, slab: int) -> None:
    assert slab_bytes_for(budget) == slab


def test_sizes_are_shown_in_the_largest_unit_that_divides_them() -> None:
    assert [format_bytes(n) for n in (4095, 2048, 3 * MIB, 1 << 30)] == [
        "4095B",
        "2KiB",
        "3MiB",
        "1GiB",
    ]


def test_documentation_names_every_option() -> None:
    text = config.documentation()
    for section in ("server", "dram", "nvme", "lease", "grpc", "admin", "log"):
        assert f"## [{section}]" in text
