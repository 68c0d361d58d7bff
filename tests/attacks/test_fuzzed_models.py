"""Files of models, which come from anywhere: what `kvtier size` and the reference engine read."""

from __future__ import annotations

import json
import random
import struct
from contextlib import suppress
from pathlib import Path

import pytest

from kvtier.cli.model_files import read_config
from kvtier.engine.files.gguf_file import BadModelFile, GgufFile
from kvtier.errors import BadRequest
from kvtier.sizing.model import model_kv
from tests.support.fuzzing import fuzz, mutated, mutated_value, nested
from tests.unit.sizing.published import (
    DEEPSEEK_V3_2,
    GEMMA_3_4B,
    GPT_OSS_120B,
    LLAMA_3_1_70B,
    OPT_13B,
)

pytestmark = [pytest.mark.full_form, pytest.mark.timeout(900)]

MODELS = (DEEPSEEK_V3_2, GEMMA_3_4B, GPT_OSS_120B, LLAMA_3_1_70B, OPT_13B)


def test_fuzzed_model_configurations(tmp_path: Path) -> None:
    path = tmp_path / "config.json"

    def attempt(chance: random.Random) -> None:
        value: object = dict(chance.choice(MODELS))
        for _ in range(chance.randrange(1, 4)):
            value = mutated_value(chance, value)
        data = json.dumps(value).encode()
        kind = chance.randrange(20)
        path.write_bytes(
            nested(chance) if kind == 0 else mutated(chance, data) if kind < 4 else data
        )
        with suppress(BadRequest):
            model_kv(read_config(path))

    fuzz("model configurations", attempt)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def gguf() -> bytes:
    """Three facts and two tensors."""
    facts = text(b"general.alignment") + struct.pack("<II", 4, 32)
    facts += text(b"general.name") + struct.pack("<I", 8) + text(b"m")
    facts += text(b"tokens") + struct.pack("<IIQ", 9, 8, 2) + text(b"a") + text(b"b")
    tensors = text(b"one") + struct.pack("<IQIQ", 1, 4, 0, 0)
    tensors += text(b"two") + struct.pack("<IQQIQ", 2, 32, 2, 8, 32)  # Q8_0.
    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 3) + facts + tensors
    return head + bytes(-len(head) % 32) + bytes(32 + 2 * 34)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (struct.pack("<II", 4, 32), struct.pack("<II", 4, 0)),
        (struct.pack("<IQQ", 2, 32, 2), struct.pack("<IQQ", 2, 1 << 63, 1 << 63)),
        (struct.pack("<IQQ", 2, 32, 2), struct.pack("<IQQ", 2, 32, 0)),
    ],
)
def test_numbers_that_cannot_be_are_damage(tmp_path: Path, was: bytes, now: bytes) -> None:
    path = tmp_path / "model.gguf"
    assert gguf().count(was) == 1
    path.write_bytes(gguf().replace(was, now))
    with pytest.raises(BadModelFile):
        GgufFile(path)


def test_fuzzed_gguf_files(tmp_path: Path) -> None:
    right, path = gguf(), tmp_path / "model.gguf"

    def attempt(chance: random.Random) -> None:
        path.write_bytes(mutated(chance, right))
        with suppress(BadModelFile):
            file = GgufFile(path)
            for name in ("one", "two"):
                file.tensor(name)
            file.texts("tokens")
            file.integer("general.alignment")

    path.write_bytes(right)
    assert GgufFile(path).tensor("two").shape == (2, 32)
    fuzz("GGUF files", attempt)
