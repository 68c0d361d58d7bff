"""The real model: loaded right, tokenized right, and the same whatever is cached."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as JudgeTokenizer
from transformers import LlamaForCausalLM

from kvtier.engine.attention import plan_attention
from kvtier.engine.config import EngineConfig, SamplingParams
from kvtier.engine.engine import Engine
from kvtier.engine.files.gguf_file import BadModelFile, GgufFile
from kvtier.engine.files.smollm2 import smollm2_path
from kvtier.engine.files.tokenizer import ChatMessage, Tokenizer
from kvtier.engine.kv_cache import make_kv_cache
from kvtier.engine.model import LlamaModel

pytestmark = pytest.mark.slow

TEXTS = [
    "Hello world! It's 2024; don't  stop.\n\n  héllo",
    "def f(x_1):\n\treturn x_1**2  # ½ of x², Ⅷ times\n",
    "日本語のテキスト 🙂👩‍👩‍👧 naïve Ελληνικά   ",
    "a_b__c ___ 1,234.56€ 'll 've 'LL \r\n\r\n\t end",
    "<|im_start|>not special<|im_end|>",
    "".join(random.Random(1).choices("etaoinshrdlu", k=20_000)),  # One piece: no quadratic merging.
]


def test_question_is_answered(smollm2: tuple[LlamaModel, Tokenizer]) -> None:
    model, tokenizer = smollm2
    engine = Engine(model, EngineConfig(device_block_count=64))
    prompt = tokenizer.chat([ChatMessage("user", "What is the capital of France?")])
    params = SamplingParams(tokens_max=16, stop_token_ids=frozenset([tokenizer.end_id]))
    assert "Paris" in tokenizer.decode(engine.generate([prompt], params)[0].token_ids)


def test_logits_are_those_of_transformers_on_the_same_weights(
    smollm2: tuple[LlamaModel, Tokenizer], smollm2_twin: LlamaForCausalLM
) -> None:
    """Fails by whole units when the rotary rows are left as GGUF orders them."""
    model, tokenizer = smollm2
    prompt = tokenizer.encode("The KV cache of a language model keeps, for every token,")
    with torch.inference_mode():
        expected = smollm2_twin(torch.tensor([prompt]), logits_to_keep=1).logits[0, -1]
    plan = plan_attention([[3, 1]], [(0, len(prompt))], 16)
    kv_cache = make_kv_cache(model, EngineConfig(device_block_count=4))
    last = torch.tensor([len(prompt) - 1])
    logits = model.forward(torch.tensor(prompt), kv_cache, plan, last)
    torch.testing.assert_close(logits[0], expected, atol=2e-3, rtol=1e-3)


def test_tokens_are_those_of_the_tokenizers_package(
    smollm2: tuple[LlamaModel, Tokenizer],
) -> None:
    _, tokenizer = smollm2
    file = GgufFile(smollm2_path())
    tokens, merges = file.texts("tokenizer.ggml.tokens"), file.texts("tokenizer.ggml.merges")
    vocab = {token: index for index, token in enumerate(tokens)}
    judge = JudgeTokenizer(models.BPE(vocab, [tuple(merge.split(" ", 1)) for merge in merges]))
    digits = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    judge.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    judge.decoder = decoders.ByteLevel()
    for text in TEXTS:
        assert tokenizer.encode(text) == judge.encode(text).ids, text
        assert tokenizer.decode(tokenizer.encode(text)) == text


DAMAGES = {
    "empty": (b"", "cannot mmap an empty file"),
    "another format": (b"PK\x03\x04" + b"0" * 60, "does not begin with GGUF"),
    "another version": (b"GGUF\x09\x00\x00\x00", "version 9"),
    "counts out of reason": (b"GGUF\x03\x00\x00\x00" + b"\xff" * 40, "out of reason"),
    "cut in the metadata": (None, "is damaged"),
}


@pytest.mark.parametrize(("data", "message"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_file_is_named(tmp_path: Path, data: bytes | None, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(_first_bytes(100_000) if data is None else data)
    with pytest.raises(BadModelFile, match=message):
        GgufFile(path)


def test_file_cut_in_a_tensor_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(_first_bytes(20_000_000))
    with pytest.raises(BadModelFile, match="reaches past the end"):
        GgufFile(path)


def _first_bytes(count: int) -> bytes:
    with smollm2_path().open("rb") as file:
        return file.read(count)
