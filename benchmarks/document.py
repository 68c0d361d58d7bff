"""Writes docs/benchmarks.md from benchmarks/results/*.json: `python -m benchmarks.document`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import paging_report, tiers
from benchmarks.rivals import plot, report

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "benchmarks.md"
RIVALS = RESULTS / "rivals.json"
RIVALS_PLOT = ROOT / "docs" / "rivals.svg"
NAMES = (
    *("match", "transfer", "daemon", "churn", "policy", "nvme", "recovery", "restart", "tiers"),
    *("engine_prefill", "vllm_ttft"),
)

Result = dict[str, Any]


def render() -> str:
    """The whole document."""
    results = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in NAMES}
    parts = (
        _INTRODUCTION,
        _machine(results),
        _match(results["match"]),
        _transfer(results["transfer"]),
        _daemon(results["daemon"]),
        _churn(results["churn"]),
        _policy(results["policy"]),
        _nvme(results["nvme"]),
        _recovery(results["recovery"]),
        _restart(results["restart"]),
        tiers.section(results["tiers"]),
        _prefill(results["engine_prefill"]),
        _vllm_ttft(results["vllm_ttft"]),
        paging_report.section(json.loads((RESULTS / "paging.json").read_text())),
        report.section(json.loads(RIVALS.read_text())),
    )
    return "\n".join(parts)


def _row(name: str, value: str, target: Result | None = None, unit: str = "") -> str:
    if target is None:
        return f"| {name} | {value} | – | |"
    sign, bound = ("≤", target["at_most"]) if "at_most" in target else ("≥", target["at_least"])
    verdict = "met" if target["met"] else "**missed**"
    return f"| {name} | {value} | {sign} {bound:g}{unit} | {verdict} |"


def _machine(results: dict[str, Result]) -> str:
    facts = results["match"]["environment"]
    loads = ", ".join(
        f"{results[name]['environment']['load_average']:.1f} at `{name}`"
        for name in NAMES
        if "environment" in results[name]
    )
    return f"""## Machine

{facts["cpu"]}, {facts["cores"]} cores, {facts["memory_gib"]} GiB, Linux {facts["kernel"]}, Python
{facts["python"]}, grpcio {facts["grpcio"]}, protobuf {facts["protobuf"]}, uvloop {facts["uvloop"]};
pool on huge pages ({facts["page_kind"]}); {facts["date"][:10]}, commit {facts["commit"]}. No GPU.

The machine is virtual and shared; load averages before each run: {loads}. So read the ratios, and the
bare gRPC server measured beside each match, rather than the milliseconds.
"""


def _match(r: Result) -> str:
    t = r["targets"]
    rows = [
        _row("match, median", f"{r['p50_ms']:.2f} ms", t["p50_ms"], " ms"),
        _row("match, p99", f"{r['p99_ms']:.2f} ms"),
        _row("the bare gRPC server, median", f"{r['bare_p50_ms']:.2f} ms"),
        _row("the bare gRPC server, p99", f"{r['bare_p99_ms']:.2f} ms"),
        _row("of a match, in the daemon's handler", f"{r['daemon_us']:.0f} µs"),
        _row("beside an engine that acquires in a loop, median", f"{r['p50_busy_ms']:.2f} ms"),
        _row("the same, p99", f"{r['p99_busy_ms']:.2f} ms", t["p99_busy_ms"], " ms"),
        _row("acquires of that engine", f"{r['busy_acquires_per_second']:.0f} a second"),
        _row(
            "memory a block, pool and slot table left out",
            f"{r['bytes_per_block']:.0f} bytes",
            t["bytes_per_block"],
        ),
        _row(
            "acquire and touch, time in the daemon's call, a block",
            f"{r['acquire_us_per_block']:.2f} µs",
            t["acquire_us_per_block"],
            " µs",
        ),
        _row("wrong answers", str(r["wrong_answers"])),
    ]
    return f"""## match: a 128 K-token prompt against a million blocks

Tiny slots hold {r["resident_blocks"]:,} blocks, committed by a real session. Trunks that branch near their
end give {r["chains"]:,} distinct chains of {r["chain_blocks"]:,} blocks to ask for: a third resident, a third to
a random depth, a third not at all; every answer is compared with what is known. Client, daemon and the
busy engine are three processes. In turn with each match the same bytes go to a gRPC server of the same
library, event loop and settings that does nothing: matches pass by the lane beside gRPC
([decision 0008](decisions/0008-a-lane-beside-grpc.md)).

