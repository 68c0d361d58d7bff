"""Bytes that compress as KV does: its exponents repeat, its mantissas do not."""

from __future__ import annotations

import numpy as np

from kvtier.memory import Bytes

CHANNELS = 128


def bf16_block(count_bytes: int, seed: int = 0) -> Bytes:
    """Log-normal scales by channel, Gaussian values; the upper halves of float32."""
    chance = np.random.default_rng(seed)
    rows = -(-count_bytes // (2 * CHANNELS))
    scales = np.exp(chance.normal(0.0, 1.0, CHANNELS)).astype(np.float32)
    values = chance.standard_normal((rows, CHANNELS), np.float32) * scales
    halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    return halves.view(np.uint8).ravel()[:count_bytes].copy()


def fp8_block(count_bytes: int, seed: int = 0) -> Bytes:
    """e4m3 by truncation: sign, four bits of exponent, three of mantissa."""
    chance = np.random.default_rng(seed)
    bits = chance.standard_normal(count_bytes, np.float32).view(np.uint32)
    exponent = np.clip((bits >> 23 & 0xFF).astype(np.int64) - 127 + 7, 0, 15)
    found = (bits >> 31 << 7) | (exponent.astype(np.uint32) << 3) | (bits >> 20 & 7)
    return found.astype(np.uint8)
