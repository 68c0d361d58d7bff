"""Who may import whom; the table of docs/style.md, lazy imports included."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tidy.sources import PACKAGE, ROOT, imported_modules, place, python_files, tree_of

# Asking for time, chance, files or threads is an effect; the pure part gets all of it as arguments.
EFFECTS = (
    "asyncio",
    "os",
    "time",
    "random",
    "logging",
    "threading",
    "grpc",
    "socket",
    "subprocess",
)
ENGINES = ("torch", "transformers", "gguf", "vllm", "sglang", "cupy")


@dataclass(frozen=True)
class Layer:
    """What the modules below one name may import: of kvtier, and of the rest of the world."""

    kvtier: tuple[str, ...]
    banned: tuple[str, ...]


VALUES = ("types", "errors", "namespace", "version", "layout")
# What both sides need to agree on: mappings, the payload checksum, the frames of the call lane.
SHARED = (*VALUES, "checksum", "memory", "lane")
CONNECTOR = (*SHARED, "client", "cuda", "policy", "clock")

# The longest name that fits a module decides; a layer may always import itself.
LAYERS: dict[str, Layer] = {
    "types": Layer((), (*EFFECTS, *ENGINES)),
    "errors": Layer((), (*EFFECTS, *ENGINES)),
    "version": Layer((), (*EFFECTS, *ENGINES)),
    "namespace": Layer(("types", "errors"), (*EFFECTS, *ENGINES)),
    "layout": Layer((), (*EFFECTS, *ENGINES)),
    "checksum": Layer((*VALUES, "memory"), (*EFFECTS, *ENGINES)),
    "memory": Layer(VALUES, ENGINES),
    "lane": Layer((), (*EFFECTS, *ENGINES)),
    "clock": Layer((), ENGINES),
    "paths": Layer(VALUES, ENGINES),
    "config_address": Layer(VALUES, ENGINES),
    "config_values": Layer((*VALUES, "config_address"), ENGINES),
    "config_remote": Layer((*VALUES, "config_values"), ENGINES),
    "config_events": Layer((*VALUES, "config_values", "config_address"), ENGINES),
    "config_restart": Layer((*VALUES, "config_values"), ENGINES),
    "config_cxl": Layer((*VALUES, "config_values"), ENGINES),
    "config_grpc": Layer((*VALUES, "config_values", "config_address"), ENGINES),
    "config_tenant": Layer((*VALUES, "config_values", "config_grpc"), ENGINES),
    "config_recorder": Layer((*VALUES, "config_values"), ENGINES),
    "config": Layer(
        (
            *(*VALUES, "paths", "config_values", "config_address"),
            *("config_remote", "config_events", "config_restart", "config_recorder"),
            *("config_cxl", "config_tenant", "config_grpc"),
        ),
        ENGINES,
    ),
    "metrics": Layer(VALUES, ENGINES),
    "policy": Layer(VALUES, (*EFFECTS, *ENGINES)),
    "sizing": Layer(VALUES, (*EFFECTS, *ENGINES)),
    "core": Layer((*VALUES, "policy"), (*EFFECTS, *ENGINES)),
    "recording": Layer((*VALUES, "policy", "core"), ENGINES),
    "io": Layer(SHARED, ENGINES),
    "codec": Layer(SHARED, ENGINES),
    "pools": Layer((*SHARED, "io", "clock", "codec"), ENGINES),
    "server": Layer(
        (
            *(*SHARED, "policy", "core", "io", "pools", "config", "config_values", "metrics"),
            *("clock", "paths", "v1", "codec", "recording", "config_address"),
            *("config_remote", "config_events", "config_restart", "config_recorder"),
            *("config_cxl", "config_tenant", "config_grpc"),
        ),
        ENGINES,
    ),
    "client": Layer((*SHARED, "clock", "paths", "v1"), ENGINES),
    "cuda": Layer(SHARED, ("torch", "transformers", "gguf", "vllm", "sglang")),
    "connector": Layer(CONNECTOR, ENGINES),
    "connector.vllm": Layer((*CONNECTOR, "connector"), ("sglang", "gguf")),
    "connector.sglang": Layer((*CONNECTOR, "connector"), ("vllm", "gguf")),
    "engine": Layer((*CONNECTOR, "connector", "paths"), ("vllm", "sglang")),
    "sim": Layer((*VALUES, "policy", "core", "recording"), ENGINES),
    # The command line puts everything together; an engine's libraries it imports in no case.
    "cli": Layer(
        (
            *(*SHARED, "clock", "paths", "config", "metrics", "policy", "core", "io", "pools"),
            *("server", "client", "connector", "sim", "sizing", "v1", "codec", "recording"),
        ),
        ENGINES,
    ),
    # The demo joins engines and a daemon, each in a process of its own.
    "demo": Layer((*CONNECTOR, "connector", "engine", "cli", "paths"), ("vllm", "sglang")),
}


def layer_of(module: str) -> str | None:
    """`core.index` belongs to `core`; `connector.vllm.worker` to `connector.vllm`."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in LAYERS:
            return name
    return None


