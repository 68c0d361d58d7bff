"""Byte-pair encoding over a vocabulary small enough to follow by hand."""

from __future__ import annotations

import pytest

from kvtier.engine.files.tokenizer import ChatMessage, Tokenizer, _byte_characters, render_chat

BYTES = list(_byte_characters().values())
MERGES = ["l o", "lo w", "Ġ low", "e r", "Ġ Ġ"]
TOKENS = ["<|im_start|>", "<|im_end|>", *BYTES, *(merge.replace(" ", "") for merge in MERGES)]


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(TOKENS, MERGES, special_ids=[0, 1], end_id=1)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([index]) for index in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("low lower", ["low", " low", "er"]),
        ("lolow", ["lo", "low"]),
        ("low12", ["low", "1", "2"]),
        ("low   low", ["low", "  ", " low"]),  # The last space goes with the word.
        ("low  \n", ["low", "  ", "\n"]),
        ("it's", ["i", "t", "'", "s"]),
        ("", []),
    ],
)
def test_text_is_split_and_merged(tokenizer: Tokenizer, text: str, expected: list[str]) -> None:
    assert pieces(tokenizer, text) == expected


@pytest.mark.parametrize("text", ["日本語 héllo", "a\x00b\t\r\n", "½ x² ⅷ", "🙂🙃", "  _a__b "])
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_count_in_a_chat_only(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_chat("<|im_start|>low<|im_end|>")[0] == 0
    assert not {0, 1} & set(tokenizer.encode("<|im_start|>low<|im_end|>"))


def test_streamed_characters_come_whole(tokenizer: Tokenizer) -> None:
    decoder = tokenizer.stream_decoder()
    parts = [decoder.feed(token_id) for token_id in tokenizer.encode("é🙂")]
    assert parts == ["", "é", "", "", "", "🙂"]
    assert decoder.finish() == ""


def test_chat_has_the_models_own_system_prompt_unless_it_brings_one() -> None:
    user = ChatMessage("user", "Hi")
    assert render_chat([user]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render_chat([ChatMessage("system", "Be brief."), user]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
