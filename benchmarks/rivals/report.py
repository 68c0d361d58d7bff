"""The section of docs/benchmarks.md: a table, how it was measured, and what we lose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Figures = dict[str, Any]
OURS = "kvtier"


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of which less is better."""

    name: str
    text: str
    unit: str
    digits: int


ROWS = (
    Row("match_ms", "match of {tokens:,} tokens, all a hit", "ms", 2),
    Row("match_hold_ms", "the same, held and let go", "ms", 2),
    Row("offload_ms", "offload 64 MiB", "ms", 1),
    Row("onboard_ms", "onboard 64 MiB, held and let go", "ms", 1),
    Row("disk_write_ms", "64 MiB from the engine until all is on the disk", "ms", 0),
    Row("disk_read_ms", "64 MiB from the disk to the engine", "ms", 0),
    Row("start_s", "start, until the first answer", "s", 2),
    Row("rss_mib", "resident memory without pools", "MiB", 0),
    Row("idle_core_percent", "idle, of one core", "%", 2),
)
# What is not comparable, and so neither won nor lost.
_NOT_COMPARED = {("mooncake-embedded", "rss_mib"), ("mooncake-embedded", "idle_core_percent")}
TITLES = {
    "kvtier": "kvtier",
    "lmcache": "LMCache",
    "mooncake": "Mooncake, client daemon",
    "mooncake-embedded": "Mooncake, in the engine",
}


def section(result: Figures) -> str:
    systems: Figures = result["systems"]
    head = " | ".join(TITLES[name] for name in systems)
    return f"""## rivals: kvtier beside LMCache and Mooncake

{_versions(systems)}.
Published wheels, in environments of their own. No GPU: what a system does with one is not in these
figures. {_machine(result["environment"])}.

| less is better | {head} |
| --- |{" --- |" * len(systems)}
{chr(10).join(_table(result))}

![Medians as bars](rivals.svg)

How it was measured: by one harness with a driver for each system, in turns (who begins changes);
medians, the least and the most of {_rounds(systems)}.

{_METHOD}
What we lose:

{chr(10).join(_losses(result))}

Not measured:

{chr(10).join(_not_measured(systems))}

To run it: `make bench-rivals`, which is

```
bash scripts/setup_rivals.sh
.venv/bin/python -m benchmarks.rivals > benchmarks/results/rivals.json
.venv/bin/python -m benchmarks.document
```

`--quick` has few rounds, `--only kvtier lmcache` leaves out the rest, `--path DIR` names the disk.
"""


def text_of(row: Row, figures: Figures) -> str:
    """`7.31 ms (6.90 to 8.44)`, or a dash."""
    if row.name not in figures:
        return "–"
    spread = figures["spread"].get(row.name)
    between = f" ({spread[0]:.{row.digits}f} to {spread[1]:.{row.digits}f})" if spread else ""
    return f"{figures[row.name]:.{row.digits}f} {row.unit}{between}"


def _table(result: Figures) -> list[str]:
    systems, tokens = result["systems"], result["sizes"]["tokens"]
    lines = []
    for row in ROWS:
        cells = " | ".join(text_of(row, figures) for figures in systems.values())
        lines.append(f"| {row.text.format(tokens=tokens)} | {cells} |")
    restarts = " | ".join(_restart_text(figures) for figures in systems.values())
    wrong = " | ".join(str(int(figures["wrong_count"])) for figures in systems.values())
    return [
        *lines,
        f"| after kill -9 of the daemon: blocks read back of those on the disk | {restarts} |",
        f"| wrong blocks, of all that were read | {wrong} |",
    ]


def _restart_text(figures: Figures) -> str:
    found = figures.get("restart")
    if found is None:
        return "–"
    first = _back_text(found)
    later = figures.get("restart_later")
    return first if later is None else f"{first}; down for 15 s: {_back_text(later)}"


def _back_text(found: Figures) -> str:
    counts = f"{found['read_count']} of {found['asked_count']}"
    back = f" after {found['back_s']:.1f} s" if "back_s" in found else " within 20 s"
    return f"{counts}{back} (first answer: {found['answer_s']:.1f} s)"


def _machine(facts: Figures) -> str:
    return (
        f"{facts['date'][:10]}, commit {facts['commit']}, {facts['cpu']}, {facts['cores']} cores, "
        f"load average {facts['load_average']}"
    )


