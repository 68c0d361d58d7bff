"""`kvtier key FILE`: put a new key on top of a file of keys, which is made if it is not there.

What is written from the next start on is sealed with it (`nvme.key_file`); the keys below open what
was sealed before. The file is changed as a whole, and only its owner may read it. Nothing is
printed of a key but its number. Exit codes: 0; 2 when the file cannot be read or written.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.pools.key_file import Key, format_keys, new_key, read_key_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the file of keys")


def run(arguments: argparse.Namespace) -> int:
    path: Path = arguments.file
    keys = read_key_file(path) if path.exists() else []
    key = new_key(keys)
    _write(path, [key, *keys])
    sys.stdout.write(f"{path}: key {key.id} seals from the next start of the daemon on\n")
    if keys:
        sys.stdout.write(f"{len(keys)} older: remove a line once its blocks may be misses\n")
    return 0


def _write(path: Path, keys: list[Key]) -> None:
    """All of it or nothing: a key that is lost takes its blocks along."""
    beside = path.with_name(path.name + ".new")
    try:
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            if path.exists():
                owner = path.stat()
                os.fchown(fd, owner.st_uid, owner.st_gid)
            file.write(format_keys(keys))
            file.flush()
            os.fsync(fd)
        beside.replace(path)
    except FileExistsError:
        raise ConfigError(
            f"{beside} is there from a change that was broken off: remove it"
        ) from None
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"{path}: {error.strerror}") from None
