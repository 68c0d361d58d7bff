"""`python -m benchmarks.rivals`: kvtier, LMCache and Mooncake by one harness, in turns.

Needs what scripts/setup_rivals.sh makes; what is not there is "not measured", with the reason.
Prints one JSON object. Each daemon is a private one, on free ports, and is removed with all it
made, also after ctrl-C or SIGTERM; so are its files below `--path`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.rivals.drivers.serve import BLOCK_BYTES, BLOCK_COUNT
from benchmarks.rivals.link import Link, NotMeasured, started
from benchmarks.rivals.schedule import Harness, Sizes, System, figures
from kvtier.cli import environment
from kvtier.cli.output import say
from kvtier.cli.private_daemon import signals_as_exceptions
from kvtier.pools.slabs import best_page_kind

ROOT = Path(__file__).parents[2]
DRIVERS = Path(__file__).parent / "drivers"
ENVIRONMENTS = ROOT / ".venv-rivals"
SHARED_MEMORY = Path("/dev/shm")
EXIT_WRONG = 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that all works")
    parser.add_argument("--only", metavar="SYSTEM", nargs="+", help="leave the others out")
    parser.add_argument(
        "--path",
        type=Path,
        metavar="DIR",
        default=Path(tempfile.gettempdir()),
        help="directory on the disk to measure (the one for temporary files)",
    )
    arguments = parser.parse_args()
    sizes = Sizes()
    if arguments.quick:
        sizes = Sizes(
            match_rounds=5,
            transfer_rounds=3,
            disk_rounds=1,
            starts=1,
            idle_seconds=3,
            warm_rounds=1,
        )
    tag = f"kvtier-rivals-{os.getpid()}"
    with signals_as_exceptions(), _folder(arguments.path, tag) as folder:
        systems = [
            one for one in _systems(folder) if not arguments.only or one.name in arguments.only
        ]
        Harness(systems, sizes, folder, tag).run()
    found = {system.name: figures(system) for system in systems}
    print(json.dumps(_report(found, sizes), indent=1))
    return EXIT_WRONG if any(one["wrong_count"] for one in found.values()) else 0


def _report(found: dict[str, dict[str, object]], sizes: Sizes) -> dict[str, object]:
    return {
        "bench": "rivals",
        "systems": found,
        "sizes": {name: getattr(sizes, name) for name in Sizes.__slots__},
        "block_bytes": BLOCK_BYTES,
        "block_count": BLOCK_COUNT,
        "environment": environment.describe(str(best_page_kind())),
    }


def _systems(folder: Path) -> list[System]:
    def system(name: str, interpreter: Path, script: str, *words: str, disk: bool = True) -> System:
        command = [str(interpreter), str(DRIVERS / script), *words]
        return System(name, partial(_start, name, command, folder), has_disk=disk)

    lmcache, mooncake = (ENVIRONMENTS / name / "bin" / "python" for name in ("lmcache", "mooncake"))
    return [
        system("kvtier", Path(sys.executable), "drive_kvtier.py"),
        system("lmcache", lmcache, "drive_lmcache.py"),
        system("mooncake", mooncake, "drive_mooncake.py"),
        system("mooncake-embedded", mooncake, "drive_mooncake.py", "--embedded", disk=False),
    ]


@contextlib.contextmanager
def _start(name: str, command: list[str], folder: Path, life: str) -> Iterator[Link]:
    if not Path(command[0]).exists():
        raise NotMeasured("it is not installed: run scripts/setup_rivals.sh and see what it says")
    with started(name, command, folder / f"{life}.log", {"PYTHONDONTWRITEBYTECODE": "1"}) as link:
        yield link


@contextlib.contextmanager
def _folder(path: Path, tag: str) -> Iterator[Path]:
    """For daemons' files; removed with the shared memory that a killed daemon leaves."""
    folder = Path(tempfile.mkdtemp(prefix="kvtier-rivals-", dir=path))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for left in SHARED_MEMORY.glob(f"*{tag}*"):
            left.unlink(missing_ok=True)
            say(f"removed what a daemon had left behind: {left}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
