"""`kvtier engine serve` over real sockets, asked by plain HTTP and by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvtier.engine.config import EngineConfig, SamplingParams
from kvtier.engine.engine import Engine
from tests.support.engines import wait_until
from tests.support.letters import Letters
from tests.support.tiny_models import tiny_model, tokens_alone

aiohttp = pytest.importorskip("aiohttp", reason="kvtier[http] is not installed")

from tests.support.served_engine import Served, served_engine  # noqa: E402

pytestmark = pytest.mark.slow
LETTERS = Letters()
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture
def served() -> Iterator[Served]:
    engine = Engine(tiny_model(), EngineConfig(block_tokens=4, device_block_count=512))
    with served_engine(engine, LETTERS) as one:
        yield one


def ask(url: str, *bodies: dict[str, Any], **headers: str) -> list[tuple[int, Any]]:
    """All at once; a stream's answer is the list of its events."""

    async def one(session: Any, body: dict[str, Any]) -> tuple[int, Any]:
        path = "chat/completions" if "messages" in body else "completions"
        async with session.post(f"{url}/v1/{path}", json=body) as response:
            if not body.get("stream") or response.status != 200:
                return response.status, await response.json()
            lines = [line async for line in response.content]
            events = [line.removeprefix(b"data: ").strip() for line in lines if line.strip()]
            assert events[-1] == b"[DONE]"
            return 200, [json.loads(event) for event in events[:-1]]

    async def all_of() -> list[tuple[int, Any]]:
        async with aiohttp.ClientSession(headers=headers) as session:
            return await asyncio.gather(*(one(session, body) for body in bodies))

    return asyncio.run(all_of())


def expected(prompt: str) -> str:
    params = SamplingParams(tokens_max=12)
    token_ids = tokens_alone(LETTERS.encode(prompt), params)
    assert LETTERS.end_id not in token_ids, "choose another prompt: this answer ends early"
    return LETTERS.text_of(token_ids)


def test_answer_is_the_engines_and_usage_counts_what_was_cached(served: Served) -> None:
    body = {"prompt": "Tell me of the sun", **GREEDY}
    for cached in (0, 16):
        [(status, answer)] = ask(served.url, body)
        assert status == 200
        assert answer["choices"][0]["text"] == expected("Tell me of the sun")
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (18, 12)
        assert usage["prompt_tokens_details"] == {"cached_tokens": cached}


def test_stream_gives_the_same_text_piece_by_piece(served: Served) -> None:
    body = {"prompt": "Tell me of the sun", "stream": True, **GREEDY}
    [(_, events)] = ask(served.url, body | {"stream_options": {"include_usage": True}})
    pieces = [event["choices"][0]["text"] for event in events if event["choices"]]
    assert "".join(pieces) == expected("Tell me of the sun")
    assert len(pieces) > 6
    assert events[-1]["usage"]["completion_tokens"] == 12


def test_two_long_chats_at_once_are_batched(served: Served) -> None:
    sizes: list[int] = []
    schedule = served.engine.scheduler.schedule

    def counted() -> Any:
        batch = schedule()
        sizes.append(len(batch))
        return batch

    served.engine.scheduler.schedule = counted  # type: ignore[method-assign]
    bodies = [
        {"messages": [{"role": "user", "content": text * 9}], "temperature": 0, "max_tokens": 80}
        for text in ("What of the sea? ", "What of the hills? ")
    ]
    alone = [ask(served.url, body | {"max_tokens": 80})[0][1] for body in bodies]
    sizes.clear()
    together = ask(served.url, *bodies)
    assert max(sizes) == 2
    for one, (_, other) in zip(alone, together, strict=True):
        assert one["choices"] == other["choices"]


def test_samples_come_with_their_index_and_share_the_prompt(served: Served) -> None:
    body = {"prompt": "Tell me of the sun", "n": 3, "seed": 5, "max_tokens": 8, "temperature": 1}
    [(_, whole)] = ask(served.url, body)
    [(_, events)] = ask(served.url, body | {"stream": True})
    for choice in whole["choices"]:
        pieces = [
            one["text"] for event in events for one in event["choices"]
            if one["index"] == choice["index"]
        ]  # fmt: skip
        assert "".join(pieces) == choice["text"]
    assert served.engine.scheduler.tables.copied_count == 4  # 18 tokens: half a block, twice.


