"""bf16 and fp16: every value there and back, rounding as IEEE has it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.kernel_twin import Array, HostMemory, KernelTwin

torch = pytest.importorskip("torch")

ALL_BITS = np.arange(1 << 16, dtype=np.uint16)


def to_float(host_twin: KernelTwin, name: str, bits: Array) -> Array:
    out = HostMemory.zeros(4 * len(bits))
    host_twin.launch(f"{name}_to_float", out.at(), HostMemory.of(bits).at(), len(bits))
    return out.data.view(np.float32)


def from_float(host_twin: KernelTwin, name: str, values: Array) -> Array:
    out = HostMemory.zeros(2 * len(values))
    host_twin.launch(f"{name}_from_float", out.at(), HostMemory.of(values).at(), len(values))
    return out.data.view(np.uint16)


def torch_bits(values: Array, name: str) -> Array:
    dtype = torch.bfloat16 if name == "bf16" else torch.float16
    bits: Array = torch.from_numpy(values).to(dtype).view(torch.int16).numpy().view(np.uint16)
    return bits


def is_nan(bits: Array, name: str) -> Array:
    infinity = 0x7F80 if name == "bf16" else 0x7C00
    nan: Array = (bits & 0x7FFF) > infinity
    return nan


def between_neighbours(name: str) -> Array:
    """Of all finite values of 16 bits: themselves, the middle to the next one, and beside it."""
    dtype = torch.bfloat16 if name == "bf16" else torch.float16
    largest = 0x7F7F if name == "bf16" else 0x7BFF
    bits = torch.from_numpy(np.arange(largest + 1, dtype=np.int16)).view(dtype)
    values = bits.to(torch.float64).numpy()
    nexts = np.append(values[1:], 2 * values[-1] - values[-2])
    middles = ((values + nexts) / 2).astype(np.float32)
    with np.errstate(over="ignore"):
        found = np.concatenate(
            [
                values.astype(np.float32),
                middles,
                np.nextafter(middles, np.float32(np.inf)),
                np.nextafter(middles, np.float32(0)),
            ]
        )
    return np.concatenate([found, -found])


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_every_value_is_widened_exactly(host_twin: KernelTwin, name: str) -> None:
    found = to_float(host_twin, name, ALL_BITS)
    dtype = torch.bfloat16 if name == "bf16" else torch.float16
    expected = torch.from_numpy(ALL_BITS.view(np.int16)).view(dtype).float().numpy()
    nan = is_nan(ALL_BITS, name)
    assert np.isnan(found[nan]).all()
    np.testing.assert_array_equal(found[~nan].view(np.uint32), expected[~nan].view(np.uint32))


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_rounding_is_to_the_nearest_and_to_even(host_twin: KernelTwin, name: str) -> None:
    rng = np.random.default_rng(0)
    anything = rng.integers(0, 1 << 32, 200_000, np.uint32).view(np.float32)
    values = np.concatenate([between_neighbours(name), anything])
    found, expected = from_float(host_twin, name, values), torch_bits(values, name)
    nan = np.isnan(values)
    assert is_nan(found[nan], name).all()
    np.testing.assert_array_equal(found[~nan], expected[~nan])


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_infinities_and_zeros_keep_their_sign(host_twin: KernelTwin, name: str) -> None:
    values = np.array([np.inf, -np.inf, 0.0, -0.0], np.float32)
    back = to_float(host_twin, name, from_float(host_twin, name, values))
    np.testing.assert_array_equal(back.view(np.uint32), values.view(np.uint32))
