"""How fast responses grow and groups are trained on, learnt from the times at which events come (`Tick`).

Nothing is known where nobody says what time it is. Old measurements fade, so that the pace may change during a run.
"""

from collections.abc import Iterable

from ..base.types import Group
from .messages import Request

_KEPT_RESPONSE, _KEPT_STEP = 0.98, 0.7  # weight of what was measured, when one more response, or portion, is


class _Rate:
    """The amount a second in what was measured lately."""

    def __init__(self, kept: float) -> None:
        self._kept = kept
        self._amount = self._seconds = 0.0

    def add(self, amount: int, seconds: float) -> float:
        """Returns the rate with this in it."""
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
    return sum(g.prompt.tokens + sum(len(sample.response.token_ids) for sample in g.samples) for g in groups)
