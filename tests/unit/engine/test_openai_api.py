"""Bodies into parameters, tokens into answers; what cannot be done is said."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.engine.engine import TokenOutput
from kvtier.engine.http.openai_api import Answers, parse_call
from kvtier.engine.request import FinishReason
from kvtier.errors import BadRequest
from tests.support.letters import Letters

LETTERS = Letters()
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def test_fields_become_parameters() -> None:
    body = {"prompt": "ab", "max_tokens": 5, "temperature": 0, "top_p": 0.5, "seed": 7, "n": 2}
    call = parse_call("completion", body | {"stop": "x", "stream": True}, LETTERS)
    params = call.params
    assert (call.prompt_ids, call.stops, call.is_streaming) == (LETTERS.encode("ab"), ("x",), True)
    assert (params.tokens_max, params.temperature, params.top_p) == (5, 0.0, 0.5)
    assert (params.seed, params.sample_count) == (7, 2)
    assert params.stop_token_ids == {LETTERS.end_id}


def test_defaults_are_those_of_the_interface() -> None:
    call = parse_call("completion", {"prompt": [1, 2]}, LETTERS)
    assert (call.prompt_ids, call.params.tokens_max, call.params.temperature) == ([1, 2], 16, 1.0)
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    whole = parse_call("chat", CHAT, LETTERS)
    split = parse_call("chat", {"messages": [{"role": "user", "content": parts}]}, LETTERS)
    assert whole.prompt_ids == split.prompt_ids == LETTERS.encode("user: hi~")


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        ("completion", [], "must be a JSON object"),
        ("completion", {}, "prompt must be one text"),
        ("completion", {"prompt": ["a", "b"]}, "prompt must be one text"),
        ("completion", {"prompt": "a", "logprobs": 3}, "logprobs is not supported"),
        ("completion", {"prompt": "a", "n": 1.5}, "n must be a whole number"),
        ("completion", {"prompt": "a", "n": 0}, "sample_count 0"),
        ("completion", {"prompt": "a", "n": 10**9}, "n is 1000000000: it must be at most"),
        ("completion", {"prompt": "a", "temperature": "hot"}, "temperature must be a number"),
        ("completion", {"prompt": "a", "temperature": -1}, "temperature is -1"),
        ("completion", {"prompt": "a", "temperature": float("nan")}, "temperature is nan"),
        ("completion", {"prompt": "a", "temperature": float("inf")}, "temperature is inf"),
        ("completion", {"prompt": "a", "temperature": 10**400}, "temperature is beyond"),
        ("completion", {"prompt": "a", "top_p": float("nan")}, "top_p is nan"),
        ("completion", {"prompt": "a", "seed": 1 << 64}, "must fit into 64 bits"),
        ("completion", {"prompt": "a", "top_k": 3}, "top_k is not supported"),
        ("completion", {"prompt": "a", "stream": "yes"}, "stream must be true or false"),
        ("completion", {"prompt": "a\ud800"}, "not Unicode"),
        ("completion", {"prompt": "a", "max_tokens": 0}, "tokens_max is 0"),
        ("completion", {"prompt": "a", "stop": [""]}, "stop must be a text"),
        ("chat", {"messages": []}, "at least one message"),
        ("chat", {"messages": [{"role": "tool", "content": "x"}]}, "a message has a role"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "be text"),
        ("chat", CHAT | {"tools": [{}]}, "tools is not supported"),
        ("chat", {"messages": [{"role": "user", "content": "\udfff"}]}, "not Unicode"),
    ],
)
def test_what_is_wrong_or_not_done_is_named(kind: str, body: object, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        parse_call(kind, body, LETTERS)


def test_newer_name_of_a_limit_counts_where_it_has_a_value() -> None:
    body = {"prompt": "a", "max_tokens": 5}
    for newer, limit in ((None, 5), (7, 7)):
        call = parse_call("completion", body | {"max_completion_tokens": newer}, LETTERS)
        assert call.params.tokens_max == limit


def test_seed_of_the_body_is_used_where_there_is_one() -> None:
    for given, used in (({}, 11), ({"seed": None}, 11), ({"seed": 0}, 0)):
        assert parse_call("chat", CHAT | given, LETTERS, seed=11).params.seed == used


def told(text: str, stops: list[str], reason: FinishReason = FinishReason.LENGTH) -> list[Any]:
    """The pieces of a stream, and the answer as a whole."""
    call = parse_call("completion", {"prompt": "p", "stop": stops}, LETTERS)
    answers = Answers.of(call, LETTERS, "id", "model", 0)
    ids = LETTERS.encode(text)
    pieces = []
    for number, token_id in enumerate(ids, start=1):
        ends = reason if number == len(ids) else None
        if (piece := answers.feed(TokenOutput("r", token_id, None, 0, ends))) is not None:
            pieces.append(piece["choices"][0]["text"])
    whole = answers.answer()["choices"][0]
    assert whole["text"] == "".join(pieces)
    return [pieces, whole["text"], whole["finish_reason"]]


def test_text_ends_before_a_stop_and_its_beginning_is_held_back() -> None:
    assert told("abcd", []) == [["a", "b", "c", "d"], "abcd", "length"]
    assert told("abXYcd", ["XY"]) == [["a", "b", ""], "ab", "stop"]
    assert told("aXbX", ["XY"]) == [["a", "Xb", "X"], "aXbX", "length"]
    assert told("XXYz", ["XY"]) == [["X", ""], "X", "stop"]


def test_token_that_ends_an_answer_is_no_text() -> None:
    call = parse_call("chat", CHAT, LETTERS)
    answers = Answers.of(call, LETTERS, "id", "model", 0)
    answers.feed(TokenOutput("r", LETTERS.encode("a")[0]))
    answers.feed(TokenOutput("r", LETTERS.end_id, None, 0, FinishReason.STOP))
    [choice] = answers.answer()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "a"}
    assert choice["finish_reason"] == "stop"
    assert answers.usage()["completion_tokens"] == 2


def test_pieces_of_a_stream_with_usage_say_that_it_comes() -> None:
    for options, expected in (({}, {}), ({"include_usage": True}, {"usage": None})):
        body = CHAT | {"stream": True, "stream_options": options}
        answers = Answers.of(parse_call("chat", body, LETTERS), LETTERS, "id", "model", 0)
        for piece in (answers.first(), answers.feed(TokenOutput("r", 65, cached_count=3))):
            assert piece is not None
            assert {name: piece[name] for name in piece if name == "usage"} == expected
        assert answers.last()["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
