"""The config.json that `--model` means: a file, a folder, or a name in Hugging Face's local cache.

Nothing is downloaded, and no library of models is imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from kvtier.errors import BadRequest

# The largest published ones have some 100 KiB. What is larger is another file, such as weights.
_CONFIG_BYTES_MAX = 16 << 20
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CONFIG = "config.json"


def find_config(model: str, environ: Mapping[str, str]) -> Path:
    """Raises BadRequest that says where was looked."""
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            if (path / _CONFIG).is_file():
                return path / _CONFIG
            raise BadRequest(f"folder {model!r} has no {_CONFIG}: give a model's folder")
        if path.exists():
            return path
    except (OSError, RuntimeError) as error:  # The latter: "~nobody/".
        raise BadRequest(f"{model[:200]!r} cannot be looked at: {error}") from None
    if _NAME.fullmatch(model) is None:
        raise BadRequest(f"there is no file or folder {model!r}: give the path of a {_CONFIG}")
    hub = _hub_of(environ)
    found = _in_hub(hub / f"models--{model.replace('/', '--')}")
    if found is None:
        raise BadRequest(
            f"{model!r} is no file or folder here, and no model in {str(hub)!r}; nothing is "
            f"downloaded: give the path of its {_CONFIG}"
        )
    return found


def read_config(path: Path) -> dict[str, object]:
    """The object in the file. Raises BadRequest."""
    try:
        with path.open("rb") as file:
            raw = file.read(_CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise BadRequest(f"{str(path)!r} cannot be read: {error.strerror}") from None
    if len(raw) > _CONFIG_BYTES_MAX:
        raise BadRequest(f"{str(path)!r} is too large for a {_CONFIG}: give the model's {_CONFIG}")
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError):
        raise BadRequest(f"{str(path)!r} is no JSON: give the model's {_CONFIG}") from None
    if not isinstance(values, dict):
        raise BadRequest(f"{str(path)!r} holds no JSON object: give the model's {_CONFIG}")
    return values


def _hub_of(environ: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps what it has downloaded."""
    if hub := environ.get("HF_HUB_CACHE"):
        return Path(hub).expanduser()
    if home := environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def _in_hub(folder: Path) -> Path | None:
    """The config.json of the revision called main, or of the only one there is."""
    snapshots = folder / "snapshots"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        revision = ""
    if revision and (snapshots / revision / _CONFIG).is_file():
        return snapshots / revision / _CONFIG
    found = sorted(snapshots.glob(f"*/{_CONFIG}"))
    if len(found) > 1:
        raise BadRequest(
            f"{len(found)} revisions in {str(snapshots)!r}, and none is called main: give the path "
            f"of one {_CONFIG}"
        )
    return found[0] if found else None
