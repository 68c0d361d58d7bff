"""The file of keys that blocks are encrypted with at rest.

One key a line, `ID SECRET`: a number from 1 to 2^63 - 1, never given to another key again, and 32
bytes in 64 hexadecimal digits. Empty lines and lines that begin with # are skipped. The first key
seals what is written; the others open what was sealed before. So a key is changed by putting a new
line on top, and let go by removing its line once nothing that counts is sealed with it: its blocks
are misses from then on.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError

if TYPE_CHECKING:  # It needs cryptography, which only those who encrypt have.
    from kvtier.pools.remote.sealing import ValueSealer
    from kvtier.pools.sealing import Sealer

SECRET_BYTES = 32
KEY_ID_MAX = (1 << 63) - 1
_READ_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Key:
    """`id` stands on the disk beside what is sealed; the secret nowhere but in its file."""

    id: int
    secret: bytes = field(repr=False)


def sealer_from(path: Path) -> Callable[[int], Sealer]:
    """What makes the sealer of a pool, given its generation. Raises ConfigError."""
    keys = read_key_file(path)
    try:
        from kvtier.pools.sealing import Sealer
    except ImportError as error:
        raise _without_package(error) from None
    return partial(Sealer, keys)


def value_sealer_from(path: Path) -> Callable[[bytes], ValueSealer]:
    """What makes the sealer of a namespace's values, given its fingerprint. Raises ConfigError."""
    keys = read_key_file(path)
    try:
        from kvtier.pools.remote.sealing import ValueSealer
    except ImportError as error:
        raise _without_package(error) from None
    return partial(ValueSealer, keys)


def _without_package(error: ImportError) -> ConfigError:
    return ConfigError(
        f"encryption needs the package cryptography ({error}): pip install 'kvtier[encryption]'"
    )


def read_key_file(path: Path) -> list[Key]:
    """The keys, the one that seals first; raises ConfigError, which never quotes a secret."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_READ_BYTES_MAX).decode("ascii", "replace")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if stat.S_ISREG(mode) and mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise ConfigError(f"{path}: others may read or change the keys: chmod 600 {path}")
    return parse_keys(text, str(path))


def parse_keys(text: str, name: str) -> list[Key]:
    """Raises ConfigError; `name` is for its message."""
    keys: list[Key] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{name}, line {number}"
        if len(words) != 2:
            raise ConfigError(f"{where}: a key is its number and 64 hexadecimal digits")
        keys.append(Key(_id_of(words[0], where), _secret_of(words[1], where)))
    if not keys:
        raise ConfigError(f"{name}: no key in it: make one with `kvtier key {name}`")
    if len({key.id for key in keys}) < len(keys):
        raise ConfigError(f"{name}: two keys have the same number")
    return keys


def new_key(keys: Sequence[Key]) -> Key:
    """A key of chance, with a number higher than all of these."""
    return Key(max((key.id for key in keys), default=0) + 1, secrets.token_bytes(SECRET_BYTES))


def format_keys(keys: Sequence[Key]) -> str:
    """What `parse_keys` reads."""
    return "".join(f"{key.id} {key.secret.hex()}\n" for key in keys)


def _id_of(word: str, where: str) -> int:
    if not (word.isascii() and word.isdigit()) or not 1 <= int(word) <= KEY_ID_MAX:
        raise ConfigError(f"{where}: the number of a key is 1 to 2^63 - 1")
    return int(word)


def _secret_of(word: str, where: str) -> bytes:
    try:
        secret = bytes.fromhex(word)
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"{where}: the secret is {2 * SECRET_BYTES} hexadecimal digits")
    return secret
