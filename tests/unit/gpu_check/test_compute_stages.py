"""The stages that compute, on a fake GPU: attention by a twin in NumPy, work of given lengths."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from benchmarks.gpu import attention, end_to_end, engine, interference
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.kv import Shape
from kvtier.cuda.fake import FakeCudart, FakeDevice
from kvtier.cuda.fake_costs import FakeCosts
from kvtier.cuda.fake_memory import FakeMemory
from kvtier.cuda.runtime import Stream
from kvtier.types import Worth
from tests.support.fake_client import FakeClient, FakeLease
from tests.unit.gpu_check.small_rig import DECODE_SECONDS, rig_of

pytestmark = pytest.mark.slow

SMALL = Shape(layers=2, heads=2, width=32, block_tokens=8, block_count=6)
ATTENTION = attention.Sizes(requests=3, tokens=32, query_heads=4, heads=2, width=64, block_tokens=8)


class AttentionTwin:
    """What the kernels do, by their arguments; `is_wrong` forgets the last table entry."""

    def __init__(self, cuda: FakeCudart, *, is_wrong: bool = False) -> None:
        self.is_wrong = is_wrong
        cuda.add_twin("paged_attention_bf16_64", self.attend)
        for other in ("merge_splits_bf16_64", "write_kv"):  # Loaded, not launched.
            cuda.add_twin(other, lambda memory, arguments: None)

    def attend(self, memory: FakeMemory, arguments: Sequence[int]) -> None:
        out, queries, geometry, _, table, table_blocks, _, requests, heads, *_ = arguments
        sizes = ATTENTION
        base = int(memory.on_device(geometry, 88).view(np.int64)[0])
        blocks = memory.on_device(base, sizes.kv_bytes).view(np.uint16)
        blocks = blocks.reshape(-1, 2, sizes.block_tokens, sizes.heads, sizes.width)
        order: attention.Array = np.arange(sizes.block_count)
        if table:
            order = memory.on_device(table, 4 * requests * table_blocks).view(np.int32).copy()
            if self.is_wrong:
                order[-1] = order[0]
        shape = (requests, heads, sizes.width)
        length_bytes = 2 * requests * heads * sizes.width
        query = memory.on_device(queries, length_bytes).view(np.uint16).reshape(shape)
        found = attention.reference(blocks[order], query, sizes)
        rounded = found.astype(np.float32).view(np.uint32) + np.uint32(1 << 15)
        np.copyto(
            memory.on_device(out, length_bytes),
            (rounded >> np.uint32(16)).astype(np.uint16).ravel().view(np.uint8),
        )


@pytest.mark.parametrize("device", [FakeDevice(), FakeDevice(has_batches=False)])
def test_attention_is_compared_with_itself_and_with_float64(device: FakeDevice) -> None:
    cuda, findings = FakeCudart(device=device), Findings()
    AttentionTwin(cuda)
    attention.measure(rig_of(cuda), findings, ATTENTION)
    assert not findings.wrong
    assert findings.figures["paged_to_contiguous"] > 0
    assert findings.figures["relative_error_to_float64"] < 2e-3
    cuda.assert_clean()
    assert cuda.memory.device.allocation_count == 0


def test_without_a_compiler_attention_is_wrong_and_not_broken() -> None:
    findings = Findings()
    rig = rig_of(FakeCudart())
    rig.kernel_cache = None
    attention.measure(rig, findings, ATTENTION)
    assert findings.wrong == ["attention kernels can be compiled"]


def test_attention_that_reads_another_block_fails_the_stage() -> None:
    cuda, findings = FakeCudart(), Findings()
    AttentionTwin(cuda, is_wrong=True)
    attention.measure(rig_of(cuda), findings, ATTENTION)
    assert findings.wrong == ["paged attention gives the bytes of contiguous attention"]


INTERFERENCE = interference.Sizes(
    shape=SMALL, gemm_count=3, step_count=6, throttled_step_count=40, judged_step_count=20
)


def test_copies_run_beside_every_step_and_stretch_nothing_on_engines_of_their_own() -> None:
    # So slow that copies never cease.
    cuda, findings = FakeCudart(costs=FakeCosts(link_bytes_per_second=1e7)), Findings()
    interference.measure(rig_of(cuda), findings, INTERFERENCE)
    rows = findings.figures["beside"]
    assert [(row["work"], row["copies"], row["order"]) for row in rows] == [
        (work, copies, order)
        for order in ("BL2NHC", "2HBNC")
        for work in ("gemm", "decode")
        for copies in ("onboard", "offload")
    ]
    assert all(row["copied_gigabytes_per_second"] >= 0.0075 for row in rows)
    assert all(row["p99_of_alone"] < 1.1 for row in rows if row["order"] == "BL2NHC")
    assert not findings.missed
    assert "throttled" in findings.figures
    cuda.assert_clean()
    assert cuda.memory.device.allocation_count == 0


def test_steps_that_copies_stretch_are_seen() -> None:
    """Work that takes half as long again once copies may run beside it."""
    cuda, findings = FakeCudart(), Findings()
    rig = rig_of(cuda)
    stretched = rig.work.decode_step

    def decode_step(stream: Stream) -> None:
        stretched(stream)
        if findings.figures.get("alone", [])[1:]:
            cuda.compute(stream, 0.5 * DECODE_SECONDS)

    rig.work.decode_step = decode_step  # type: ignore[method-assign]
    interference.measure(rig, findings, INTERFERENCE)
    assert findings.missed == ["decode p99 beside throttled offload, against alone: 1.5"]


def test_kv_comes_back_byte_for_byte_and_faster_than_it_is_computed() -> None:
    cuda, findings = FakeCudart(), Findings()
    end_to_end.measure(rig_of(cuda), findings, end_to_end.Sizes(SMALL, rest_tokens=1))
    assert not findings.wrong
    assert [row["order"] for row in findings.figures["end_to_end"]] == ["BL2NHC", "2BNHC"]
    assert findings.figures["targets"]
    cuda.assert_clean()
    assert cuda.memory.device.allocation_count == 0


def test_an_onboard_slower_than_prefill_misses_its_target() -> None:
    cuda = FakeCudart(costs=FakeCosts(link_bytes_per_second=1e7))
    findings = Findings()
    end_to_end.measure(rig_of(cuda), findings, end_to_end.Sizes(SMALL, rest_tokens=1))
    assert not findings.wrong
    assert [text.partition(":")[0] for text in findings.missed] == ["onboard of 48 tokens"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The model is tiny."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


ENGINE = engine.Sizes(
    model={
        "layer_count": 3,
        "hidden_size": 16,
        "ffn_size": 16,
        "head_count": 2,
        "kv_head_count": 1,
        "head_size": 8,
        "vocab_size": 50,
        "context_tokens_max": 256,
    },
    block_tokens=8,
    prompt_tokens=64,
    rest_tokens=5,
    decode_requests=3,
    decode_prompt_tokens=12,
    decode_steps=6,
)


@pytest.mark.usefixtures("one_thread")
def test_the_engine_onboards_what_it_has_computed_and_decodes_beside_offloads() -> None:
    cuda, findings = FakeCudart(), Findings()
    engine.measure(rig_of(cuda), findings, ENGINE)
    assert not findings.wrong
    assert [row["load"] for row in findings.figures["first_token"]] == ["whole", "layer by layer"]
    whole, by_layer = (row["onboarded_seconds"] for row in findings.figures["first_token"])
    assert by_layer < whole
    alone, beside = (
        [row[f"{name}_p50_seconds"] for row in findings.figures["decode"]]
        for name in ("alone", "beside")
    )
    assert all(seconds > 0 for seconds in [*alone, *beside])
    assert findings.figures["decode"][0]["offloaded_gigabytes_per_second"] > 0
    cuda.assert_clean()


@pytest.mark.usefixtures("one_thread")
def test_blocks_that_come_back_otherwise_fail_the_engine_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = FakeClient.release

    def spoil(self: FakeClient, leases: Sequence[FakeLease], worth: Worth | None = None) -> int:
        for lease in leases:
            self.memory[0][lease.slots] ^= 1
        return release(self, leases, worth)

    monkeypatch.setattr(FakeClient, "release", spoil)
    findings = Findings()
    engine.measure(rig_of(FakeCudart()), findings, ENGINE)
    assert "whole: blocks on the device are those of their slots" in findings.wrong


def test_without_what_the_connector_needs_the_engine_stage_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "benchmarks.gpu.engine_rig", None)
    findings = Findings()
    engine.measure(rig_of(FakeCudart()), findings, ENGINE)
    assert findings.figures["engine"].startswith("not run: ")
    assert not findings.wrong
