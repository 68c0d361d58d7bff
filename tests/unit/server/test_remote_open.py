"""`[remote]` becomes an engine, or one clear line; what is not asked for is not imported."""

from __future__ import annotations

import asyncio
import logging
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from kvtier.clock import SystemClock
from kvtier.codec.codecs import CodecId
from kvtier.config import load
from kvtier.errors import ConfigError
from kvtier.policy.codec_choice import CodecChoice
from kvtier.pools.remote.blocks import FixedCodec
from kvtier.pools.remote.engine import RemoteKey, RemoteOutcome
from kvtier.pools.remote.files import OWNER_NAME, prepare_root
from kvtier.pools.remote.redis import RedisTls
from kvtier.server.remote import (
    PASSWORD_BYTES_MAX,
    RemoteParts,
    element_width,
    open_remote,
    redis_settings,
)
from tests.support.mooncake_master import needs_mooncake
from tests.support.redis_server import needs_redis, redis_server
from tests.tidy.sources import ROOT

DONE = RemoteOutcome.DONE
SECRET = "tops3cret"
REDIS = {"engine": "redis", "addresses": "127.0.0.1:1"}


def opened(**options: str) -> RemoteParts | None:
    loaded = load(None, {f"remote.{name}": value for name, value in options.items()})
    return open_remote(loaded.remote, SystemClock())


def play(work: Callable[[RemoteParts], Awaitable[None]], **options: str) -> None:
    async def main() -> None:
        parts = opened(**options)
        assert parts is not None
        parts.start()
        try:
            await work(parts)
        finally:
            await parts.close()

    asyncio.run(main())


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(1000):
        if is_so():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it does not happen")


def files_options(tmp_path: Path) -> dict[str, str]:
    return {"engine": "files", "path": str(tmp_path / "share"), "capacity_bytes": "1GiB"}


def refusal(**options: str) -> str:
    async def main() -> None:
        opened(**options)

    with pytest.raises(ConfigError) as raised:
        asyncio.run(main())
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_without_an_engine_there_are_no_parts(caplog: pytest.LogCaptureFixture) -> None:
    assert opened() is None
    assert not caplog.records


def test_options_of_an_engine_that_is_off_are_told(caplog: pytest.LogCaptureFixture) -> None:
    assert opened(path="/mnt/kv") is None
    [record] = caplog.records
    assert "remote.engine is off" in record.message
    assert vars(record)["options"] == "path"


def test_a_share_is_opened_kept_and_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepare_root(tmp_path / "share")

    async def work(parts: RemoteParts) -> None:
        key = RemoteKey("kvtier1/a/b")
        value = np.arange(100, dtype=np.uint8)
        assert await parts.engine.put([(key, [value])], timeout_seconds=10) == [DONE]
        [reply] = await parts.engine.get([key], value_bytes_max=100, timeout_seconds=10)
        assert reply.value is not None
        assert np.array_equal(reply.value, value)
        assert parts.share is not None
        share = parts.share
        await until(lambda: share.last_round.is_owner)
        assert (tmp_path / "share" / OWNER_NAME).exists()

    with caplog.at_level(logging.INFO):
        play(work, **files_options(tmp_path))
    assert not (tmp_path / "share" / OWNER_NAME).exists(), "the next owner has to wait"
    assert caplog.records[0].message == "remote engine opened"
    assert vars(caplog.records[0])["engine"] == f"files:{tmp_path / 'share'}"


def test_a_share_that_is_not_prepared_is_told_once_and_nothing_is_made_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(parts: RemoteParts) -> None:
        key, value = RemoteKey("kvtier1/a/b"), np.zeros(200_000, np.uint8)
        outcomes = await parts.engine.put([(key, [value])], timeout_seconds=10)
        assert outcomes == [RemoteOutcome.UNREACHABLE]
        assert parts.share is not None
        share = parts.share
        await until(lambda: share.trouble != "")
        share._on_round(FileNotFoundError(2, "No such file", str(mark)))

    mark = tmp_path / "share" / "kvtier-remote"
    play(work, **files_options(tmp_path))
    assert not (tmp_path / "share").exists()
    [told] = [record for record in caplog.records if "share" in record.message]
    assert "not mounted, or not made by `kvtier format`" in vars(told)["why"]