| figure | value | target | |
| --- | --- | --- | --- |
{chr(10).join(rows)}
"""


def _transfer(r: Result) -> str:
    t = r["targets"]
    rows = []
    for size, suffix in (("256 MiB", ""), ("64 MiB", "_64")):
        for way in ("offload", "onboard"):
            name = f"{way}_ratio{suffix}"
            rows.append(_row(f"{way} / memcpy, {size}", f"{r[name]:.2f}", t[name]))
            rate, beside = r[f"{way}_gb_s{suffix}"], r[f"{way}_memcpy_gb_s{suffix}"]
            rows.append(
                _row(f"{way}, {size}; memcpy beside it", f"{rate:.1f} GB/s; {beside:.1f} GB/s")
            )
    return f"""## transfer: through the arena, against memcpy

Engine A offloads, engine B (another process) onboards what A committed, {r["rounds"]} rounds of each size,
blocks of 2 MiB, pool of {r["pool_bytes"] >> 30} GiB so that the stock rule lets A reserve everything ahead. Counted:
the copies and Commit; Acquire, the copies and Release. Beside each, in the same process, memcpy
(`np.copyto`) of as many bytes between two buffers on the same kind of pages; who goes first alternates.
Ratio: median over the rounds. B compares every block with what A wrote ({r["wrong_bytes"]} wrong).

| figure | value | target | |
| --- | --- | --- | --- |
{chr(10).join(rows)}
"""


def _daemon(r: Result) -> str:
    t = r["targets"]
    rows = [
        _row("start to READY, median of 5", f"{r['start_s']:.2f} s", t["start_s"], " s"),
        _row(
            "resident memory without pool and slot table",
            f"{r['rss_mib']:.0f} MiB",
            t["rss_mib"],
            " MiB",
        ),
        _row(
            f"idle, over {r['idle_seconds']} s",
            f"{r['idle_core_percent']:.2f} % of a core",
            t["idle_core_percent"],
            " %",
        ),
    ]
    return f"""## daemon: what it costs to have one

| figure | value | target | |
| --- | --- | --- | --- |
{chr(10).join(rows)}
"""


def _churn(r: Result) -> str:
    s = r["settings"]
    return f"""## churn: more conversations than room

{s["engines"]} engine processes play turns of {s["conversations"]:,} conversations of up to {s["blocks"]} blocks against a pool
of {s["pool_bytes"] >> 20} MiB for {s["seconds"]} s: match, acquire, read and compare, release, reserve, write, commit; one
in ten aborts.

| figure | value |
| --- | --- |
| calls a second | {r["calls_per_second"]:.0f} |
| hit ratio | {r["hit_ratio"]:.2f} |
| blocks evicted | {r["evicted_blocks"]:,.0f} |
| blocks read, of them wrong | {r["read_blocks"]:,}, {r["wrong_blocks"]} |
| violated invariants at the end | {r["violation_count"]} |
| match, median and p99 | {r["match_p50_ms"]:.2f}, {r["match_p99_ms"]:.2f} ms |
| acquire, median and p99 | {r["acquire_p50_ms"]:.2f}, {r["acquire_p99_ms"]:.2f} ms |
| commit, median and p99 | {r["commit_p50_ms"]:.2f}, {r["commit_p99_ms"]:.2f} ms |
"""


def _policy(r: Result) -> str:
    s = r["settings"]
    rows = []
    for tokens in s["block_tokens"]:
        turns = sorted(r[f"core_percent_turns_{tokens}"])
        rows += [
            _row(
                f"{tokens} tokens a block: `curves` beyond `lru`, of a core at 10,000 blocks/s",
                f"{r[f'core_percent_{tokens}']:.1f} %",
                r["targets"][f"core_percent_{tokens}"],
                " %",
            ),
            _row(
                "of single pairs of turns: the middle half",
                f"{turns[len(turns) // 4]:.1f} to {turns[-1 - len(turns) // 4]:.1f} %",
            ),
            _row(
                "the daemon's processor time a touched block, `lru`; `curves`",
                f"{r[f'lru_us_{tokens}']:.1f} µs; {r[f'curves_us_{tokens}']:.1f} µs",
            ),
            _row(
                "blocks a second that were reached, `lru`; `curves`",
                f"{r[f'lru_rate_{tokens}']:,.0f}; {r[f'curves_rate_{tokens}']:,.0f}",
            ),
            _row(
                "hit ratio, `lru`; `curves`",
                f"{r[f'lru_hit_ratio_{tokens}']:.3f}; {r[f'curves_hit_ratio_{tokens}']:.3f}",
            ),
        ]
    return f"""## policy: what reuse curves cost the daemon

