"""Runs one rank of minibatches with waits instead of computation, as long as the cost model says: run by
`benchmarks/hosts.py`.

Everything else is real: the rank fetches a shard of the weights from every peer before a microbatch, pushes as much
back after it, and waits for the other ranks at the method's barriers.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import numpy as np
from common import Channel

from sharding.links import Links, initialize

SHARD = 1 << 14  # floats of a shard that is fetched and pushed: that of one layer, while the wait is that of all layers


class Rank:
    """Fetches, waits and pushes. Each array has a key that is used once."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._device = jax.local_devices()[0]
        self._shard = jax.device_put(np.zeros(SHARD, np.float32), self._device)
        self._like = [jax.ShapeDtypeStruct((SHARD,), np.float32)]
        self._peers = [peer for peer in range(links.processes) if peer != links.process]
        self._first = 1  # key of the next minibatch

    def minibatch(self, microbatches: Sequence[Sequence[float]], barrier: str) -> float:
        """Runs a minibatch and returns its seconds. `microbatches[rank]` are the seconds of each microbatch of a rank.
        With the barrier `microbatch`, all ranks have the same number of them."""
        links, counts = self._links, [len(seconds) for seconds in microbatches]
        for peer in self._peers:  # as owner: offers all shards that the peers will fetch
            for number in range(counts[peer]):
                links.offer(self._key(peer, number), [self._shard])
        links.barrier("start")
        started = time.perf_counter()
        for number, seconds in enumerate(microbatches[links.process]):
            name = self._key(links.process, number)
            links.ready([array for peer in self._peers for array in links.fetch(peer, name, self._like, self._device)])
            time.sleep(seconds)
            for peer in self._peers:
                links.send(peer, self._gradient)
            if barrier == "microbatch":
                links.barrier("microbatch")
        for peer in self._peers:
            for _ in range(counts[peer]):
                links.receive(peer)
        links.barrier("minibatch")
        took = time.perf_counter() - started
        self._first += links.processes * max(counts)
        return took

    @property
    def _gradient(self) -> bytes:
        return bytes(4 * SHARD)

    def _key(self, client: int, number: int) -> int:
        return self._first + number * self._links.processes + client


def main(settings: dict[str, Any]) -> None:
    channel = Channel()
    initialize(f"127.0.0.1:{settings['port']}", settings["processes"], settings["process"])
    links = Links(timeout=60.0)
    rank = Rank(links)
    channel.say(process=settings["process"])
    for request in channel.requests():
        channel.say(seconds=rank.minibatch(request["seconds"], request["barrier"]))
    channel.say()
    links.barrier("end")
    links.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
