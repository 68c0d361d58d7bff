"""OpenAI's completions and chat completions, as far as this engine has what they ask for: bodies
into sampling parameters, tokens into answers. Pure; what would be silently left out is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvtier.engine.config import SamplingParams
from kvtier.engine.engine import TokenOutput
from kvtier.engine.files.tokenizer import ChatMessage
from kvtier.engine.request import FinishReason
from kvtier.errors import BadRequest

TOKENS_DEFAULT = {"completion": 16, "chat": 256}
SAMPLES_MAX = 128
# Fields that change an answer, and their values that change nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False, 0),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "functions": ([],),
}
_USED = (
    *("prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed"),
    *("n", "stop", "stream", "stream_options"),
)
# Of who asks, and of how it is booked.
_WITHOUT_EFFECT = (
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "parallel_tool_calls"),
)
_KNOWN = frozenset((*_NEUTRAL, *_USED, *_WITHOUT_EFFECT))
_STOPS_MAX = 4
_ROLES = ("system", "user", "assistant")
Body = dict[str, Any]


class Decoder(Protocol):
    """Token by token into whole characters."""

    def feed(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class TextModel(Protocol):
    """A tokenizer, and the token that ends an answer."""

    end_id: int

    def encode(self, text: str) -> list[int]: ...

    def chat(self, messages: list[ChatMessage]) -> list[int]: ...

    def stream_decoder(self) -> Decoder: ...


@dataclass(frozen=True, slots=True)
class Call:
    """What a body asks for."""

    kind: str  # "completion" or "chat".
    prompt_ids: list[int]
    params: SamplingParams
    stops: tuple[str, ...]
    is_streaming: bool
    with_usage: bool  # At the end of a stream.


def parse_call(kind: str, body: object, text_model: TextModel, *, seed: int = 0) -> Call:
    """`seed` is for a body without one. Raises BadRequest that names the field."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    for name, value in body.items():
        if value is not None and (name not in _KNOWN or value not in _NEUTRAL.get(name, (value,))):
            raise BadRequest(f"{name} is not supported: leave it out")
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or len(stops) > _STOPS_MAX or not all(map(_is_text, stops)):
        raise BadRequest(f"stop must be a text, or at most {_STOPS_MAX} of them, none empty")
    options = body.get("stream_options") or {}
    tokens_max = _integer(body, "max_tokens", TOKENS_DEFAULT[kind])
    sample_count = _integer(body, "n", 1)
    if sample_count > SAMPLES_MAX:
        raise BadRequest(f"n is {sample_count}: it must be at most {SAMPLES_MAX}")
    if body.get("stream") not in (None, True, False):
        raise BadRequest("stream must be true or false")
    try:
        params = SamplingParams(
            tokens_max=_integer(body, "max_completion_tokens", tokens_max),
            temperature=_number(body, "temperature", 1.0),
            top_p=_number(body, "top_p", 1.0),
            seed=_integer(body, "seed", seed),
            sample_count=sample_count,
            stop_token_ids=frozenset([text_model.end_id]),
        )
        read = _chat_of if kind == "chat" else _prompt_of
        prompt_ids = read(body, text_model)
    except UnicodeEncodeError:
        raise BadRequest("the text is not Unicode: it has half a surrogate pair") from None
    except ValueError as error:
        raise BadRequest(str(error)) from None
    return Call(
        kind=kind,
        prompt_ids=prompt_ids,
        params=params,
        stops=tuple(stops),
        is_streaming=body.get("stream") is True,
        with_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def _prompt_of(body: Body, text_model: TextModel) -> list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return text_model.encode(prompt)
    if isinstance(prompt, list) and prompt and all(type(one) is int for one in prompt):
        return prompt
    raise BadRequest("prompt must be one text, or one list of token ids")


def _chat_of(body: Body, text_model: TextModel) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message")
    turns = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            content = "".join(_text_part(part) for part in content)
        if not isinstance(content, str) or message.get("role") not in _ROLES:
            raise BadRequest(f"a message has a role ({', '.join(_ROLES)}) and a content of text")
        turns.append(ChatMessage(message["role"], content))
    return text_model.chat(turns)


def _text_part(part: object) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    raise BadRequest("a message's parts must be text: this model reads nothing else")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _integer(body: Body, name: str, default: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int:
        raise BadRequest(f"{name} must be a whole number")
    return value


def _number(body: Body, name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(f"{name} must be a number")
    try:
        return float(value)
    except OverflowError:
        raise BadRequest(f"{name} is beyond all numbers") from None


@dataclass(slots=True)
class SampleText:
    """The text of one answer as it grows; what may be the beginning of a stop is held back."""

    decoder: Decoder
    end_id: int
    stops: tuple[str, ...]
    finish_reason: str | None = None
    _held: str = ""

    def feed(self, output: TokenOutput) -> str:
        """What may be given out now."""
        if self.finish_reason is not None:
            return ""
        if output.token_id != self.end_id:
            self._held += self.decoder.feed(output.token_id)
        if output.finish_reason is not None:
            self._held += self.decoder.finish()
            self.finish_reason = str(output.finish_reason.value)
        places = [place for stop in self.stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.finish_reason = FinishReason.STOP.value
            given, self._held = self._held[: min(places)], ""
            return given
        kept = 0 if self.finish_reason else max(map(self._begun, self.stops), default=0)
        given = self._held[: len(self._held) - kept]
        self._held = self._held[len(given) :]
        return given

    def _begun(self, stop: str) -> int:
        """How many characters at the end are the beginning of this stop."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


@dataclass(slots=True)
class Answers:
    """All samples of one call, and the JSON that tells of them."""

    call: Call
    answer_id: str
    model: str
    created: int
    texts: list[SampleText]
    whole: list[str] = field(default_factory=list)
    token_count: int = 0
    cached_count: int = 0

    @classmethod
    def of(
        cls, call: Call, text_model: TextModel, answer_id: str, model: str, created: int
    ) -> Answers:
        count = call.params.sample_count
        texts = [
            SampleText(text_model.stream_decoder(), text_model.end_id, call.stops)
            for _ in range(count)
        ]
        return cls(call, answer_id, model, created, texts, [""] * count)

    @property
    def is_over(self) -> bool:
        return all(text.finish_reason is not None for text in self.texts)

    def feed(self, output: TokenOutput) -> Body | None:
        """One token; what a stream tells of it, if anything."""
        text = self.texts[output.index]
        if text.finish_reason is not None:
            return None
        self.token_count += 1
        self.cached_count = output.cached_count
        piece = text.feed(output)
        self.whole[output.index] += piece
        if not piece and text.finish_reason is None:
            return None
        choice: Body = {"index": output.index, "finish_reason": text.finish_reason}
        if self.call.kind == "chat":
            choice["delta"] = {"content": piece}
        else:
            choice["text"] = piece
        return self._body([choice], is_piece=True)

    def first(self) -> Body | None:
        """What a stream of a chat begins with."""
        if self.call.kind != "chat":
            return None
        delta = {"role": "assistant", "content": ""}
        return self._body(
            [
                {"index": index, "delta": delta, "finish_reason": None}
                for index in range(len(self.texts))
            ],
            is_piece=True,
        )

    def last(self) -> Body:
        """What a stream ends with, where usage was asked for."""
        return self._body([], is_piece=True) | {"usage": self.usage()}

    def answer(self) -> Body:
        """All at once."""
        choices = []
        for index, (text, sample) in enumerate(zip(self.whole, self.texts, strict=True)):
            choice: Body = {"index": index, "finish_reason": sample.finish_reason}
            if self.call.kind == "chat":
                choice["message"] = {"role": "assistant", "content": text}
            else:
                choice["text"] = text
            choices.append(choice)
        return self._body(choices, is_piece=False) | {"usage": self.usage()}

    def usage(self) -> Body:
        """`cached_tokens` are those found in the engine's own cache, and onboarded from kvtier."""
        prompt_count = len(self.call.prompt_ids)
        return {
            "prompt_tokens": prompt_count,
            "completion_tokens": self.token_count,
            "total_tokens": prompt_count + self.token_count,
            "prompt_tokens_details": {"cached_tokens": self.cached_count},
        }

    def _body(self, choices: list[Body], *, is_piece: bool) -> Body:
        is_chat = self.call.kind == "chat"
        name = "chat.completion" if is_chat else "text_completion"
        no_usage_yet: Body = {"usage": None} if is_piece and self.call.with_usage else {}
        return {
            "id": self.answer_id,
            "object": f"{name}.chunk" if is_chat and is_piece else name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **no_usage_yet,
        }