Two daemons, `lru` and `curves`, each with {s["engines"]} engine processes that play the same conversations at {s["rate"]:,}
touched blocks a second: match, acquire, release, reserve, commit, in a full pool of {s["pool_blocks"]:,} blocks. They play in
turns, {s["turns"]} of {s["turn_seconds"]} s each; counted is the processor time of all the daemon's threads. Chains are drawn, so hit ratios say
nothing of real traffic ([policies.md](policies.md)). Where far fewer blocks a second were reached, others had the
processors: caches are cold at each call, and processor time a block is more than on a quiet machine.

| figure | value | target | |
| --- | --- | --- | --- |
{chr(10).join(rows)}
"""


def _nvme(r: Result) -> str:
    t = r["targets"]
    rows = []
    for way in ("write", "read"):
        spread = f"{min(r[f'{way}_ratios']):.2f} to {max(r[f'{way}_ratios']):.2f}"
        ratio = f"{r[f'{way}_ratio']:.2f} ({spread})"
        rows += [
            _row(f"{way} / fio with a queue (its spread)", ratio, t[f"{way}_ratio"]),
            _row(f"{way} / fio with as many threads", f"{r[f'{way}_ratio_threads']:.2f}"),
            _row(
                f"{way}; fio beside it",
                f"{r[f'{way}_gbps']:.2f} GB/s; {r[f'fio_{way}_gbps']:.2f} GB/s",
            ),
            _row(f"{way}, processor time a block, huge pages", f"{r[f'{way}_us_huge']:.0f} µs"),
            _row("the same, 4 KiB pages", f"{r[f'{way}_us_base']:.0f} µs"),
        ]
    rows.append(_row("of each, one checksum", f"{r['checksum_us']:.0f} µs"))
    direct = "direct I/O" if r["is_direct"] else "through the page cache"
    return f"""## nvme: the tier's own path, against fio

{r["blocks"]:,} blocks of 2 MiB in a pool on this machine's (virtual) disk, {direct}, {r["depth"]} calls under
way. Each round writes all blocks and reads them in random order, the pool and fio ({r["fio_engine"]}, buffers:
{r["fio_memory"]}) in turn on the same bytes of the same file; median over {len(r["write_ratios"])} rounds. The pool's figures
contain checksums, verified before each write and after each read, and the slot table; fio only moves bytes.

| figure | value | target | |
| --- | --- | --- | --- |
{chr(10).join(rows)}
"""


def _recovery(r: Result) -> str:
    cold = "past the page cache" if r["table_was_cold"] else "through the page cache"
    rows = [
        _row(
            f"the least of {r['rounds']} rounds",
            f"{r['recovery_s']:.2f} s",
            r["targets"]["recovery_s"],
            " s",
        ),
        _row("their median", f"{r['recovery_median_s']:.2f} s"),
        _row("of the least: table read and judged", f"{r['read_s']:.2f} s"),
        _row("parents found and put in order", f"{r['chains_s']:.2f} s"),
        _row("taken into the core's index", f"{r['index_s']:.2f} s"),
        _row("beside it: one dict of as many hashes", f"{r['dict_build_s']:.2f} s"),
    ]
    return f"""## recovery: an NVMe pool of a million blocks after a kill

{r["slots"]:,} slots in {r["segments"]:,} segments, {r["table_mib"]:.0f} MiB of slot table, read {cold}; from opening the
file until a block manager knows every block. DRAM is served meanwhile.