@pytest.mark.parametrize(
    ("body", "headers", "status", "message"),
    [
        ({"prompt": "x", "tools": [{}]}, {}, 400, "tools is not supported"),
        ({"prompt": ""}, {}, 400, "prompt is empty"),
        ({"prompt": "", "stream": True}, {}, 400, "prompt is empty"),
        ({"prompt": "x", "max_tokens": 10**30}, {}, 400, "there is room for 512"),
        ({"prompt": "x", "n": 65}, {}, 400, "65 samples at once"),
        ({"prompt": "x"}, {"Origin": "http://elsewhere.example"}, 403, "only programs on this"),
        ({"prompt": "x"}, {"Host": "elsewhere.example:80"}, 403, "only programs on this"),
    ],
)
def test_refusal_says_why(
    served: Served, body: dict[str, Any], headers: dict[str, str], status: int, message: str
) -> None:
    [(said, answer)] = ask(served.url, body, **headers)
    assert said == status
    assert message in answer["error"]["message"]
    assert served.engine.unfinished_count == 0


BAD_BODIES = {
    "cut": (b'{"prompt": "x"', {}),
    "no UTF-8": (b'{"prompt": "\xff"}', {}),
    "an unknown charset": (b"{}", {"Content-Type": "application/json; charset=nosuch"}),
    "nested without end": (b"[" * 100_000, {}),
}


@pytest.mark.parametrize(("data", "headers"), BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_body_that_is_no_json_is_refused(
    served: Served, data: bytes, headers: dict[str, str]
) -> None:
    async def post() -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{served.url}/v1/completions", data=data, headers=headers) as response,
        ):
            return response.status, await response.json()

    status, answer = asyncio.run(post())
    assert (status, answer["error"]["message"]) == (400, "the body is no JSON")


def test_calls_without_a_seed_differ_and_a_seed_repeats(served: Served) -> None:
    body = {"prompt": "Tell me of the sun", "temperature": 1, "max_tokens": 16}
    answers = ask(served.url, body, body, body | {"seed": 3}, body | {"seed": 3})
    free, other, seeded, repeated = [answer["choices"] for _, answer in answers]
    assert free != other
    assert seeded == repeated


def test_stop_ends_the_request_and_leaves_its_account(served: Served) -> None:
    prompt = "Tell me of the sun"
    ask(served.url, {"prompt": prompt, **GREEDY})
    stop = expected(prompt)[3:5]
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 400, "stop": stop}
    for answer in (
        ask(served.url, body)[0][1],
        ask(served.url, body | {"stream": True, "stream_options": {"include_usage": True}})[0][1][
            -1
        ],
    ):
        assert answer["usage"]["completion_tokens"] <= 5
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    assert_nothing_runs(served)


@pytest.mark.parametrize("extra", [{"stream": True}, {"stream": True, "n": 3}, {}])
def test_client_that_leaves_cancels_its_request(served: Served, extra: dict[str, Any]) -> None:
    """In good time: it would take two seconds to end by itself."""
    cancelled: list[str] = []
    step, cancel = served.engine.step, served.engine.cancel

    def slow() -> Any:
        threading.Event().wait(0.005)
        return step()

    def watched(request_id: str) -> None:
        cancelled.append(request_id)
        cancel(request_id)

    served.engine.step, served.engine.cancel = slow, watched  # type: ignore[method-assign]

    async def leave() -> None:
        body = {"prompt": "x" * 40, "max_tokens": 400, "temperature": 0} | extra
        async with aiohttp.ClientSession() as session:
            call = asyncio.create_task(session.post(f"{served.url}/v1/completions", json=body))
            scheduler = served.engine.scheduler
            await asyncio.to_thread(wait_until, lambda: scheduler.computed_token_count > 0, 8.0)
            if extra:
                await (await call).content.readline()
            assert served.engine.unfinished_count == body.get("n", 1)
            call.cancel()

    asyncio.run(leave())
    assert_nothing_runs(served)
    assert len(cancelled) == 1


def assert_nothing_runs(served: Served) -> None:
    """Soon; and all device blocks are free."""
    assert wait_until(lambda: served.engine.unfinished_count == 0, 8.0)
    pool = served.engine.scheduler.pool
    assert pool.free_count == pool.block_count, "a request runs on for nobody"


def test_engine_that_ends_in_a_stream_is_told_in_the_stream(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    step = served.engine.step

    def breaking() -> Any:
        assert served.engine.scheduler.computed_token_count < 30, "planted"
        return step()

    served.engine.step = breaking  # type: ignore[method-assign]
    body = {"prompt": "Tell me of the sun", "stream": True, "max_tokens": 100, "temperature": 0}
    [(_, events)] = ask(served.url, body)
    assert "planted" in events[-1]["error"]["message"]
    assert len(events) > 5
    [(status, answer)] = ask(served.url, body)
    assert (status, answer["error"]["type"]) == (503, "server_error")
    assert "the engine has ended" in caplog.text


def test_openais_client_streams_a_chat(served: Served) -> None:
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["tiny"]
    messages = [{"role": "user", "content": "Tell me of the sun"}]
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(
            model="tiny", messages=messages, temperature=0, max_tokens=12, stream=True
        )
    ]
    assert "".join(pieces) == expected("user: Tell me of the sun~")
