"""fio, where it is installed: what the disk gives to a program that does nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from kvtier.errors import KVTierError

# Of those that keep a queue by themselves, the first that works here; and the one that is told from
# as many threads, as the pool is.
_QUEUES = ("io_uring", "libaio")
THREADS = "psync"
_SECONDS_MAX = 300
_HUGE_KIB = 2048


@dataclass(frozen=True, slots=True)
class FioJob:
    """One pass over a part of a file."""

    path: Path
    first: int
    length_bytes: int
    block_bytes: int
    depth: int


class FioFigures(NamedTuple):
    seconds: float
    cpu_seconds: float


class Fio:
    """Finds out once which engines and which memory work here."""

    def __init__(self, job: FioJob) -> None:
        self._job = job
        self.memory, self._memory_words, self._environment = _memory(job.depth * job.block_bytes)
        self.engines = self._find_engines()

    @staticmethod
    def is_installed() -> bool:
        return shutil.which("fio") is not None

    def run(self, kind: str, engine: str) -> FioFigures:
        """`kind` as fio calls it: write, randread, …"""
        figures = self._run(self._job, kind, engine)
        if figures is None:
            raise KVTierError(f"fio ended with an error, which it did not at first ({engine})")
        return figures

    def _find_engines(self) -> list[str]:
        first = replace(self._job, length_bytes=self._job.depth * self._job.block_bytes)
        working = [one for one in (*_QUEUES, THREADS) if self._run(first, "read", one) is not None]
        return [one for one in working if one == THREADS or one == working[0]]

    def _run(self, job: FioJob, kind: str, engine: str) -> FioFigures | None:
        words = [
            *("fio", "--name=kvtier", f"--filename={job.path}", "--output-format=json"),
            *(f"--rw={kind}", f"--bs={job.block_bytes}", f"--size={job.length_bytes}"),
            *(f"--offset={job.first}", f"--iodepth={job.depth}", f"--ioengine={engine}"),
            *("--direct=1", "--thread", "--allow_file_create=0", "--randrepeat=0"),
            *self._memory_words,
        ]
        if engine == THREADS:  # One call at a time: the depth is a number of threads.
            part = job.length_bytes // job.depth // job.block_bytes * job.block_bytes
            words += [f"--numjobs={job.depth}", f"--size={part}", f"--offset_increment={part}"]
            words += ["--group_reporting"]
        try:
            done = subprocess.run(
                words,
                capture_output=True,
                text=True,
                timeout=_SECONDS_MAX,
                check=False,
                env={**os.environ, **self._environment},
            )
            if done.returncode != 0:
                return None
            [told] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        except (OSError, ValueError, subprocess.TimeoutExpired):
            return None
        side = told["read" if "read" in kind else "write"]
        cpu_share = (told["usr_cpu"] + told["sys_cpu"]) / 100
        seconds = job.length_bytes / float(side["bw_bytes"])
        return FioFigures(seconds, cpu_share * seconds)


def _memory(needed_bytes: int) -> tuple[str, list[str], dict[str, str]]:
    """(what it is called, words for fio, its environment): huge pages by the best way there is."""
    free_count = 0
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("HugePages_Free:"):
            free_count = int(line.split()[1])
    if free_count * _HUGE_KIB << 10 >= 2 * needed_bytes:
        return "shmhuge", ["--iomem=shmhuge"], {}
    # glibc asks for huge pages (madvise) for what malloc maps; heeded where THP allows it.
    words = ["--iomem=malloc", "--iomem_align=2m"]
    return "malloc with THP advice", words, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