def _versions(systems: Figures) -> str:
    packages = {
        "kvtier": "kvtier",
        "lmcache": "lmcache",
        "mooncake": "mooncake-transfer-engine-non-cuda",
    }
    found = []
    for name, package in packages.items():
        about = systems.get(name, {}).get("about")
        if about:
            versions = about["versions"]
            found.append(f"{package} {versions[package]} (Python {versions['python']})")
    return ", ".join(found)


def _rounds(systems: Figures) -> str:
    rounds = systems[OURS]["rounds"]
    return (
        f"{rounds.get('match_ms', 0)} rounds (match), {rounds.get('offload_ms', 0)} (memory), "
        f"{rounds.get('disk_write_ms', 0)} (disk) and {rounds.get('start_s', 0)} (start)"
    )


def _losses(result: Figures) -> list[str]:
    """Every figure in which somebody is better than we are, by how much; computed, not chosen."""
    systems, found = result["systems"], []
    for row in ROWS:
        ours = systems[OURS].get(row.name)
        better = [
            f"{TITLES[name]} {figures[row.name]:.{row.digits}f} {row.unit}"
            for name, figures in systems.items()
            if (name, row.name) not in _NOT_COMPARED
            and ours is not None
            and figures.get(row.name, ours) < ours
        ]
        if better:
            text = row.text.format(tokens=result["sizes"]["tokens"])
            found.append(f"- {text}: {', '.join(better)}; kvtier {ours:.{row.digits}f} {row.unit}.")
    return [*(found or ["- None of these figures, in this run."]), _OTHER_LOSSES]


def _not_measured(systems: Figures) -> list[str]:
    found = [
        f"- {TITLES[name]}, {phase}: {reason}"
        for name, figures in systems.items()
        for phase, reason in figures["not_measured"].items()
    ]
    return [*found, _NEVER_MEASURED]


_METHOD = """\
- *Bytes.* 32 blocks of 2 MiB, each in one piece in the engine and in the pool (for LMCache:
  chunks of its default 256 tokens, one layer, one plane), random, compared after each onboard.
  Pools of 1 GiB (512 MiB with a disk) that have been touched before. kvtier's lie on huge
  pages; LMCache's shared memory cannot, Mooncake's could on pages that the machine has set
  aside, and this one has none.
- *Match.* All blocks resident, from the client's call to its answer. kvtier is asked for 8,192
  hashes, Mooncake for 8,192 keys, both made before; LMCache for the tokens, which its daemon
  hashes into 512 chunks. LMCache's lookup takes locks, Mooncake's a lease of ten seconds; to
  kvtier's match the second row adds Acquire and Release.
- *Offload.* Reserve, copy, commit; LMCache STORE; Mooncake `batch_put_from`. *Onboard.*
  Acquire, copy, release; LMCache LOOKUP and RETRIEVE; Mooncake `batch_get_into`. The engine asks
  from one thread; how many copy is a system's own choice. 0.15 s of rest after each, for what
  goes on behind an answer: kvtier computes a checksum of each block then; the others compute
  none by default.
- *Disk.* kvtier: a pool file, direct I/O, checksums compared on the way down and up. LMCache:
  `fs_native` with direct I/O. Mooncake: buckets of 64 MiB, io_uring, its client asking the
  master for work every second (default: ten). Nobody is asked to flush the disk's own cache.
  Memory is emptied before the reading: LMCache by its own call, the others by as many other
  blocks.
- *Restart.* kill -9 of the daemon (of Mooncake's client daemon; its master lives on), started
  again at once, asked again until all 32 blocks are back; 20 s at most. Memory is lost in all
  of them here: kvtier keeps it under systemd or with `kvtier hold` only.
- *Start, memory, idle.* Before any block is there; Mooncake: master and client daemon together.
  In the engine: the master alone, as the rest is the engine's process.
- *Threads.* LMCache: one for torch and OpenMP, its server's pools at their default; the others
  as they come.
"""
_OTHER_LOSSES = """\
- Not in figures: LMCache has copy kernels for GPUs, some twenty kinds of storage, reuse that is
  no prefix, and engines that kvtier has no connector for; Mooncake has RDMA and one pool over
  many nodes, which kvtier uses through its adapter."""
_NEVER_MEASURED = "- Everything with a GPU, more than one node, RDMA; other storage of LMCache's."
