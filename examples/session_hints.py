"""Tell kvtier, through vLLM's OpenAI server, how a user's session goes on.

    python examples/session_hints.py http://127.0.0.1:8000/v1 MODEL

Needs the `openai` package and a vLLM with kvtier (docs/vllm.md). What is said goes to the daemon
when the answer is there; it is advice, and an answer never depends on it.
"""

from __future__ import annotations

import sys
from typing import Any

import openai


def ask(client: openai.OpenAI, model: str, messages: list[Any], **said: Any) -> str:
    """One turn; `said` is what kvtier is told of the session."""
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=64,
        extra_body={"kv_transfer_params": {"kvtier": said}},
    )
    return answer.choices[0].message.content or ""


def main(base_url: str, model: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key="none")
    messages: list[Any] = [{"role": "user", "content": "Which file holds the tests? Call a tool."}]
    # A tool runs for about half a minute: the session pauses, its KV may go down a tier meanwhile.
    text = ask(client, model, messages, turn_kind="tool", paused_seconds=30)
    messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": "The tool says: tests/unit. Thank you, that is all."},
    ]
    # Nobody will go on from here: its KV may be the first to leave.
    sys.stdout.write(ask(client, model, messages, turn_kind="user", session_end=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
