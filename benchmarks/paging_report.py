"""The section of docs/benchmarks.md on paging."""

from __future__ import annotations

from typing import Any

Result = dict[str, Any]
_RANGES = {
    ("Alpaca-like", "parallel sampling"): "6.1–9.8 %",
    ("questions to SmolLM2, Alpaca-like answers", "parallel sampling"): "6.1–9.8 %",
    ("questions to SmolLM2, Alpaca-like answers", "beam search"): "37.6–55.2 %",
    ("ShareGPT-like", "parallel sampling"): "16.2–30.5 %",
}


def section(result: Result) -> str:
    targets, lengths = result["targets"], result["lengths"]
    means = "; ".join(
        f"{name} {one['prompt_mean']:g} + {one['output_mean']:g} (σ {one['sigma']:g})"
        for name, one in lengths.items()
    )
    return f"""## paging: what blocks save

The engine's own pool and scheduler in virtual time, {result["capacity_tokens"]:,} tokens of KV, a context of {result["context_max"]:,}. Mean
lengths of prompt and output: {means}; log-normal, seeded. The paper's figures and ours side by side, with what
differs: [claims.md](claims.md). It took {result["cpu_seconds"]:.0f} s of processor time, {result["seconds"]:.0f} s on the
clock of a busy machine; `make bench-paging`.

Where the memory's tokens are, over all steps of a memory that is always wanted. *Reserved* will be used, *internal* never,
*external* is free in pieces that the next request cannot have:

| allocator | lengths | used | reserved | internal | external | wasted | target | |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
{_waste_rows(result["waste"], targets)}

![Used and wasted memory by allocator](paging-waste.svg)

Blocks that sharing saves, of those in all block tables, over all steps:

| lengths | how | saved | the paper's |
| --- | --- | --- | --- |
{_sharing_rows(result["sharing"])}
{_model_rows(result["sharing_model"])}

Where ours lie outside of the paper's range: our lengths are drawn, its are those of the traces. Sampling shares the
prompt's full blocks alone, so what it saves is the prompt's part of all tokens: more samples and shorter answers save
more, and of a prompt that fills no block nothing. Beams also share what they have generated, and how much is the model's
doing. SmolLM2 (135 M parameters) was asked
{_prompts(result["sharing_model"]["prompts"])}

Tokens a second (virtual: {_COSTS}), {_WORK}:

| batching and memory | tokens a second | running | preempted | computed a token |
| --- | --- | --- | --- | --- |
{_throughput_rows(result["throughput"])}

Blocks of 1 to 256 tokens in half the memory, iteration-level, with kvtier, preempted requests swapped / recomputed:

| B | tokens a second | preempted | unused in blocks |
| --- | --- | --- | --- |
{_size_rows(result["block_sizes"])}

![Tokens a second over block size](paging-block-sizes.svg)

The virtual link has no cost a block, which is what makes small blocks dear on PCIe, and the virtual step none for reading
KV by small blocks: what is seen here is waste alone. Real copies are in [transfer](#transfer-through-the-arena-against-memcpy).
"""


_COSTS = "a step takes 10 ms and 50 µs a token, a tier carries 12 GB/s each way"
_WORK = "100 ShareGPT-like requests at once"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _waste_rows(waste: Result, targets: Result) -> str:
    checked = {
        ("ShareGPT-like", "contiguous max-length"): targets["max_length_waste"],
        ("ShareGPT-like", "paged, B = 16"): targets["paged_waste"],
    }
    rows = []
    for lengths, allocators in waste.items():
        for name, figures in allocators.items():
            parts = [
                _percent(figures[part])
                for part in ("used", "reserved", "internal", "external", "wasted_share")
            ]
            verdict = "– | "
            if (one := checked.get((lengths, name))) is not None:
                sign = f"≥ {_percent(one['at_least'])}" if "at_least" in one else ""
                sign = sign or f"≤ {_percent(one['at_most'])}"
                verdict = f"{sign} | {'met' if one['met'] else '**missed**'}"
            rows.append(f"| {name} | {lengths} | {' | '.join(parts)} | {verdict} |")
    return "\n".join(rows)


def _sharing_rows(sharing: Result) -> str:
    rows = []
    for lengths, ways in sharing.items():
        for way, figures in ways.items():
            said = ", ".join(f"{_percent(share)} ({what})" for what, share in figures.items())
            theirs = _RANGES.get((lengths, way), "–")
            rows.append(f"| {lengths} | {way} | {said} | {theirs} |")
    return "\n".join(rows)


def _model_rows(figures: Result) -> str:
    named = {
        "drawn lengths": "questions to SmolLM2, Alpaca-like answers",
        "chats": "chats with SmolLM2, which ends them",
    }
    return _sharing_rows({name: figures[way] for way, name in named.items()})


def _prompts(prompts: Result) -> str:
    return (
        f"{prompts['count']} questions: plain ({prompts['plain_mean']:g} tokens in the mean, answers of "
        f"{prompts['answer_mean']:g}), and in its chat template ({prompts['chat_mean']:g} tokens),\nanswers cut to 64 tokens."
    )


def _throughput_rows(throughput: Result) -> str:
    return "\n".join(
        f"| {name} | {one['tokens_per_second']:,.0f} | {one['running']:.1f} | {one['preempted']} "
        f"| {one['computed_per_token']:.2f} |"
        for name, one in throughput.items()
    )


def _size_rows(sizes: Result) -> str:
    rows = []
    for size, ways in sizes.items():
        swap, again = ways["swap"], ways["recompute"]
        rows.append(
            f"| {size} | {swap['tokens_per_second']:,.0f} / {again['tokens_per_second']:,.0f} "
            f"| {swap['preempted']} / {again['preempted']} "
            f"| {_percent(swap['tail_share'])} / {_percent(again['tail_share'])} |"
        )
    return "\n".join(rows)
