"""The rollout engines as the coordinator knows them: the weights that each serves, and the work that it has to do.

Beside them is the pace at which responses grow and groups are trained on, learnt from the times at which events come
(`Tick`). Without such times, nothing is known of the pace. Old measurements fade, so that the pace may change during a
run.
"""

from collections.abc import Iterable, Sequence

from ..base.types import Group
from .messages import Request


class EngineStates:
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
        preferred = [engine for engine in choices if engine != avoid]
        return min(preferred or choices, key=lambda engine: (loads[engine], engine))

    def publish(self, version: int, engines: Iterable[int]) -> None:
        for engine in engines:
            self.served[engine] = version
            self.lent.discard(engine)
        self.oldest, self.newest = min(self.served), max(self.served)

    def begin(self, request: Request, tokens: float) -> None:
        """Notes that a request starts; each of its responses is predicted to have `tokens` tokens."""
        left = {sample: max(tokens - begun, 1.0) for sample, begun in request.to_come().items()}
        if left:
            self._open[request.rid] = request.engine, left
            self.load[request.engine] += sum(left.values())
            self.running[request.engine] += len(left)

    def end_sample(self, request: str, sample: int) -> bool:
        """Notes that a sample of a request ends. Returns whether it was still running."""
        engine, left = self._open.get(request, (0, {}))
        if sample not in left:
            return False
        self.load[engine] -= left.pop(sample)
        self.running[engine] -= 1
        if not self.running[engine]:
            self.load[engine] = 0.0  # what rounding leaves depends on who ended first, and would decide a tie
        if not left:
            del self._open[request]
        return True

    def end(self, request: str) -> None:
        """Notes that all samples of a request that still run end."""
        _, left = self._open.get(request, (0, {}))
        for sample in list(left):
            self.end_sample(request, sample)


_KEPT_RESPONSE, _KEPT_STEP = 0.98, 0.7  # weight of what was measured, when one more response, or portion, is


class _Rate:
    """The rate, in amounts a second, of what was measured lately."""

    def __init__(self, kept: float) -> None:
        self._kept = kept
        self._amount = self._seconds = 0.0

    def add(self, amount: int, seconds: float) -> float:
        """Returns the rate with one more measurement in it."""
        self._amount = self._kept * self._amount + amount
        self._seconds = self._kept * self._seconds + seconds
        return self._amount / self._seconds


class Pace:
    """Measures the pace of responses and of training. Policies read it; only the `Coordinator` writes. It is no part of
    a checkpoint: a resumed run may be on another machine."""

    def __init__(self) -> None:
        self.growth = 0.0  # tokens by which one response grows a second, its wait for a slot included; 0: not known
        self.training = 0.0  # tokens a second of which all of the trainer's devices compute gradients; 0: not known
        self._responses, self._steps = _Rate(_KEPT_RESPONSE), _Rate(_KEPT_STEP)
        self._open: dict[str, tuple[float, int]] = {}  # running responses: when they began, and with how many tokens
        self._began: tuple[float, int] | None = None  # training under way: when it began, and tokens

    def tokens(self, rid: str, now: float) -> int:
        """Estimates how many tokens a running response has by now."""
        began, tokens = self._open.get(rid, (now, 0))
        return tokens + int(self.growth * (now - began))

    def begin(self, request: Request, now: float) -> None:
        for sample, tokens in request.to_come().items():
            self._open[f"{request.rid}/{sample}"] = now, tokens

    def end(self, rid: str, tokens: int, now: float) -> None:
        began, before = self._open.pop(rid, (now, tokens))
        if now > began and tokens > before:
            self.growth = self._responses.add(tokens - before, now - began)

    def lose(self, request: str) -> None:
        """Forgets all responses of a request."""
        for rid in [rid for rid in self._open if rid.startswith(f"{request}/")]:
            del self._open[rid]

    def train(self, groups: Iterable[Group], now: float) -> None:
        self._began = now, trained_tokens(groups)

    def trained(self, now: float) -> None:
        if self._began is not None and self._began[1] and now > self._began[0]:
            self.training = self._steps.add(self._began[1], now - self._began[0])
        self._began = None


def trained_tokens(groups: Iterable[Group]) -> int:
    """Counts the tokens that the trainer computes: a group's prompt once, and its responses."""
    return sum(g.prompt.tokens + sum(sample.response.num_tokens for sample in g.samples) for g in groups)
