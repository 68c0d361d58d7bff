"""The busy process of `kvtier bench match`: acquires and releases full chains without a pause."""

from __future__ import annotations

import sys
import threading
import time

from kvtier.cli.bench_fill import spec_of
from kvtier.cli.bench_tree import ChainTree
from kvtier.cli.connect import TOOL_SETTINGS, open_namespace
from kvtier.cli.peer import Order, serve
from kvtier.client.client import Client
from kvtier.client.values import Namespace
from kvtier.errors import KVTierError, Unavailable
from kvtier.types import Cut, Role

_CHAIN_COUNT = 64
_MAP_TRIES = 200


class _Busy:
    """Two orders: start, stop."""

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: KVTierError | None = None
        self._count = 0
        self._seconds = 0.0

    def handle(self, order: Order) -> Order:
        if order["what"] == "start":
            return self._start(order)
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure
        return {"acquires_per_second": self._count / self._seconds}

    def _start(self, order: Order) -> Order:
        facts = {name: int(str(order[name])) for name in ("tokens", "block_tokens", "resident")}
        tree = ChainTree(
            resident_count=facts["resident"],
            chain_length=facts["tokens"] // facts["block_tokens"],
            seed=int(str(order["seed"])),
        )
        count = min(_CHAIN_COUNT, tree.full_chain_count)
        step = tree.full_chain_count // count
        # Packed: this process is to keep the daemon busy, not itself.
        chains = [b"".join(tree.full_chain(number * step)) for number in range(count)]
        client = Client(
            str(order["socket"]), role=Role.BOTH, name="bench match, busy", settings=TOOL_SETTINGS
        )
        if not client.wait_connected(5.0):
            raise Unavailable("the busy process found no daemon")
        namespace = open_namespace(client, spec_of(facts["block_tokens"], str(order["salt"])))
        _wait_mapped(client, namespace, chains)
        self._thread = threading.Thread(
            target=self._run, args=(client, namespace, chains), name="busy"
        )
        self._thread.start()
        return {}

    def _run(self, client: Client, namespace: Namespace, chains: list[bytes]) -> None:
        started = time.monotonic()
        try:
            while not self._stopping.is_set():
                lease = client.acquire(namespace, chains[self._count % len(chains)])
                client.release([lease])
                self._count += 1
        except KVTierError as error:
            self._failure = error
        self._seconds = time.monotonic() - started
        client.close()


def _wait_mapped(client: Client, namespace: Namespace, chains: list[bytes]) -> None:
    """Until every chain can be leased whole: the slabs are mapped in the background."""
    for _ in range(_MAP_TRIES):
        leases = [client.acquire(namespace, chain) for chain in (chains[0], chains[-1])]
        client.release(leases)
        if all(lease.cut is Cut.NONE for lease in leases):
            return
        time.sleep(0.025)
    raise KVTierError("the busy process could not map all slabs")


if __name__ == "__main__":
    sys.exit(serve(_Busy().handle))
