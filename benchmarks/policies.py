"""Replays the traces on every eviction policy: `python -m benchmarks.policies` measures what
benchmarks/results/policies.json lacks and writes docs/policies.md; `--document` only writes.

Each result is saved as it comes, so a run that was stopped goes on where it was. `--trace` and
`--policy` choose. Delete a result to have it measured again.
"""

# ruff: noqa: E501  # Tables and prose.

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import guard_day
from kvtier.server.policies import OURS
from kvtier.sim.belady import replay_belady
from kvtier.sim.replay import replay_policy
from kvtier.sim.traces import Trace, between, mixed, read_sessions, read_trace
from kvtier.sim.two_tiers import Rule, replay_two_tiers

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "traces"
RESULTS = ROOT / "benchmarks" / "results" / "policies.json"
DOCUMENT = ROOT / "docs" / "policies.md"
POLICIES = ("lru", "curves", "arc", "belady")
SMALL = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0)  # Shares of the unique blocks, in percent.
SIZES = {"chat": SMALL, "synthetic": SMALL, "mix": SMALL, "coding": (0.25, 0.5, *SMALL)}
HOUR = 3600.0
SEED = 1

Result = dict[str, Any]


def _chat() -> Trace:
    return read_trace(FOLDER / "mooncake_conversation.kvt.jsonl.gz")


def _sessions(block_tokens: int, hours: int, every: int = 1) -> Trace:
    path = FOLDER / "claude_code_sessions.kvt.jsonl.gz"
    return read_sessions(path, block_tokens, hours * HOUR, seed=SEED, every=every)


TRACES: dict[str, Callable[[], Trace]] = {
    "synthetic": lambda: read_trace(FOLDER / "mooncake_synthetic.kvt.jsonl.gz"),
    "chat": _chat,
    # An hour of the sessions laid on half a day, as many at a time as of all that were published
    # on a whole one.
    "mix": lambda: mixed("mix", [_chat(), between(_sessions(512, 12), 6 * HOUR, 7 * HOUR)]),
    # All of them would take a day; a cache that is as small beside a sixth sees the same pressure.
    "coding": lambda: _sessions(256, 24, every=6),
}
TITLES = {
    "chat": "Chat: Mooncake's conversation trace, an hour",
    "synthetic": "Synthetic: Mooncake's, of public data sets",
    "coding": "Coding: a sample of 59 of 710 published sessions of a coding agent, drawn starts over 24 h",
    "mix": "Mix: two tenants, the hour of chat and an hour of the coding sessions",
}


def measure(results: Result, traces: list[str], policies: list[str]) -> None:
    for name in traces:
        wanted = [
            (size, policy)
            for size in SIZES[name]
            for policy in policies
            if f"{size:g}" not in results.get(name, {}).get(policy, {})
        ]
        if not wanted:
            continue
        trace = TRACES[name]()
        found = results.setdefault(name, {})
        found["requests"], found["asked"] = len(trace.requests), trace.access_count
        found["unique"], found["block_tokens"] = trace.unique_count, trace.block_tokens
        for size, policy in wanted:
            began = time.process_time()
            ratio = _replayed(trace, policy, int(trace.unique_count * size / 100))
            seconds = time.process_time() - began
            mine = found.setdefault(policy, {})
            mine[f"{size:g}"] = {"hit": round(ratio, 4), "cpu_seconds": round(seconds, 1)}
            print(f"{name} {size:g} % {policy}: {ratio:.4f} in {seconds:.1f} s", flush=True)
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def _replayed(trace: Trace, policy: str, capacity: int) -> float:
    if policy == "belady":
        return replay_belady(trace, capacity).hit_ratio
    return replay_policy(trace, OURS[policy], capacity).hit_ratio


# What another simulator, not ours, found on the same traces at the sizes of SMALL.
ELSEWHERE = {
    "chat": {
        "lru": (0.0544, 0.0801, 0.2022, 0.2882, 0.3683, 0.3785),
        "curves": (0.1020, 0.1470, 0.2270, 0.3035, 0.3676, 0.3788),
        "belady": (0.2501, 0.3206, 0.3819, 0.3819, 0.3819, 0.3819),
    },
    "synthetic": {
        "lru": (0.0370, 0.0775, 0.1550, 0.2573, 0.4496, 0.6010),
        "curves": (0.0466, 0.0831, 0.1480, 0.2633, 0.4517, 0.6112),
        "belady": (0.1820, 0.2587, 0.3925, 0.5097, 0.6377, 0.6594),
    },
}

