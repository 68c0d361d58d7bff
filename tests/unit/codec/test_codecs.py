"""Codecs are lossless for any bytes, take what was damaged for damaged, and help with KV."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.codec.codecs import BadEncoding, CodecId, decode, encode, is_available
from kvtier.memory import Bytes
from tests.support.kv_bytes import bf16_block, fp8_block

PLANES = (CodecId.PLANES_LZ4, CodecId.PLANES_ZSTD)
codecs = st.sampled_from(list(CodecId))
widths = st.sampled_from([1, 2, 4])


def encoded(codec: CodecId, payload: Bytes, width: int = 2) -> Bytes:
    return np.concatenate(encode(codec, payload, width=width))


def decoded(codec: CodecId, data: Bytes, count_bytes: int) -> Bytes:
    into = np.full(count_bytes, 0xEE, np.uint8)
    decode(codec, data, into)
    return into


@given(codec=codecs, width=widths, data=st.binary(max_size=3000))
def test_any_bytes_come_back(codec: CodecId, width: int, data: bytes) -> None:
    payload = np.frombuffer(data, np.uint8)
    assert np.array_equal(decoded(codec, encoded(codec, payload, width), len(data)), payload)


@settings(max_examples=25)
@given(
    codec=codecs,
    width=widths,
    count_bytes=st.integers(150_000, 400_003),
    seed=st.integers(0, 9),
    zeros=st.integers(0, 400_000),
)
def test_large_payloads_of_any_length_come_back(
    codec: CodecId, width: int, count_bytes: int, seed: int, zeros: int
) -> None:
    payload = bf16_block(count_bytes, seed)
    payload[:zeros] = 0
    assert np.array_equal(decoded(codec, encoded(codec, payload, width), count_bytes), payload)


@given(
    codec=st.sampled_from(PLANES),
    data=st.binary(min_size=1, max_size=300),
    place=st.integers(0, 10_000),
    flip=st.integers(1, 255),
)
def test_damaged_bytes_are_refused_or_give_other_bytes_of_the_same_length(
    codec: CodecId, data: bytes, place: int, flip: int
) -> None:
    """Checksums find the rest; a decoder must neither crash nor write beside its place."""
    damaged = encoded(codec, np.frombuffer(data * 20, np.uint8))
    damaged[place % damaged.nbytes] ^= flip
    with contextlib.suppress(BadEncoding):
        decoded(codec, damaged, 20 * len(data))


@given(codec=st.sampled_from(PLANES), data=st.binary(max_size=200), length=st.integers(0, 300))
def test_rubbish_is_refused(codec: CodecId, data: bytes, length: int) -> None:
    with contextlib.suppress(BadEncoding):
        decoded(codec, np.frombuffer(data, np.uint8), length)


@pytest.mark.parametrize("codec", CodecId)
def test_another_length_is_refused(codec: CodecId) -> None:
    data = encoded(codec, bf16_block(1000))
    for wrong in (0, 999, 1001):
        with pytest.raises(BadEncoding):
            decoded(codec, data, wrong)


def test_exponents_of_bf16_shrink_and_mantissas_are_left_alone() -> None:
    payload = bf16_block(1 << 20)
    parts = encode(CodecId.PLANES_ZSTD, payload, width=2)
    assert parts[1].nbytes == payload.nbytes // 2, "the mantissas"
    assert payload.nbytes / sum(part.nbytes for part in parts) > 1.35


def test_fp8_shrinks_a_little_with_zstd_and_not_at_all_with_lz4() -> None:
    payload = fp8_block(1 << 20)
    assert payload.nbytes / encoded(CodecId.PLANES_ZSTD, payload, 1).nbytes > 1.08
    assert payload.nbytes / encoded(CodecId.PLANES_LZ4, payload, 1).nbytes > 0.999


@pytest.mark.parametrize("codec", PLANES)
def test_noise_grows_by_a_head_only(codec: CodecId) -> None:
    payload = np.frombuffer(np.random.default_rng(1).bytes(1 << 20), np.uint8)
    assert encoded(codec, payload).nbytes < payload.nbytes + 100


@pytest.mark.parametrize("codec", PLANES)
def test_threads_do_not_share_what_must_not_be_shared(codec: CodecId) -> None:
    faults: list[int] = []

    def work(seed: int) -> None:
        payload = bf16_block(200_000, seed)
        for _ in range(5):
            found = decoded(codec, encoded(codec, payload), 200_000)
            faults.append(int(np.count_nonzero(found != payload)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == [0] * 20


def test_the_development_environment_has_every_codec() -> None:
    assert all(is_available(codec) for codec in CodecId)
