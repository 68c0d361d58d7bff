"""The section of docs/benchmarks.md on `kvtier bench tiers`."""

# ruff: noqa: E501  # Tables and prose.

from __future__ import annotations

from typing import Any

Result = dict[str, Any]

_TIERS = {
    "dram": ("DRAM, one thread", "np.copyto"),
    "cxl": ("CXL, emulated, not held back", "np.copyto, as many threads"),
    "cxl_node": ("CXL, a node without processors", "np.copyto, as many threads"),
    "nvme": ("NVMe", "preadv and pwritev of one file, as many calls"),
    "files": ("remote: shared folder", "one file after the other, page cache"),
    "redis": ("remote: Redis", "the redis package, pipelined"),
    "mooncake": ("remote: Mooncake", "its own client, registered memory"),
}


def section(r: Result) -> str:
    rows = [
        _row(r, tier, way)
        for tier in _TIERS
        for way in ("put", "get")
        if f"{tier}_{way}_ratio" in r
    ]
    not_run = "".join(
        f"- Not run: {_TIERS[tier][0]}: {reason}.\n" for tier, reason in r["not_run"].items()
    )
    beside = "; ".join(
        f"{name}: {what}" for tier, (name, what) in _TIERS.items() if f"{tier}_put_ratio" in r
    )
    again = r.get("measured_again")
    anew = "" if again is None else _AGAIN.format(**again)
    return f"""## tiers: each tier's own path, beside its medium or its engine's own client

Batches of {r["blocks"]} blocks of {r["block_bytes"] >> 20} MiB, {r["rounds"]} rounds; in each both sides put all blocks and get them back, in
turn. Ratio: of speeds within a round, median over the rounds. Latency: of lone blocks, median and p99. Ours contains
checksums where the tier has them, on every block both ways, and remote blocks' frames; the other side only moves bytes.
All that came back was compared with what was put ({r["wrong_blocks"]} wrong). Other processes had {r["neighbour_cores"]:.1f} cores meanwhile.

| tier, way | ratio (its spread) | target | | GB/s; beside it | ms, lone block; beside it |
| --- | --- | --- | --- | --- | --- |
{chr(10).join(rows)}

- Beside it. {beside}.
- DRAM has no checksum on this way: the daemon sums blocks after commit, in the background.
- Between DRAM and CXL a block's checksum goes along and is not compared (decision 0013). Real CXL hardware: not run.
- The engines' servers have half of the cores and both clients the other half, as on two machines. Without that the scheduler
  decides: a sender and its server on one core, though another was idle, took 40 ms for what took 24 on two, and kvtier's
  sender, which is a thread of its own, was put there more often (31 rounds: put 0.76; with cores apart 0.92).
- Both sides of Redis send blocks from where they are, over one connection; kvtier sums them when all is sent, while
  the server takes in the rest (64 MiB: 3 ms of one core). What comes back the package joins and cuts; kvtier receives it in
  place and copies it out with its checksum.
- Mooncake's client moves bytes from and to where they are, and verifies nothing. kvtier copies and sums each way (64 MiB:
  5 to 7 ms): a call that hangs must be able to hold a buffer, and no slot. A call of the library keeps one core busy with
  asking whether it is done, so kvtier makes one at a time, of up to 64 MiB, in a thread of lower priority where that can be
  taken back, and copies before it or after it. Where the client has one core, as here, that thread takes from the
  client's own sending, and giving way makes a put faster than the client's. With both cores for all (31 rounds): put 0.87,
  get 0.83; on busy machines, in nine runs before, put 0.76 to 1.21 and get 0.73 to 0.89.
- The bare folder writes into and reads from the page cache in one thread; `files` takes a thread a block, for a file
  system that may hang, and copies each block once more, where a read from the page cache is but a copy.
{anew}{not_run}"""


# Rows that are of a later run than the others, because the code under them has changed since.
_AGAIN = """- Redis and Mooncake are of a later run than the other rows: {rounds} rounds, a load of {load_average:.0f}, other processes had
  {neighbour_cores:.1f} cores meanwhile. The rounds are in turn, so the ratios stand; speeds and latencies are those of a busy machine.
"""


def _row(r: Result, tier: str, way: str) -> str:
    name = f"{tier}_{way}"
    ratios = r[f"{name}_ratios"]
    spread = f"{r[f'{name}_ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    target = r["targets"].get(f"{name}_ratio")
    bound, verdict = "–", ""
    if target is not None:
        bound, verdict = f"≥ {target['at_least']:g}", "met" if target["met"] else "**missed**"
    speeds = f"{r[f'{name}_gbps']:.2f}; {r[f'{name}_raw_gbps']:.2f}"
    ours, raw = (
        ", ".join(f"{r[f'{name}_{side}p{percent}_ms']:.2f}" for percent in (50, 99))
        for side in ("", "raw_")
    )
    return (
        f"| {_TIERS[tier][0]}, {way} | {spread} | {bound} | {verdict} | {speeds} | {ours}; {raw} |"
    )
