"""The coordinator's books about rollout engines: the weights, the remaining work and the devices of each engine.

`Pace` is the speed at which responses grow and groups are trained on, learnt from the times in `Tick` events. Without
these times, the pace is unknown. Old measurements count less and less, so that the pace may change during a run.
"""

from collections.abc import Iterable, Sequence

from ..base.types import Group, SavedState, State
from ..config import ParallelismConfig
from ..config.learning import MAX_DEGREE
from .messages import Request, Turn


class EngineStates:
    """The engines' weights and loads. Policies read these, and call `route`; only the `Coordinator` changes them."""

    def __init__(self, engines: int, degree: int = 1, kv_tokens: int = 0) -> None:
        self.degree = degree  # devices of each engine
        self.kv_tokens = kv_tokens  # tokens that each engine's cache holds; 0: unknown
        self.served = [-1] * engines  # weight version of each engine; -1: none yet
        self.oldest = self.newest = -1  # the oldest and newest version of `served`
        self.load = [0.0] * engines  # predicted work that each engine has left, in generated tokens
        self.running = [0] * engines  # responses that run on each engine
        self.lent: set[int] = set()  # engines whose devices training uses, or will use once the engine is idle
        # request id -> (engine, {sample: predicted remaining work}) of the responses that run
        self._open: dict[str, tuple[int, dict[int, float]]] = {}

    def __len__(self) -> int:
        return len(self.served)

    def route(self, loads: Sequence[float], usable: Sequence[int], avoid: int = -1) -> int:
        """Returns the engine of `usable` with the smallest load. Lent engines are left out. The engine
        `avoid` is returned only if no other engine is left."""
        if avoid < 0 and not self.lent and len(usable) == len(loads):
            return loads.index(min(loads))  # as the lines below, but much faster with a thousand engines
        choices = [engine for engine in usable if engine not in self.lent]
        preferred = [engine for engine in choices if engine != avoid]
        return min(preferred or choices, key=lambda engine: (loads[engine], engine))

    def publish(self, version: int, engines: Iterable[int]) -> None:
        for engine in engines:
            self.served[engine] = version
            self.lent.discard(engine)
        self.oldest, self.newest = min(self.served), max(self.served)

    def begin(self, request: Request, tokens: float, prompt: float = 0.0) -> None:
        """Notes the start of a request; each of its responses is predicted to have `tokens` tokens. The prompt is as
        much work as `prompt` generated tokens."""
        begun = request.to_come()
        left = {sample: max(tokens - there, 1.0) + prompt / len(begun) for sample, there in begun.items()}
        if left:
            self._open[request.rid] = request.engine, left
            self.load[request.engine] += sum(left.values())
            self.running[request.engine] += len(left)

    def begin_turn(self, turn: Turn, tokens: float) -> None:
        """Notes the start of a response's next turn; the response is predicted to have `tokens` tokens."""
        request, _, sample = turn.response.rid.partition("/")
        engine, left = self._open.setdefault(request, (turn.engine, {}))
        left[int(sample)] = remaining = max(tokens - turn.response.num_tokens, 1.0)
        self.load[engine] += remaining
        self.running[engine] += 1

    def end_sample(self, request: str, sample: int) -> bool:
        """Notes the end of a request's sample. Returns True if the sample was still running."""
        engine, left = self._open.get(request, (0, {}))
        if sample not in left:
            return False
        self.load[engine] -= left.pop(sample)
        self.running[engine] -= 1
        if not self.running[engine]:
            self.load[engine] = 0.0  # rounding errors depend on the order of ends, and would decide a tie
        if not left:
            del self._open[request]
        return True

    def end(self, request: str) -> None:
        """Notes the end of all running samples of a request."""
        _, left = self._open.get(request, (0, {}))
        for sample in list(left):
            self.end_sample(request, sample)


_KEPT_RESPONSE, _KEPT_STEP = 0.98, 0.7  # factors on old measurements at each new response and training


