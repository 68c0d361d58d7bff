"""Opens the remote engine that `[remote]` names, with all that its namespaces share.

The adapters import their engines' packages when they are made, so only what is asked for is.
"""

from __future__ import annotations

import logging
import os
import secrets
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.clock import Clock
from kvtier.codec.codecs import CodecId, is_available
from kvtier.config_remote import RemoteConfig, changed_options
from kvtier.config_values import split_remote_address
from kvtier.errors import ConfigError
from kvtier.io.threads import IoThreads
from kvtier.policy.codec_choice import CodecChoice
from kvtier.pools.key_file import value_sealer_from
from kvtier.pools.remote.blocks import CodecChooser, FixedCodec
from kvtier.pools.remote.breaking import BreakingEngine
from kvtier.pools.remote.buffers import Buffers
from kvtier.pools.remote.engine import RemoteEngine
from kvtier.pools.remote.files import FilesEngine, FilesSettings
from kvtier.pools.remote.mooncake import MooncakeEngine, MooncakeSettings
from kvtier.pools.remote.redis import RedisEngine, RedisSettings, RedisTls
from kvtier.server.remote_share import ShareKeeper

if TYPE_CHECKING:  # It needs cryptography, which only those who encrypt have.
    from kvtier.pools.remote.sealing import ValueSealer

log = logging.getLogger(__name__)

# Encoding one block after the other keeps up with no link that is worth a codec.
CODEC_THREADS_MAX = 4
# Blocks of all namespaces that may wait for those threads: groups of the smallest ones are long.
CODEC_WAITING_MAX = 65_536
# Longer is no password, but another file.
PASSWORD_BYTES_MAX = 4096

_CODECS = {
    "none": CodecId.NONE,
    "lz4": CodecId.PLANES_LZ4,
    "zstd": CodecId.PLANES_ZSTD,
}
_ELEMENT_BYTES = {
    **dict.fromkeys(("bfloat16", "bf16", "float16", "fp16", "half", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "fp32", "float", "int32", "uint32"), 4),
}
_ONE_BYTE = ("fp8", "float8", "int8", "uint8")


@dataclass(frozen=True, slots=True)
class RemoteParts:
    """Belongs to one event loop. `share`: when the engine is a shared folder, who keeps it."""

    engine: BreakingEngine
    threads: IoThreads  # Of codecs, for all namespaces.
    buffers: Buffers  # Where the engine takes its values from.
    make_chooser: Callable[[], CodecChooser]  # One for each namespace: their KV differs.
    timeout_seconds: float
    make_sealer: Callable[[bytes], ValueSealer] | None = None  # By fingerprint; None: in the clear.
    share: ShareKeeper | None = None

    def start(self) -> None:
        """In the running loop."""
        if self.share is not None:
            self.share.start()

    async def close(self) -> None:
        """Bounded; what hangs is left behind. Nothing is put or got any more."""
        if self.share is not None:
            await self.share.close()
        await self.engine.close()
        self.threads.shutdown(wait=False)


def open_remote(config: RemoteConfig, clock: Clock) -> RemoteParts | None:
    """None without a remote tier; ConfigError, in one line, for one that cannot be had.

    In the running loop. Reads small files and imports the engine's package; it connects with the
    first call, so that a daemon starts without its engine. Nothing runs before `start`.
    """
    if not config.is_set:
        if ignored := changed_options(config):
            log.warning(
                "remote.engine is off: the other options of [remote] have no effect",
                extra={"options": " ".join(ignored)},
            )
        return None
    make_chooser = _chooser_maker(config.codec)
    make_sealer = _sealer_maker(config.key_file)
    buffers, share = Buffers(), None
    # Of this life of this daemon; for names of files.
    unique = secrets.token_hex(8)
    if config.engine == "files":
        share = ShareKeeper(Path(config.path).expanduser(), config.capacity_bytes, unique, clock)
    try:
        engine = _MAKERS[config.engine](config, clock, unique, buffers)
    except ConfigError as error:
        raise ConfigError(f"remote.engine is {config.engine}: {error}") from None
    log.info("remote engine opened", extra={"engine": engine.name, "codec": config.codec})
    return RemoteParts(
        engine=BreakingEngine(engine, clock=clock, jitter=_jitter),
        threads=IoThreads(
            "kvtier-codec",
            count=min(CODEC_THREADS_MAX, os.cpu_count() or 1),
            waiting_max=CODEC_WAITING_MAX,
        ),
        buffers=buffers,
        make_chooser=make_chooser,
        timeout_seconds=config.timeout_seconds,
        make_sealer=make_sealer,
        share=share,
    )


