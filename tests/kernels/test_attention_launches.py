"""The launches of KV writes and attention, on a fake GPU whose kernels are the host twin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, replace

import numpy as np
import pytest

from kvtier.cuda.attention_kernels import (
    AttentionKernels,
    DecodeStep,
    KvGeometry,
    NewTokens,
    geometry_of,
    split_count_of,
)
from kvtier.cuda.device_layout import DeviceTensor
from kvtier.cuda.fake import FakeCudart
from kvtier.cuda.kernel_cache import KernelCache
from kvtier.cuda.runtime import Ranges
from kvtier.errors import BadRequest
from tests.kernels.test_paged_attention import (
    Case,
    assert_equals,
    make_kv,
    random_bits,
    reference,
    to_float64,
)
from tests.support.kernel_twin import Array, KernelTwin
from tests.support.kv_layouts import ITEM
from tests.support.twins_on_fake import add_host_twins

NAMES = [
    "write_kv",
    *(
        f"{kernel}_{element}_{width}"
        for kernel in ("paged_attention", "merge_splits")
        for element in ("bf16", "fp16")
        for width in (64, 128)
    ),
]


class FakeCompiler:
    version = "fake"

    def compile(self, source: str, headers: Mapping[str, str], options: tuple[str, ...]) -> bytes:
        return b"cubin"


class Rig:
    """A case's KV on a fake device, and tensors beside it."""

    def __init__(self, twin: KernelTwin, case: Case) -> None:
        self.case = case
        self.cuda = FakeCudart()
        add_host_twins(self.cuda, twin, NAMES)
        self.rng = np.random.default_rng(3)
        self.kv, self.tables, self.layer = make_kv(case, self.rng)
        self.kv_address = self.put(self.kv.memory.data)
        self.kernels = AttentionKernels(
            self.cuda,
            KernelCache(None, FakeCompiler()),
            self.geometry(),
            element="fp16" if case.element == "fp16" else "bf16",
            query_heads=case.heads[0],
        )
        self.stream = self.cuda.create_stream(0)
        self.whole = Ranges.of((self.kv_address, len(self.kv.memory.data)))

    def put(self, array: Array) -> int:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        address = self.cuda.allocate_device(len(data))
        np.copyto(self.cuda.device_bytes(address, len(data)), data)
        return address

    def geometry(self) -> KvGeometry:
        assert self.kv.values is not None
        return geometry_of(*(self.tensor(view) for view in (self.kv.keys, self.kv.values)))

    def tensor(self, view: Array) -> DeviceTensor:
        offset = view.ctypes.data - self.kv.memory.data.ctypes.data
        return DeviceTensor(self.kv_address + int(offset), view.shape, view.strides, ITEM, 1)

    def attend(self, queries: Array) -> Array:
        counts = np.array(self.case.kv_counts, np.int32)
        out = self.put(np.zeros_like(queries))
        step = DecodeStep(
            out,
            self.put(queries),
            0 if self.tables is None else self.put(self.tables),
            self.case.table_blocks,
            self.put(counts),
            len(counts),
            int(counts.max()),
        )
        self.kernels.attend(step, self.layer, self.whole, self.stream)
        self.cuda.synchronize_stream(self.stream)
        return self.cuda.device_bytes(out, queries.nbytes).view(np.uint16).reshape(queries.shape)


CASES = {
    "few tokens": Case(),
    "split": Case(heads=(4, 2), kv_counts=(600, 3), width=128, element="fp16"),
    "contiguous": Case(layout="contiguous", kv_counts=(30, 9)),
    "reference engine": Case(layout="reference engine", heads=(9, 3), kv_counts=(70, 1, 0)),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_is_launched_with_what_it_needs(host_twin: KernelTwin, name: str) -> None:
    case = CASES[name]
    rig = Rig(host_twin, case)
    queries = random_bits(rig.rng, (len(case.kv_counts), case.heads[0], case.width), case)
    found = to_float64(rig.attend(queries), case.element)
    assert_equals(found, reference(case, (rig.kv, rig.tables, rig.layer), queries), case)
    rig.kernels.close()
    rig.cuda.assert_clean()


def test_tokens_are_written_where_attention_finds_them(host_twin: KernelTwin) -> None:
    rig = Rig(host_twin, Case(kv_counts=(20, 4)))
    shape = (3, rig.case.heads[1], rig.case.width)
    keys, values = (random_bits(rig.rng, shape, rig.case) for _ in range(2))
    places = np.array([17, -1, 40], np.int64)
    step = ITEM * shape[1] * shape[2]
    tokens = NewTokens(rig.put(keys), step, rig.put(values), step, rig.put(places), 3)
    rig.kernels.write(tokens, rig.layer, rig.whole, rig.stream)
    rig.cuda.synchronize_stream(rig.stream)
    assert rig.kv.values is not None
    for view, rows in ((rig.kv.keys, keys), (rig.kv.values, values)):
        view[rig.layer, 1, :, 1], view[rig.layer, 2, :, 8] = rows[0], rows[2]
    length = len(rig.kv.memory.data)
    np.testing.assert_array_equal(rig.cuda.device_bytes(rig.kv_address, length), rig.kv.memory.data)


def test_nothing_to_do_launches_nothing(host_twin: KernelTwin) -> None:
    rig = Rig(host_twin, Case(kv_counts=(1,)))
    calls = rig.cuda.call_count
    rig.kernels.write(NewTokens(0, 0, 0, 0, 0, 0), 0, rig.whole, rig.stream)
    rig.kernels.attend(DecodeStep(0, 0, 0, 0, 0, 0, 0), 0, rig.whole, rig.stream)
    assert rig.cuda.call_count == calls


@pytest.mark.parametrize(
    ("thread_blocks", "kv_count_max", "split_count"),
    [(8, 128_000, 32), (8, 1024, 4), (8, 100, 1), (396, 128_000, 1), (100, 128_000, 3)],
)
def test_few_requests_with_long_prefixes_are_split(
    thread_blocks: int, kv_count_max: int, split_count: int
) -> None:
    assert split_count_of(thread_blocks, kv_count_max, 396) == split_count


def test_what_kernels_cannot_read_is_refused(host_twin: KernelTwin) -> None:
    rig = Rig(host_twin, Case(kv_counts=(1,)))
    assert rig.kv.values is not None
    keys, values = rig.tensor(rig.kv.keys), rig.tensor(rig.kv.values)
    wrong = [
        (replace(keys, address=keys.address + 8), values),
        (replace(keys, shape=(*keys.shape[:4], 32)), replace(values, shape=(*keys.shape[:4], 32))),
        (replace(keys, strides=(*keys.strides[:4], 4)),) * 2,
        (replace(keys, shape=keys.shape[1:]), values),
        (keys, replace(values, strides=keys.strides[::-1])),
    ]
    for pair in wrong:
        with pytest.raises(BadRequest):
            geometry_of(*pair)
    with pytest.raises(BadRequest):
        AttentionKernels(
            rig.cuda,
            KernelCache(None, FakeCompiler()),
            rig.geometry(),
            element="bf16",
            query_heads=3,
        )


def test_the_geometry_has_the_order_of_the_kernels(host_twin: KernelTwin) -> None:
    """The one that tests of the kernels build by themselves."""
    rig = Rig(host_twin, Case(kv_counts=(1,), layout="packed LBNHC"))
    numbers = rig.kv.geometry().data.view(np.int64).tolist()
    numbers[0] += rig.kv_address
    assert list(astuple(rig.geometry())) == numbers
