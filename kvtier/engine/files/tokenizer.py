"""Byte-level byte-pair encoding and the chat template of SmolLM2.

Text is split at special tokens, then at digits (each stands alone), then by GPT-2's rule; each
piece's UTF-8 bytes are joined pair by pair, the pair merged earliest in training first.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import groupby

DEFAULT_SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
PIECE_CACHE_COUNT = 1 << 16  # Distinct pieces of text remembered; a few MiB.

# GPT-2's rule. Numbers have been split off before, so `[^\W_]` here means "letters".
_PIECES = re.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W_]+| ?(?:_|[^\s\w])+|\s+(?!\S)|\s+", re.UNICODE
)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn; role is "system", "user" or "assistant"."""

    role: str
    content: str


class Tokenizer:
    """Text to token ids and back; `special_ids` are never made out of plain text by `encode`."""

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Sequence[str],
        *,
        special_ids: Iterable[int] = (),
        end_id: int,
    ) -> None:
        self.end_id = end_id
        self.vocab_size = len(tokens)
        self._ids = {token: index for index, token in enumerate(tokens)}
        self._special = {tokens[index]: index for index in special_ids}
        pairs = (tuple(merge.split(" ", 1)) for merge in merges)
        self._ranks = {pair: rank for rank, pair in enumerate(pairs)}
        special_names = set(self._special)
        self._bytes = [
            token.encode("utf-8") if token in special_names else _to_bytes(token)
            for token in tokens
        ]
        alternatives = "|".join(re.escape(name) for name in self._special)
        self._special_split = re.compile(f"({alternatives})") if alternatives else None
        self._encode_piece = lru_cache(maxsize=PIECE_CACHE_COUNT)(self._merge_piece)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; what looks like a special token stays text."""
        return [
            token_id
            for span in _split_numbers(text)
            for piece in _PIECES.findall(span)
            for token_id in self._encode_piece(piece)
        ]

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of a rendered chat, in which special tokens count."""
        if self._special_split is None:
            return self.encode(text)
        token_ids: list[int] = []
        for part in self._special_split.split(text):
            special_id = self._special.get(part)
            token_ids += self.encode(part) if special_id is None else [special_id]
        return token_ids

    def chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of a chat up to where the assistant is to speak."""
        return self.encode_chat(render_chat(messages))

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text; bytes that are not UTF-8 become the replacement character."""
        return b"".join([self._bytes[index] for index in token_ids]).decode("utf-8", "replace")

    def stream_decoder(self) -> StreamDecoder:
        """Decodes token by token; a character in several tokens comes with its last one."""
        return StreamDecoder(self._bytes)

    def _merge_piece(self, piece: str) -> tuple[int, ...]:
        """The pair merged earliest in training first, of equals the leftmost: by a heap, because a
        text without spaces is one piece, and may be long."""
        parts = [_BYTE_TO_CHAR[byte] for byte in piece.encode("utf-8")]
        # Neighbours; a part that was joined to the one before it is empty.
        after, before = list(range(1, len(parts) + 1)), list(range(-1, len(parts)))
        heap: list[tuple[int, int]] = []

        def note(left: int) -> None:
            if left >= 0 and after[left] < len(parts):
                rank = self._ranks.get((parts[left], parts[after[left]]))
                if rank is not None:
                    heappush(heap, (rank, left))

        for left in range(len(parts) - 1):
            note(left)
        while heap:
            rank, left = heappop(heap)
            right = after[left]
            if right == len(parts) or self._ranks.get((parts[left], parts[right])) != rank:
                continue  # One of the two has been joined to another since.
            parts[left] += parts[right]
            parts[right] = ""
            after[left] = after[right]
            before[after[right]] = left
            note(before[left])
            note(left)
        return tuple([self._ids[part] for part in parts if part])


class StreamDecoder:
    """Turns a stream of token ids into a stream of whole characters."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The characters that this token completes."""
        return self._decoder.decode(self._token_bytes[token_id])

    def finish(self) -> str:
        """What is left of a character that never became whole."""
        return self._decoder.decode(b"", final=True)


def render_chat(messages: Sequence[ChatMessage]) -> str:
    """ChatML, with SmolLM2's own system prompt where the chat has none."""
    if not messages or messages[0].role != "system":
        messages = [ChatMessage("system", DEFAULT_SYSTEM_PROMPT), *messages]
    turns = [f"<|im_start|>{turn.role}\n{turn.content}<|im_end|>\n" for turn in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def _split_numbers(text: str) -> list[str]:
    """Every numeric character alone, the runs between them whole."""
    spans: list[str] = []
    for numeric, run in groupby(text, key=_is_number):
        if numeric:
            spans.extend(run)
        else:
            spans.append("".join(run))
    return spans


@lru_cache(maxsize=4096)
def _is_number(character: str) -> bool:
    return unicodedata.category(character)[0] == "N"


def _byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-ins: visible Latin-1 for itself, the rest from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    stand_ins = {byte: chr(0x100 + index) for index, byte in enumerate(hidden)}
    return {byte: stand_ins.get(byte, chr(byte)) for byte in range(256)}


_BYTE_TO_CHAR = _byte_characters()
_CHAR_TO_BYTE = {character: byte for byte, character in _BYTE_TO_CHAR.items()}


def _to_bytes(token: str) -> bytes:
    return bytes([_CHAR_TO_BYTE[character] for character in token])
