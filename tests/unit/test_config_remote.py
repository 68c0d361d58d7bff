"""[remote]: one engine with all that it needs and nothing of another's, or one line."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from kvtier.config import Config, load, parse
from kvtier.config_remote import RemoteConfig, changed_options
from kvtier.config_values import AUTO
from kvtier.errors import ConfigError
from kvtier.policy.admission import Admission
from kvtier.server.lower_settings import lower_settings
from kvtier.types import TierName

FILES = {"engine": "files", "path": "/mnt/kv", "capacity_bytes": "1TiB"}
REDIS = {"engine": "redis", "addresses": "10.0.0.1:6379"}
MOONCAKE = {"engine": "mooncake", "master": "10.0.0.1:50051", "host": "10.0.0.2"}
SECRET = "tops3cret"


def loaded(**options: str) -> RemoteConfig:
    return load(None, {f"remote.{name}": value for name, value in options.items()}).remote


def test_there_is_no_remote_tier_unless_an_engine_is_named() -> None:
    assert not RemoteConfig().is_set
    assert not loaded(path="/mnt/kv").is_set
    assert all(loaded(**options).is_set for options in (FILES, REDIS, MOONCAKE))


def test_each_engine_needs_little(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    file.write_text(
        '[remote]\nengine = "redis"\naddresses = ["10.0.0.1:6379", "[fd00::1]:6380"]\n'
        'cluster = true\ncodec = "zstd"\nwrite_bytes_per_hour = "5GiB"\n'
    )
    remote = load(file).remote
    assert remote == replace(
        RemoteConfig(),
        engine="redis",
        addresses=("10.0.0.1:6379", "[fd00::1]:6380"),
        cluster=True,
        codec="zstd",
        write_bytes_per_hour=5 << 30,
    )
    assert loaded(**FILES).capacity_bytes == 1 << 40
    assert loaded(**FILES).write_bytes_per_hour == AUTO


def test_an_engine_that_is_turned_off_keeps_its_options(tmp_path: Path) -> None:
    """So that one override turns off what a file describes, in whatever state that is."""
    file = tmp_path / "kvtier.toml"
    file.write_text('[remote]\nengine = "redis"\naddresses = ["10.0.0.1:6379"]\n')
    remote = load(file, {"remote.engine": "off"}).remote
    assert not remote.is_set
    assert changed_options(remote) == ["addresses"]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"engine": "memcached"}, "remote.engine is 'memcached': it may be off, files, redis"),
        ({"engine": "files", "capacity_bytes": "1TiB"}, "set remote.path to the folder"),
        ({"engine": "files", "path": "/mnt/kv"}, "set remote.capacity_bytes to what blocks"),
        ({"engine": "redis"}, 'set remote.addresses, such as ["10.0.0.1:6379"]'),
        (REDIS | {"addresses": "a:1,b:2"}, "names 2 servers: give one, or set remote.cluster"),
        (REDIS | {"username": "kv"}, "remote.username needs remote.password_file"),
        (REDIS | {"tls_certificate": "/c"}, "tls_private_key go together"),
        (REDIS | {"tls_private_key": "/k"}, "tls_private_key go together"),
        (
            REDIS | {"tls_certificate": "/c", "tls_private_key": "/k"},
            "remote.tls_certificate is about TLS, which is off: set remote.tls_authorities",
        ),
        (REDIS | {"tls_check_hostname": "false"}, "remote.tls_check_hostname is about TLS"),
        (REDIS | {"lifetime_seconds": "0.5"}, "it may be 0 (until evicted), or 1 and more"),
        (REDIS | {"codec": "gzip"}, "remote.codec is 'gzip': it may be auto, none, lz4, zstd"),
        (REDIS | {"timeout_seconds": "0"}, "remote.timeout_seconds is 0.0: it may be 0.05 to 60"),
        ({"engine": "mooncake", "host": "h"}, 'set remote.master, such as "10.0.0.1:50051"'),
        ({"engine": "mooncake", "master": "m:1"}, "set remote.host to the address of this node"),
        (MOONCAKE | {"master": "m"}, "remote.master is 'm': write ADDRESS:PORT"),
        (MOONCAKE | {"metadata": ""}, "remote.metadata is empty"),
        (MOONCAKE | {"devices": "mlx5_0"}, "remote.devices is about RDMA"),
        (FILES | {"addresses": "a:1"}, "remote.addresses is for engine redis, and remote.engine"),
        (REDIS | {"path": "/mnt/kv"}, "leave remote.path out, or set the other engine"),
        (REDIS | {"host": "h", "master": "m:1"}, "leave remote.master, remote.host out"),
        (MOONCAKE | {"password_file": "/p"}, "remote.password_file is for engine redis"),
    ],
)
def test_what_is_missing_or_contradicts_is_one_line_that_says_what_to_do(
    options: dict[str, str], line: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        loaded(**options)
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("addresses", "line"),
    [
        ("10.0.0.1:6379", 'remote.addresses must be a list such as ["10.0.0.1:6379"]'),
        ([6379], "remote.addresses has 6379: write HOST:PORT in quotes"),
        (["10.0.0.1"], "remote.addresses is '10.0.0.1': write ADDRESS:PORT"),
        (["10.0.0.1:0"], "the port 1 to 65535"),
        (["10.0.0.1:65536"], "the port 1 to 65535"),
        ([":6379"], "write HOST:PORT"),
        (["a:1", "a:1"], "remote.addresses names an address twice: a:1, a:1"),
        ([f"a:{port}" for port in range(1, 66)], "has 65 addresses: it may have at most 64"),
    ],
)
def test_addresses_are_hosts_with_ports(addresses: object, line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse({"remote": {"addresses": addresses}})
    assert line in str(raised.value)


@pytest.mark.parametrize(
    "table",
    [
        {"engine": "redis", "addresses": [f"redis://:{SECRET}@10.0.0.1:6379"]},
        {"engine": "redis", "addresses": f"redis://:{SECRET}@10.0.0.1:6379"},
        {"engine": "redis", "addresses": [f"kv:{SECRET}@10.0.0.1:6379"]},
        {"engine": "redis", "password": SECRET},
        MOONCAKE | {"master": f"etcd://root:{SECRET}@10.0.0.1:2379"},
        MOONCAKE | {"metadata": f"redis://:{SECRET}@10.0.0.1:6379"},
    ],
)
def test_a_secret_in_the_configuration_is_refused_and_not_repeated(
    table: dict[str, object], tmp_path: Path
) -> None:
    lines = [f"{name} = {value!r}" for name, value in table.items()]
    (tmp_path / "kvtier.toml").write_text("[remote]\n" + "\n".join(lines) + "\n")
    with pytest.raises(ConfigError) as raised:
        load(tmp_path / "kvtier.toml")
    assert SECRET not in str(raised.value)


def test_every_option_is_told_with_its_engine() -> None:
    """Reads the sentence that the document prints: which engine it is for, or none."""
    common = {"engine", "codec", "key_file", "timeout_seconds", "known_bytes"}
    common |= {"write_bytes_per_hour", "admission"}
    for one in fields(RemoteConfig):
        engine = one.metadata["help"].partition(":")[0]
        assert (engine in ("files", "redis", "mooncake")) == (one.name not in common), one.name
    assert Config().remote == RemoteConfig()


def test_what_was_used_once_is_put_by_forecast_only_where_a_bound_steers_it() -> None:
    def admission(**given: str) -> Admission:
        options = {f"remote.{name}": value for name, value in {**REDIS, **given}.items()}
        return lower_settings(load(None, options), None)[TierName.REMOTE].admission

    assert admission() is Admission.REUSED
    assert admission(admission="all") is Admission.ALL
    assert admission(write_bytes_per_hour="10GiB") is Admission.FORECAST
    assert admission(write_bytes_per_hour="10GiB", admission="reused") is Admission.REUSED
    with pytest.raises(ConfigError, match=r"remote\.admission is 'coin'.*behind a hole"):
        admission(admission="coin")