def is_below(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


def module_of(path: Path) -> str:
    """The dotted name below `kvtier`; `kvtier/core/__init__.py` is `core`."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def violations_of(module: str, tree: ast.AST) -> list[tuple[int, str]]:
    """(line, what is wrong) of every import that the module's layer may not have."""
    name = layer_of(module)
    if name is None:
        return [(1, f"{module or '__init__'} is in no layer: add it to the table")]
    layer = LAYERS[name]
    found: dict[tuple[int, str], str] = {}
    for imported, line in imported_modules(tree):
        if (line, imported.rpartition(".")[0]) in found or imported == "kvtier":
            continue  # Told already, as the module that the name is taken from.
        own = imported.removeprefix("kvtier.") if imported.startswith("kvtier.") else None
        forbidden = (
            is_below(imported, layer.banned)
            if own is None
            else not is_below(own, (name, *layer.kvtier))
        )
        if forbidden:
            found[line, imported] = f"{name} imports {imported}"
    return [(line, what) for (line, _), what in found.items()]


def test_every_import_is_in_the_table() -> None:
    found = [
        f"{place(path, line)}: {what}"
        for path in python_files("kvtier")
        if module_of(path)  # Not kvtier/__init__.py itself: the next test.
        for line, what in violations_of(module_of(path), tree_of(path))
    ]
    assert not found, "\n".join(found)


def test_the_package_itself_imports_nothing_heavy() -> None:
    """`import kvtier` happens before every other import: it must cost nothing."""
    imported = [name for name, _ in imported_modules(tree_of(PACKAGE / "__init__.py"))]
    assert not [name for name in imported if not is_below(name, ("__future__", "kvtier.types"))]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.manager", "import time"),
        ("core.manager", "def lazily():\n    from os import path"),
        ("core.manager", "from kvtier.server import app"),
        ("core.manager", "from kvtier import client"),
        ("policy.lru", "import random"),
        ("server.mover", "def lazily():\n    import torch.cuda"),
        ("server.mover", "import importlib\nimportlib.import_module('torch')"),
        ("client.client", "import kvtier.core.index"),
        ("client.client", "from kvtier.io import memcpy"),
        ("connector.planner", "import vllm"),
        ("engine.blocks", "from kvtier.pools.slabs import Slab"),
        ("brand_new", "pass"),
    ],
)
def test_a_forbidden_import_is_seen(module: str, source: str) -> None:
    assert violations_of(module, ast.parse(source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.manager", "from kvtier.core.index import PrefixIndex\nimport heapq"),
        ("client.client", "from kvtier.checksum import block_checksum"),
        ("client.client", "from kvtier.v1 import kvtier_pb2 as pb"),
        ("connector.vllm.adapter", "import vllm\nimport torch"),
    ],
)
def test_an_allowed_import_is_let_through(module: str, source: str) -> None:
    assert violations_of(module, ast.parse(source)) == []


DAEMON_PROGRAM = """
import sys
import kvtier.server.app
heavy = {"torch", "cupy", "transformers", "gguf", "vllm"} & set(sys.modules)
sys.exit(f"the daemon has imported {sorted(heavy)}" if heavy else 0)
"""


@pytest.mark.slow
def test_daemon_brings_in_neither_torch_nor_cuda() -> None:
    if not (PACKAGE / "server" / "app.py").exists():
        pytest.skip("there is no daemon yet")
    done = subprocess.run(
        [sys.executable, "-c", DAEMON_PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
