"""Each alert fires for the fault that it is about, in a real Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvtier.client import Client
from tests.e2e.monitoring.conftest import Stage
from tests.support.known_blocks import spec_of
from tests.support.metric_load import BLOCK_BYTES, PATIENT, refused_call
from tests.support.prometheus_server import needs_prometheus

pytestmark = [pytest.mark.slow, needs_prometheus]


@contextmanager
def repeating(call: Callable[[], None]) -> Iterator[None]:
    """In a thread of its own, a hundred times a second."""
    ends = threading.Event()

    def repeat() -> None:
        while not ends.wait(0.01):
            call()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def test_alerts_fire_for_real_faults(stage: Stage) -> None:
    daemon, prometheus = stage.daemon, stage.prometheus
    share = stage.folder / "share"
    stage.load.bears_errors = True
    with Client(daemon.socket, settings=PATIENT) as client:
        assert client.wait_connected(10)
        mine = {"KvtierCallsFail", "KvtierRemoteLeftAlone", "KvtierDraining", "KvtierDown"}
        prometheus.wait(lambda: not prometheus.firing() & mine, "they fire without a fault")
        namespace = client.open_namespace(spec_of("chat", BLOCK_BYTES))
        assert client.wait_namespace(namespace, 10)
        with repeating(lambda: refused_call(client, namespace)):
            prometheus.wait_firing("KvtierCallsFail")
        share.rename(share.with_name("away"))
        prometheus.wait_firing("KvtierRemoteLeftAlone")
        client.drain()
        prometheus.wait_firing("KvtierDraining")
        client.drain(resume=True)
    daemon.kill()
    prometheus.wait_firing("KvtierDown")
