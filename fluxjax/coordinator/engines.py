"""The rollout engines as the coordinator knows them: which weights each serves, and how much it has to do."""

from collections.abc import Iterable, Sequence

from .messages import Request


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
        # By request id: its engine, and the tokens that each of its running samples is predicted to need yet.
        self._open: dict[str, tuple[int, dict[int, float]]] = {}

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
        left = {sample: max(tokens - begun, 1.0) for sample, begun in request.to_come().items()}
        if left:
            self._open[request.rid] = request.engine, left
            self.load[request.engine] += sum(left.values())
            self.running[request.engine] += len(left)

    def end_sample(self, request: str, sample: int) -> bool:
        """A sample of a request ends. Returns whether it was still running."""
        engine, left = self._open.get(request, (0, {}))
        if sample not in left:
            return False
        self.load[engine] -= left.pop(sample)
        self.running[engine] -= 1
        if not left:
            del self._open[request]
        return True

    def end(self, request: str) -> None:
        """All samples of a request that still run end."""
        _, left = self._open.get(request, (0, {}))
        for sample in list(left):
            self.end_sample(request, sample)
