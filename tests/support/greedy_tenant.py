"""A tenant that wants everything: `python -m tests.support.greedy_tenant SOCKET SEED CHAINS`.

Asks, leases and offloads chains out of a set many times larger than the pool, as fast as the daemon
answers, until it is ended. Of what it reserves it leaves some uncommitted. What its slots hold does
not matter: nobody reads them.
"""

from __future__ import annotations

import random
import sys

from kvtier.client import Client, Namespace
from kvtier.errors import KVTierError
from kvtier.memory import Bytes
from tests.support.known_blocks import chain_hashes, spec_of
from tests.support.nvme_daemon import PATIENT

CHAIN_BLOCKS = 32
SHARD_BYTES = 16 << 10
LEFT_CHANCE = 0.05  # That slots are neither filled nor given back: soon some in every slab.


def offload(client: Client, namespace: Namespace, hashes: list[bytes], done: int) -> None:
    given = client.reserve(namespace, len(hashes) - done)
    count = len(given.slots)
    if count:
        with client.arena(namespace).hold(given.slots, given.session) as views:
            _touch(views)
        client.commit(
            namespace,
            hashes[done : done + count],
            given.slots,
            parent=hashes[done - 1] if done else None,
            session=given.session,
            epoch=given.epoch,
        )


def _touch(views: list[Bytes]) -> None:
    for view in views:
        view[:64] = 7


def main(socket: str, seed: int, chains: int) -> None:
    chance = random.Random(seed)
    with Client(socket, name="greedy", settings=PATIENT) as client:
        namespaces = [client.open_namespace(spec_of(f"g{one}", SHARD_BYTES)) for one in range(3)]
        assert all(client.wait_namespace(one, 30) for one in namespaces)
        sys.stdout.write("GREEDY\n")
        sys.stdout.flush()
        while True:
            namespace = chance.choice(namespaces)
            hashes = chain_hashes(f"greedy{chance.randrange(chains)}", CHAIN_BLOCKS)
            try:
                found = client.match(namespace, hashes).matched_count
                if chance.random() < LEFT_CHANCE:
                    client.reserve(namespace, 1)
                if found < CHAIN_BLOCKS:
                    offload(client, namespace, hashes, found)
                else:
                    client.prefetch(namespace, hashes)
            except KVTierError:
                continue  # Refused, or late: it tries the next.


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