class _Rate:
    """The rate of recent measurements, in amounts a second."""

    def __init__(self, kept: float) -> None:
        self._kept = kept
        self._amount = self._seconds = 0.0

    def add(self, amount: int, seconds: float) -> float:
        self._amount = self._kept * self._amount + amount
        self._seconds = self._kept * self._seconds + seconds
        return self._amount / self._seconds


class Pace:
    """Measures the pace of responses and of training. Policies read the pace; only the `Coordinator` changes it.
    Checkpoints omit the pace, because a resumed run may be on another machine."""

    def __init__(self) -> None:
        self.growth = 0.0  # tokens a second of one response, including its wait for a slot; 0: unknown
        self.training = 0.0  # tokens a second that all trainer devices together train on; 0: unknown
        self._responses, self._steps = _Rate(_KEPT_RESPONSE), _Rate(_KEPT_STEP)
        self._open: dict[str, tuple[float, int]] = {}  # running responses: start time, and tokens at the start
        self._began: tuple[float, int] | None = None  # the training under way: start time, and tokens

    def tokens(self, rid: str, now: float) -> int:
        """Estimates how many tokens a running response has by now."""
        began, tokens = self._open.get(rid, (now, 0))
        return tokens + int(self.growth * (now - began))

    def begin(self, request: Request, now: float) -> None:
        for sample, tokens in request.to_come().items():
            self._open[f"{request.rid}/{sample}"] = now, tokens

    def begin_turn(self, turn: Turn, now: float) -> None:
        self._open[turn.response.rid] = now, turn.response.num_tokens

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
    """Returns the number of tokens that the trainer computes: the prompt of each group once, and all responses."""
    return sum(g.prompt.tokens + sum(sample.response.num_tokens for sample in g.samples) for g in groups)


class ParallelismPlanner:
    """Chooses for each step the number of devices of an engine (Flexes, section 4.2).

    An engine whose cache is full takes pages from running responses, and computes the pages again later: a preemption.
    More devices in an engine leave more room beside the weights, but mean fewer engines and more communication. A
    sudden rise of preemptions therefore doubles the degree, and several steps without preemptions halve the degree.

    `degree` is the number of devices that an engine should have now: a power of two within `[least, most]`.

    `devices` is the number of devices of all engines together, 0 if unknown; `start` is the degree at the start, 0 for
    the degree of the settings.
    """

    max_degree = MAX_DEGREE  # devices of a host, within which an engine stays
    rise = 1.05  # the degree doubles if preemptions are more than this many times those of the previous step
    calm = 4  # the degree halves after this many steps without preemptions

    def __init__(self, settings: ParallelismConfig, devices: int = 0, start: int = 0) -> None:
        self.most = 1 << (min(self.max_degree, devices or self.max_degree).bit_length() - 1)
        self.least = min(settings.min_degree, self.most)
        self.degree = self._within(start or settings.degree)
        self._before: int | None = None  # preemptions of the last step; None: no step yet
        self._calm = 0  # steps since the last preemption or the last halving

    def next(self, preemptions: int) -> int:
        """Returns the degree of the next step. `preemptions` are those of the last step. After the very first step
        there is nothing to compare them with, and the degree is not doubled."""
        before, self._before = self._before, preemptions
        self._calm = 0 if preemptions else self._calm + 1
        wanted = self.degree
        if before is not None and preemptions > self.rise * before:
            wanted *= 2
        elif self._calm >= self.calm:
            wanted //= 2
            self._calm = 0
        self.degree = self._within(wanted)
        return self.degree

    def _within(self, degree: int) -> int:
        return max(min(degree, self.most), self.least)

    def state_dict(self) -> State:
        return {"degree": self.degree, "before": self._before, "calm": self._calm}

    def load_state_dict(self, state: SavedState) -> None:
        """Restores the degree, within the bounds of this run's devices."""
        self.degree = self._within(state["degree"])
        self._before, self._calm = state["before"], state["calm"]