@pytest.mark.slow
@needs_redis
def test_the_password_comes_from_its_file_and_goes_nowhere_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "password").write_text(SECRET + "\n")

    async def work(parts: RemoteParts) -> None:
        key, value = RemoteKey("kvtier1/a/b"), np.zeros(200_000, np.uint8)
        assert await parts.engine.put([(key, [value])], timeout_seconds=10) == [DONE]
        assert SECRET not in repr(parts)
        buffer = parts.buffers.take(200_000)
        parts.buffers.give_back(buffer)
        [reply] = await parts.engine.get([key], value_bytes_max=200_000, timeout_seconds=10)
        assert reply.value is not None
        assert reply.value.base is buffer.base, "values come in the buffers that are given back"

    with (
        caplog.at_level(logging.DEBUG),
        redis_server(tmp_path / "redis", ["--requirepass", SECRET]) as server,
    ):
        address = f"127.0.0.1:{server.port}"
        password_file = str(tmp_path / "password")
        play(work, engine="redis", addresses=address, password_file=password_file)
        (tmp_path / "password").write_text("another\n")
        with pytest.raises(AssertionError, match="refused"):
            play(work, engine="redis", addresses=address, password_file=password_file)
    assert caplog.records
    assert not [record for record in caplog.records if SECRET in str(vars(record))]


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"tops3cret\nmore\n", b"x" * (PASSWORD_BYTES_MAX + 1), b"\xfftops3cret", None],
)
def test_a_password_file_holds_one_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "password"
    if content is not None:
        path.write_bytes(content)
    line = refusal(**REDIS, password_file=str(path))
    assert f"remote.password_file {path}" in line
    assert SECRET not in line


def test_certificates_that_cannot_be_used_are_told_at_the_start(tmp_path: Path) -> None:
    absent = str(tmp_path / "ca.pem")
    line = refusal(**REDIS, tls_authorities=absent)
    assert line.startswith(f"remote.engine is redis: remote.tls_authorities {absent} cannot be")
    (tmp_path / "ca.pem").write_text("no certificate\n")
    assert "cannot be used" in refusal(**REDIS, tls_authorities=absent)


def make_certificate(folder: Path, *arguments: str) -> None:
    """One that vouches for itself, `cert.pem` with `key.pem`."""
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "2", "-subj", "/CN=kv"]
    paths = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run([*command, *paths, *arguments], check=True, capture_output=True, timeout=60)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_every_option_of_redis_reaches_the_adapter(tmp_path: Path) -> None:
    make_certificate(tmp_path, "-nodes")
    (tmp_path / "password").write_text(SECRET)
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    options = {
        "engine": "redis",
        "addresses": "10.0.0.1:6379,[fd00::1]:6380",
        "cluster": "true",
        "username": "kv",
        "password_file": str(tmp_path / "password"),
        "tls_authorities": cert,
        "tls_certificate": cert,
        "tls_private_key": key,
        "tls_check_hostname": "false",
        "lifetime_seconds": "60",
    }
    loaded = load(None, {f"remote.{name}": value for name, value in options.items()})
    settings = redis_settings(loaded.remote)
    assert settings.addresses == (("10.0.0.1", 6379), ("fd00::1", 6380))
    assert (settings.is_cluster, settings.lifetime_seconds) == (True, 60.0)
    assert (settings.username, settings.password) == ("kv", SECRET)
    assert settings.tls == RedisTls(cert, cert, key, check_hostname=False)
    assert SECRET not in repr(loaded)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_a_key_that_is_encrypted_is_refused(tmp_path: Path) -> None:
    make_certificate(tmp_path, "-passout", "pass:1234")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    options = {"tls_authorities": cert, "tls_certificate": cert, "tls_private_key": key}
    assert f"remote.tls_certificate {cert} with its private key" in refusal(**REDIS, **options)