| figure | value | target | |
| --- | --- | --- | --- |
{chr(10).join(rows)}
"""


def _restart(r: Result) -> str:
    targets = r["targets"]
    rows = [
        _row("READY after a kill -9", f"{r['ready_s']:.2f} s", targets["ready_s"], " s"),
        _row("the daemon's processor time by then", f"{r['ready_cpu_s']:.2f} s"),
        _row("READY of the same daemon when it had nothing", f"{r['start_s']:.2f} s"),
        _row("all blocks are hits again", f"{r['all_s']:.2f} s"),
        _row("the daemon's processor time by then", f"{r['all_cpu_s']:.2f} s"),
        _row("blocks that are hits afterwards", f"{r['found_share']:.1%}", targets["found_share"]),
    ]
    return f"""## restart: a million blocks in memory after a kill, kept by a holder

{r["resident_blocks"]:,} blocks of 64 bytes, {r["rounds"]} rounds, the least of each; times from the start of the process. An engine's
session that was there before goes on: at the end it reads {r["engine_blocks"]} blocks through slabs that it has mapped.

| figure | value | target | |
| --- | --- | --- | --- |
{chr(10).join(rows)}
"""


def _prefill(r: Result) -> str:
    return f"""## engine_prefill: the reference engine, beside transformers

The same weights (SmolLM2-135M), float32, {r["threads"]} threads, {r["prefill_tokens"]:,} tokens, interleaved rounds.

| figure | value | target |
| --- | --- | --- |
| prefill, transformers' time / ours | {r["prefill_ratio"]:.2f} | ≥ 0.7 |
| ours; theirs | {r["engine_s"]:.2f} s; {r["transformers_s"]:.2f} s | – |
| time to first token of {r["ttft_tokens"]:,} tokens, all but {r["ttft_fresh_tokens"]} cached / cold | {r["ttft_ratio"]:.3f} | ≤ 0.25 |

What kvtier does to the time to first token is in the demo (`make demo`), which checks its own claims.
"""


def _vllm_ttft(r: Result) -> str:
    targets = r["targets"]
    rows = [
        _row(
            "time to first token after a restart of vLLM / cold",
            f"{r['warm_ratio']:.3f}",
            targets["warm_ratio"],
        ),
        _row("cold; after a restart", f"{r['ttft_cold_s']:.2f} s; {r['ttft_warm_s']:.2f} s"),
        _row(
            "CPU time in the connector's hooks / in steps, misses only",
            f"{r['hook_cpu_ratio']:.4f}",
            targets["hook_cpu_ratio"],
        ),
        _row("tokens a second with kvtier / without, misses only", f"{r['throughput_ratio']:.3f}"),
    ]
    return f"""## vllm_ttft: real vLLM on a CPU

vLLM {r["vllm"]}, {r["model"]} with random weights, {r["dtype"]}, {r["threads"]} thread, {r["tokens"]:,} tokens, of which
{r["warm_tokens_cached"]:,} come back; {r["rounds"]} rounds, engines with and without kvtier in turns. vLLM on a GPU: not run by us.

| figure | value | target | |
| --- | --- | --- | --- |
{chr(10).join(rows)}

Run it with `.venv-vllm/bin/python -m benchmarks.vllm_ttft --json` after `make test-vllm`; `make bench` leaves it out.
"""


_INTRODUCTION = """# Benchmarks

Generated by `python -m benchmarks.document`; do not edit. Every figure comes from a JSON file in
[benchmarks/results](../benchmarks/results), which also says on what it was measured. Targets are those of
the architecture: ratios and times on one machine.

## How to run them

```
kvtier bench match --tokens 131072 --block-tokens 16 --resident 1000000 --json
kvtier bench transfer --json
kvtier bench daemon --json
kvtier bench churn --json
kvtier bench policy --json
kvtier bench nvme --json
kvtier bench recovery --slots 1000000 --json
kvtier bench restart --json
kvtier bench tiers --path DIR --rounds 61 --json
```

`make bench` runs all of them (fio is Debian's; without it there are no ratios) and the engine's, writes benchmarks/results and this document. The first
four start a private daemon, unless `--socket PATH` names a running one, `restart` has one that it kills, the others need
none; what they made is removed afterwards, also after ctrl-C or SIGTERM. Progress goes to standard error. The exit code is 0, 1
when an answer, a byte or an invariant was wrong (with `--strict` also when a target was missed), 2 for a
mistake in the arguments, 3 when no daemon answers.
"""


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
    RIVALS_PLOT.write_text(plot.draw(json.loads(RIVALS.read_text())), encoding="utf-8")
