"""A tokenizer for the tiny model: a token for each printable ASCII character."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.engine.files.tokenizer import ChatMessage
from tests.support.tiny_models import TINY


class Letters:
    end_id = TINY.vocab_size - 1

    def encode(self, text: str) -> list[int]:
        return [min(byte - 32, 94) for byte in text.encode()]

    def chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        return self.encode("".join(f"{one.role}: {one.content}~" for one in messages))

    def text_of(self, token_ids: Sequence[int]) -> str:
        return "".join(self.stream_decoder().feed(one) for one in token_ids)

    def stream_decoder(self) -> LettersDecoder:
        return LettersDecoder()


class LettersDecoder:
    def feed(self, token_id: int) -> str:
        return chr(32 + min(token_id, 94))

    def finish(self) -> str:
        return ""