@needs_mooncake
def test_a_daemon_starts_without_its_mooncake_master() -> None:
    async def work(parts: RemoteParts) -> None:
        assert parts.engine.name == "mooncake:127.0.0.1:1"
        [outcome] = await parts.engine.exists([RemoteKey("kvtier1/a/b")], timeout_seconds=10)
        assert outcome is RemoteOutcome.UNREACHABLE

    play(work, engine="mooncake", master="127.0.0.1:1", host="127.0.0.1")


@pytest.mark.parametrize(
    ("options", "modules", "line"),
    [
        (REDIS, ("redis", "redis.asyncio"), "remote.engine is redis: a Redis tier needs kvtier["),
        (
            {"engine": "mooncake", "master": "127.0.0.1:1", "host": "127.0.0.1"},
            ("mooncake", "mooncake.store"),
            "remote.engine is mooncake: a Mooncake tier needs kvtier[mooncake]",
        ),
        (REDIS | {"codec": "lz4"}, ("lz4", "lz4.block"), "remote.codec is lz4, and its package"),
        (
            REDIS | {"codec": "zstd"},
            ("zstandard",),
            "install 'kvtier[remote]', or set remote.codec",
        ),
    ],
)
def test_a_package_that_is_missing_is_told_with_its_extra(
    options: dict[str, str], modules: tuple[str, ...], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)  # As if it were not installed.
    assert line in refusal(**options)


@pytest.mark.parametrize(
    ("codec", "number"),
    [("none", CodecId.NONE), ("lz4", CodecId.PLANES_LZ4), ("zstd", CodecId.PLANES_ZSTD)],
)
def test_a_codec_that_is_named_is_used_always(tmp_path: Path, codec: str, number: int) -> None:
    if number:
        pytest.importorskip("lz4.block" if codec == "lz4" else "zstandard")

    async def work(parts: RemoteParts) -> None:
        chooser = parts.make_chooser()
        assert isinstance(chooser, FixedCodec)
        assert chooser.choose(1 << 20) == number

    play(work, **files_options(tmp_path), codec=codec)


def test_auto_chooses_for_each_namespace_among_the_codecs_that_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lz4", None)
    monkeypatch.setitem(sys.modules, "lz4.block", None)

    async def work(parts: RemoteParts) -> None:
        chooser, other = parts.make_chooser(), parts.make_chooser()
        assert isinstance(chooser, CodecChoice)
        assert chooser is not other
        assert chooser.choose(1 << 20) == CodecId.NONE
        with pytest.raises(KeyError):
            chooser.byte_seconds(CodecId.PLANES_LZ4)

    play(work, **files_options(tmp_path))


@pytest.mark.parametrize(
    ("kv_dtype", "width"),
    [
        ("bfloat16", 2),
        ("torch.bfloat16", 2),
        ("bfloat16 auto", 2),
        ("torch.float16 auto", 2),
        ("half", 2),
        ("float32", 4),
        ("torch.float32 auto", 4),
        ("uint8 fp8_e4m3", 1),
        ("torch.uint8 fp8", 1),
        ("bfloat16 fp8_e5m2", 1),
        ("float8_e4m3fn", 1),
        ("int8", 1),
        ("bytes", 1),
        ("float64", 1),
        ("", 1),
    ],
)
def test_a_dtype_has_the_width_of_its_elements(kv_dtype: str, width: int) -> None:
    assert element_width(kv_dtype) == width


IMPORTS = """
import asyncio, sys
import kvtier.server.app
from kvtier.clock import SystemClock
from kvtier.config import load
from kvtier.server.remote import open_remote

async def main():
    for name in sys.argv[1:]:
        options = {"engine": name, "path": "/nowhere", "capacity_bytes": "1GiB"}
        options = {f"remote.{option}": value for option, value in options.items()}
        parts = open_remote(load(None, options).remote, SystemClock())
        if parts is not None:
            await parts.close()

asyncio.run(main())
print(*sorted({"redis", "mooncake"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_no_engines_package_is_imported_that_is_not_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, "off", "files"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