# (memory, below), in percent of the different blocks; and the rules that are tried.
TIERS = {"chat": [(2.0, 10.0), (2.0, 25.0)], "synthetic": [(5.0, 25.0)], "mix": [(1.0, 5.0)]}
RULES: dict[str, tuple[str, Rule, float]] = {
    "`lru`, exclusive": ("lru", Rule.EXCLUSIVE, 0.0),
    "`lru`, keep copy": ("lru", Rule.KEEP_COPY, 0.0),
    "`curves`, exclusive": ("curves", Rule.EXCLUSIVE, 0.0),
    "`curves`, keep copy": ("curves", Rule.KEEP_COPY, 0.0),
    "`curves`, keep copy, P(reuse) > 0.2": ("curves", Rule.FORECAST, 0.2),
    "`curves`, keep copy, P(reuse) > 0.5": ("curves", Rule.FORECAST, 0.5),
}


def measure_tiers(results: Result, traces: list[str]) -> None:
    found = results.setdefault("two_tiers", {})
    for name, sizes in TIERS.items():
        if name not in traces:
            continue
        wanted = [
            (pair, label)
            for pair in sizes
            for label in RULES
            if label not in found.get(_tiers_title(name, pair), {})
        ]
        trace = TRACES[name]() if wanted else None
        for pair, label in wanted:
            assert trace is not None
            policy, rule, least = RULES[label]
            upper, lower = (int(trace.unique_count * percent / 100) for percent in pair)
            one = replay_two_tiers(trace, OURS[policy], (upper, lower), rule, least=least)
            title = _tiers_title(name, pair)
            found.setdefault(title, {})[label] = {
                "upper": round(one.upper_hit_count / one.asked_count, 4),
                "lower": round(one.lower_hit_count / one.asked_count, 4),
                "written": round(one.written_count / one.asked_count, 4),
            }
            print(title, label, found[title][label], flush=True)
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def _tiers_title(name: str, pair: tuple[float, float]) -> str:
    return f"{name} {pair[0]:g} % + {pair[1]:g} %"


def _tiers_table(found: Result) -> str:
    rows = ["| | rule | hit | in memory | below | written |", "| --- | --- |" + " ---: |" * 4]
    for name, sizes in TIERS.items():
        for pair in sizes:
            title = _tiers_title(name, pair)
            for label, one in ((label, found.get(title, {}).get(label)) for label in RULES):
                if one is not None:
                    hit = one["upper"] + one["lower"]
                    shares = (hit, one["upper"], one["lower"], one["written"])
                    cells = " | ".join(f"{share:.4f}" for share in shares)
                    rows.append(f"| {title} | {label} | {cells} |")
    return _TIERS + "\n".join(rows) + "\n\n" if len(rows) > 2 else ""


def render(results: Result) -> str:
    tables = "\n".join(_table(name, results[name]) for name in TITLES if name in results)
    absent = [TITLES[name].split(":")[0] for name in TITLES if name not in results]
    note = f"Not measured yet: {', '.join(absent)}.\n\n" if absent else ""
    return f"{_INTRODUCTION}{note}{tables}{_differences(results)}{_tiers_table(results.get('two_tiers', {}))}{guard_day.section()}{_METHOD}"


def _differences(results: Result) -> str:
    """In points of the hit ratio."""

    def less(policy: str) -> list[float]:
        return [
            100 * (results[trace][policy][f"{size:g}"]["hit"] - figure)
            for trace, found in ELSEWHERE.items()
            for size, figure in zip(SMALL, found[policy], strict=True)
            if f"{size:g}" in results.get(trace, {}).get(policy, {})
        ]

    below_lru = [
        100 * (mine["hit"] - results[trace]["lru"][size]["hit"])
        for trace in TRACES
        for size, mine in results.get(trace, {}).get("curves", {}).items()
        if size in results[trace].get("lru", {})
    ]
    exact = max(abs(one) for one in less("lru") + less("belady"))
    return f"""## Beside other figures

Another simulator has replayed the two Mooncake traces by the same rules. `lru` and Belady are at most {exact:.2f} points
(hundredths of all blocks) from what it found; `curves`, whose classes and steps are not the same, {min(less("curves")):+.2f} to
{max(less("curves")):+.2f}. On all traces and sizes here `curves` is {min(below_lru):+.2f} to {max(below_lru):+.2f} points from `lru`.

"""