def element_width(kv_dtype: str) -> int:
    """Bytes of one element, as `RemoteLayout` wants it, of a namespace's `kv_dtype`.

    vLLM's has two words, the tensors' dtype and the option's: "bfloat16 auto", "uint8 fp8_e4m3".
    What is not known is 1: only the codecs ask, and do worse with a wrong width, not wrong.
    """
    words = [word.removeprefix("torch.") for word in kv_dtype.lower().split()]
    if any(word.startswith(_ONE_BYTE) for word in words):
        return 1
    return next((_ELEMENT_BYTES[word] for word in words if word in _ELEMENT_BYTES), 1)


def _chooser_maker(name: str) -> Callable[[], CodecChooser]:
    if name == "auto":
        packed = [
            codec for codec in (CodecId.PLANES_LZ4, CodecId.PLANES_ZSTD) if is_available(codec)
        ]
        return partial(CodecChoice, (CodecId.NONE, *packed))
    codec = _CODECS[name]
    if codec is not CodecId.NONE and not is_available(codec):
        raise ConfigError(
            f"remote.codec is {name}, and its package is not installed: pip install "
            "'kvtier[remote]', or set remote.codec to none"
        )
    return partial(FixedCodec, codec)


def _sealer_maker(path: str) -> Callable[[bytes], ValueSealer] | None:
    if not path:
        return None
    try:
        return value_sealer_from(Path(_expanded(path)))
    except ConfigError as error:
        raise ConfigError(f"remote.key_file: {error}") from None


def _make_files(config: RemoteConfig, clock: Clock, unique: str, buffers: Buffers) -> RemoteEngine:
    settings = FilesSettings(Path(config.path).expanduser(), config.capacity_bytes)
    return FilesEngine(settings, unique=unique, clock=clock, buffers=buffers)


def _make_redis(config: RemoteConfig, clock: Clock, unique: str, buffers: Buffers) -> RemoteEngine:
    return RedisEngine(redis_settings(config), buffers=buffers, clock=clock)


def redis_settings(config: RemoteConfig) -> RedisSettings:
    """Reads the password, and the certificates to see that they can be used."""
    tls = None
    if config.tls_authorities:
        tls = RedisTls(
            authorities=_expanded(config.tls_authorities),
            certificate=_expanded(config.tls_certificate) or None,
            private_key=_expanded(config.tls_private_key) or None,
            check_hostname=config.tls_check_hostname,
        )
        _check_tls(tls.authorities, tls.certificate, tls.private_key)
    return RedisSettings(
        addresses=tuple(
            split_remote_address("remote.addresses", address) for address in config.addresses
        ),
        is_cluster=config.cluster,
        username=config.username or None,
        password=_password_in(config.password_file) if config.password_file else None,
        tls=tls,
        lifetime_seconds=config.lifetime_seconds or None,
    )


def _make_mooncake(
    config: RemoteConfig, clock: Clock, unique: str, buffers: Buffers
) -> RemoteEngine:
    settings = MooncakeSettings(
        master=config.master,
        host=config.host,
        segment_bytes=config.segment_bytes,
        metadata=config.metadata,
        protocol=config.protocol,
        devices=config.devices,
    )
    return MooncakeEngine(settings, buffers=buffers)


_MAKERS = {"files": _make_files, "redis": _make_redis, "mooncake": _make_mooncake}


def _password_in(path: str) -> str:
    """Its one line; no message shows it."""
    try:
        with Path(_expanded(path)).open("rb") as file:
            text = file.read(PASSWORD_BYTES_MAX + 1).decode()
    except OSError as error:
        raise ConfigError(f"cannot read remote.password_file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"remote.password_file {path} is not UTF-8 text") from None
    password = text.rstrip("\r\n")
    if not password or "\n" in password or len(text) > PASSWORD_BYTES_MAX:
        raise ConfigError(f"remote.password_file {path} must hold one line, the password")
    return password


def _check_tls(authorities: str, certificate: str | None, private_key: str | None) -> None:
    """Now, rather than as a connection that fails again and again."""
    what = f"remote.tls_authorities {authorities}"
    try:
        context = ssl.create_default_context(cafile=authorities)
        if certificate is not None:
            what = f"remote.tls_certificate {certificate} with its private key {private_key}"
            # A key that is encrypted would be asked for at the terminal.
            context.load_cert_chain(certificate, private_key, password=lambda: b"")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError.
        raise ConfigError(f"{what} cannot be used: {error}") from None


def _expanded(path: str) -> str:
    return os.path.expanduser(path)


def _jitter() -> float:
    """From 0 to 1 by chance: when a breaker tries again is nothing that a replay must repeat."""
    return secrets.randbits(32) / (1 << 32)
