"""`kvtier explain` and the log of a real daemon: why there was no hit, in words and as data."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest

from kvtier.cli.explain import hash_of, text_of
from kvtier.cli.output import plain
from kvtier.client.client import Client
from kvtier.client.values import Namespace
from kvtier.errors import BadRequest
from kvtier.namespace import NamespaceSpec
from kvtier.server.log_events import EVENTS
from kvtier.types import Role
from kvtier.v1 import kvtier_pb2 as pb
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.known_blocks import chain_hashes
from tests.support.raw_client import RawCalls

BLOCK_BYTES = 64 << 10
SPEC = NamespaceSpec("a-model", "w", "fp16", "l", 16, BLOCK_BYTES)
OPTIONS = {"log.format": "json", "log.level": "debug", "log.slow_call_seconds": "0"}


@dataclass
class Story:
    daemon: RunningDaemon
    client: Client
    namespace: Namespace

    def put(self, label: str, count: int) -> list[bytes]:
        hashes = chain_hashes(label, count)
        self.client.put(self.namespace, [(block, bytes(BLOCK_BYTES)) for block in hashes])
        return hashes

    def run(self, about: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvtier.cli.main", "explain", about, *words]
        command += ["--socket", str(self.daemon.socket)]
        return subprocess.run(command, capture_output=True, text=True, timeout=30)

    def explain(self, about: str) -> tuple[str, Any]:
        """What the command says to people, and as data; without its process."""
        block = hash_of(about)
        answer = self.client.explain(request_id=about)
        if block is not None and not answer.requests:
            answer = self.client.explain(block=block)
        return text_of(about, block, answer), plain(answer)


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    with running_daemon(dram_bytes="8MiB", slab_bytes="2MiB", options=OPTIONS) as daemon:
        daemon.wait_populated()
        client = Client(str(daemon.socket), role=Role.BOTH, name="an engine")
        try:
            assert client.wait_connected(10.0)
            namespace = client.open_namespace(SPEC)
            assert client.wait_namespace(namespace, 10.0)
            yield Story(daemon, client, namespace)
        finally:
            client.close()


def test_a_resident_prefix_is_told_tier_by_tier(story: Story) -> None:
    hashes = story.put("resident", 5)
    text, data = story.explain(hashes[3].hex())
    assert "a prefix of 4 blocks" in text
    assert "blocks 0 to 3: in dram" in text
    assert "never removed since the daemon started" in text
    done = story.run(hashes[3].hex(), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["places"] == data["places"]
    [place] = data["places"]
    assert (place["block_count"], place["model"]) == (4, "a-model")


def test_what_was_evicted_is_told_with_when_and_why(story: Story) -> None:
    first = story.put("first", 40)
    for turn in range(4):
        story.put(f"more-{turn}", 40)  # Of 128 that there is room for.
    story.client.match(story.namespace, first, request_id="request-evicted")
    text, data = story.explain("request-evicted")
    assert "room was needed for other blocks" in text
    [seen] = data["requests"]
    assert (seen["call"], seen["asked_count"], seen["session_name"]) == ("Match", 40, "an engine")
    last = seen["runs"][-1]["last"]
    assert (last["what"], last["why"], last["tier"]) == ("removed", "room", "dram")
    assert 0 <= last["seconds_ago"] < 60
    told, _ = story.explain(seen["missed_hash"])
    assert "not resident" in told
    assert "asked for in vain" in told


def test_what_was_never_stored_is_told_so(story: Story) -> None:
    hashes = chain_hashes("never", 3)
    lease = story.client.acquire(story.namespace, hashes, request_id="request-never")
    assert lease.lease_id is None
    text, data = story.explain("request-never")
    assert "never stored, as far as is remembered" in text
    assert data["requests"][0]["call"] == "Acquire"


def test_the_fact_that_keeps_two_namespaces_apart_is_named(story: Story) -> None:
    twin = story.client.open_namespace(replace(SPEC, kv_dtype="fp8"))
    assert story.client.wait_namespace(twin, 10.0)
    hashes = story.put("shared", 2)
    story.client.match(twin, hashes, request_id="request-twin")
    text, data = story.explain("request-twin")
    assert "has the missed block; what differs:" in text
    assert "kv_dtype: 'fp8' here, 'fp16' there" in text
    [near] = data["requests"][0]["twins"]
    assert near["has_block"] is True


def test_a_clear_is_remembered_as_one(story: Story) -> None:
    namespace = story.client.open_namespace(replace(SPEC, salt="cleared"))
    assert story.client.wait_namespace(namespace, 10.0)
    story.client.clear(namespace)
    text, _ = story.explain("nobody")
    assert "cleared: 0 blocks" in text


def test_what_nobody_knows_is_told_with_what_may_be_meant(story: Story) -> None:
    done = story.run("no-such-request")
    assert done.returncode == 1
    assert "no request 'no-such-request' is remembered" in done.stdout
    text, _ = story.explain("ab" * 32)
    assert "no namespace knows" in text


def test_a_request_id_has_a_limit_and_clients_keep_to_it(story: Story) -> None:
    story.client.match(story.namespace, chain_hashes("long", 1), request_id="x" * 500)
    assert story.client.explain(request_id="x" * 128).requests
    with pytest.raises(BadRequest, match="nothing to explain"):
        story.client.explain()


def test_a_by_value_session_may_not_ask(story: Story) -> None:
    with RawCalls(story.daemon.grpc_address) as stub:
        token = stub.Greet(pb.GreetRequest(protocol=1)).token
        with pytest.raises(grpc.RpcError) as caught:
            stub.Explain(pb.ExplainRequest(token=token, request_id="a"))
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_every_line_is_declared_and_those_of_a_request_name_it(story: Story) -> None:
    story.client.match(story.namespace, chain_hashes("slow", 9), request_id="request-slow")
    assert "request-slow" in {one.request_id for one in story.client.stats().slow_calls}
    lines = [json.loads(line) for line in story.daemon.log_text.splitlines()]
    wrong = [
        line
        for line in lines
        if line["event"] not in EVENTS
        or set(line)
        - {"time", "level", "event", "module", "request"}
        - set(EVENTS[line["event"]].fields)
    ]
    assert not wrong, wrong[0]
    about = {(line["event"], line.get("request")) for line in lines}
    assert ("request asked", "request-never") in about
    assert ("call slow", "request-slow") in about