def _table(name: str, found: Result) -> str:
    sizes = [f"{size:g}" for size in SIZES[name]]
    rows = [
        "| policy | " + " | ".join(f"{size} %" for size in sizes) + " |",
        "| --- |" + " ---: |" * len(sizes),
    ]
    for policy in POLICIES:
        mine = found.get(policy, {})
        cells = [f"{mine[size]['hit']:.4f}" if size in mine else "–" for size in sizes]
        label = "Belady" if policy == "belady" else f"`{policy}`"
        rows.append(f"| {label} | " + " | ".join(cells) + " |")
    return f"""## {TITLES[name]}

{found["requests"]:,} requests ask for {found["asked"]:,} blocks of {found["block_tokens"]} tokens, {found["unique"]:,} different ones.

{chr(10).join(rows)}

"""


_INTRODUCTION = """# Eviction policies

Written by `python -m benchmarks.policies` from [its results](../benchmarks/results/policies.json); the traces are in
[benchmarks/traces](../benchmarks/traces/README.md).

`[dram] policy` chooses:

| policy | evicts first |
| --- | --- |
| `lru` (default) | the chain used longest ago, its tail before its head |
| `curves` | what is worth least by how blocks of its kind were used so far: kinds are tenant, turn of the conversation, new tokens of the request, and time since its prefix was used before, kind of the turn where the engine says it (`turn_kind`); worth are hits for each second that a block is kept |
| `arc` | by a balance of what was used once and what was used again; to compare with |

Only leaves are ever evicted, whatever the policy. Belady, who knows the future, bounds them all.

`curves` is there for caches that are small beside what is asked for. With one kind of request it is `lru`. Why it is
not the default yet: [ADR 0026](decisions/0026-what-curves-cost.md). It remembers at least a million blocks (21 bytes each,
16 times as many as fit in memory if that is more), of every namespace: a pool of a million blocks took 957 bytes a block in
the daemon, and 293 with `lru`.

It is guarded: two shadow caches see the same sample of the chains (one of 16 to 64), one evicts by the curves and one
by age alone, and while age alone has clearly more hits the daemon evicts by age. A shadow needs 1,000 blocks, so memory
16,000 at least; below that the guard is off. `kvtier stats` and `kvtier_eviction_order_count` say how namespaces evict.

What it costs: `python -m benchmarks.policy_cost` plays the chat trace on the daemon's core with `lru` and with `curves`
in turns, and counts CPU time. 600 requests in blocks of 16 tokens took 3.4 microseconds a touched block with `lru` and
4.3 with `curves`, at load 10 on two cores. A request costs about the same whatever its length, so with blocks of 512 tokens,
of which a request has 23, they cost more each: 17.5 and 25.6 in 3,000 requests at load 10 (its guard off, for the pool had
5,231 blocks). What `curves` cost a whole daemon: [benchmarks.md](benchmarks.md#policy-what-reuse-curves-cost-the-daemon).

The tables give the prefix hit ratio: blocks of each request's longest resident prefix, of all blocks asked for. Sizes
are in percent of the different blocks; – is not measured yet.

"""

_TIERS = """## Two tiers

Memory over a tier that wears, which evicts by age. What memory evicts goes down. *Exclusive*: what is promoted leaves no
copy, so it is written again when it goes down again. *Keep copy*: it stays. P(reuse): only what is likely enough to be
used again while it would lie below, by the class of its request, and what was used twice. All columns are of the blocks
asked for. The daemon keeps copies, writes while blocks are still in memory, and moves the threshold between 0.05 and
0.6 by what is left of its write budget (`nvme.admission`); it draws no lots for single blocks, for behind a hole a chain
is of no use.

"""

_METHOD = """## How

One tier, cold at the start; a request's whole chain is resident right after it. Requests are instantaneous, and blocks
of answers are not in the traces before the next turn asks for them, so all ratios are a little low, for every policy
alike. A partly filled last block is left out. The policies are those of the daemon, told of requests as its core tells
them, and refitted as often.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", action="append", choices=list(TRACES))
    parser.add_argument("--policy", action="append", choices=POLICIES)
    parser.add_argument("--document", action="store_true", help="measure nothing")
    asked = parser.parse_args()
    results: Result = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not asked.document:
        print(f"load {os.getloadavg()[0]:.1f}; CPU seconds are of this process")
        measure(results, asked.trace or list(TRACES), asked.policy or list(POLICIES))
        if asked.policy is None:
            measure_tiers(results, asked.trace or list(TRACES))
    DOCUMENT.write_text(render(results), encoding="utf-8")


if __name__ == "__main__":
    main()
