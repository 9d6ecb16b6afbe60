"""What a fleet knows of a server, and of a request under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .engine import FinishReason, GenerateRequest, TokenChunk
from .local_server import LocalServer
from .sglang import SampleReply, ServerClient
from .weights.published import Published


class Server:
    """One server: its place in the fleet, and what is known of it. Belongs to the fleet's thread."""

    def __init__(self, name: str, seat: int, client: ServerClient, process: LocalServer | None) -> None:
        self.name, self.seat, self.client, self.process = name, seat, client, process
        self.up = False
        self.holds: Published | None = None  # the weights that it was proven to have
        self.served: set[int] = set()  # versions since it came up
        self.down = asyncio.Event()  # set when this life of it ends
        self.suspected = asyncio.Event()  # somebody had trouble with it
        self.trouble = ""  # for which this life of it must end
        self.reason = ""  # for which the last one ended
        self.leaving = False
        self.open = 0  # samples of ours
        self.restarts = 0
        self.tokens = 0  # that came from it
        self.load: dict[str, float] = {}
        self.lock = asyncio.Lock()  # held while its weights change

    def __repr__(self) -> str:
        return f"{self.name} ({self.client.address})"


class FleetJob:
    """A request under way: what each sample has so far."""

    def __init__(self, request: GenerateRequest, seat: int, put: Callable[[TokenChunk], None]) -> None:
        self.request, self.seat, self.put = request, seat, put
        prefixes = request.prefix_ids or ((),) * request.n
        self.begun = list(prefixes)  # token ids that were there before
        self.came = [SampleReply("") for _ in range(request.n)]  # since then, all of it certain
        self.open = set(range(request.n))
        self.aborted: set[int] = set()
        self.running: tuple[Server, dict[int, str]] | None = None  # where it runs, and the ids of its samples there

    def ids(self, sample: int) -> tuple[int, ...]:
        return (*self.begun[sample], *self.came[sample].ids)

    def end(self, sample: int, finish: FinishReason) -> None:
        if sample in self.open:
            self.open.remove(sample)
            came = self.came[sample]
            tokens = tuple(came.ids), tuple(came.logprobs), tuple(came.versions)
            self.put(TokenChunk(self.request.rid, sample, *tokens, finish))

    def keep(self, sample: int, reply: SampleReply) -> None:
        """Adds what is certain of a reply."""
        came, certain = self.came[sample], len(reply.versions)
        came.ids += reply.ids[:certain]
        came.logprobs += reply.logprobs[:certain]
        came.versions += reply.versions
