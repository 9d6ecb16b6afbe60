"""The rollout engines as the coordinator knows them: which weights each serves, and how much it has to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from .messages import Request


@dataclasses.dataclass
class _Open:
    """A request on an engine."""

    engine: int
    left: dict[int, float]  # tokens that each running sample is predicted to need yet


class Fleet:
    """The engines' weights and loads. Policies read it and ask for a route; only the `Coordinator` writes."""

    def __init__(self, engines: int, degree: int = 1, kv_tokens: int = 0) -> None:
        self.degree = degree  # devices of each engine
        self.kv_tokens = kv_tokens  # that the cache of each holds; 0: not known
        self.served = [-1] * engines  # weight version of each engine
        self.oldest = self.newest = -1  # of them
        self.load = [0.0] * engines  # tokens that each is predicted to have to generate yet
        self.running = [0] * engines  # responses on each
        self.lent: set[int] = set()  # engines whose devices are training's, or will be when nothing runs there any more
        self._open: dict[str, _Open] = {}  # by request id

    def __len__(self) -> int:
        return len(self.served)

    def route(self, loads: Sequence[float], usable: Sequence[int], avoid: int = -1) -> int:
        """Returns the engine among `usable` with the least of `loads`: none that is lent, and not `avoid` unless there
        is no other."""
        if avoid < 0 and not self.lent and len(usable) == len(loads):
            return loads.index(min(loads))  # as below, but much faster with a thousand engines
        choices = [engine for engine in usable if engine not in self.lent]
        others = [engine for engine in choices if engine != avoid]
        return min(others or choices, key=lambda engine: (loads[engine], engine))

    def publish(self, version: int, engines: Iterable[int]) -> None:
        for engine in engines:
            self.served[engine] = version
            self.lent.discard(engine)
        self.oldest, self.newest = min(self.served), max(self.served)

    def begin(self, request: Request, tokens: float) -> None:
        """A request starts; each of its responses is predicted to have `tokens` tokens."""
        begun = request.begun or (None,) * request.n
        left = {
            i: max(tokens - (0 if before is None else len(before.token_ids)), 1.0)
            for i, before in enumerate(begun)
            if before is None or before.finish == "abort"
        }
        if left:
            self._open[request.rid] = _Open(request.engine, left)
            self.load[request.engine] += sum(left.values())
            self.running[request.engine] += len(left)

    def end_sample(self, request: str, sample: int) -> bool:
        """A sample of a request ends. Returns whether it was still running."""
        opened = self._open.get(request)
        if opened is None or sample not in opened.left:
            return False
        self.load[opened.engine] -= opened.left.pop(sample)
        self.running[opened.engine] -= 1
        if not opened.left:
            del self._open[request]
        return True

    def end(self, request: str) -> None:
        """All samples of a request that still run end."""
        opened = self._open.get(request)
        for sample in list(opened.left) if opened is not None else ():
            self.end_sample(request, sample)
