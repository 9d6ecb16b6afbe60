"""Measures the speed of the reward for mathematical answers, alone and beside answers that never finish.

python benchmarks/rewards_math.py      prints one JSON line, after half a minute; needs the extra `math`

`at_once_per_second` counts answers that need no algebra (equal texts, numbers), `checks_per_second` distinct answers
that math-verify compares in `workers` processes. Then the pathological answers are scored, two at a time, beside a
stream of others: `pathological_worst_seconds` is the longest time of a pathological answer, from its beginning to its
score; `others_per_second` and `others_worst_seconds` are the figures of the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation

from common import cores

from fluxjax.base.scored import Completion, Prompt, Reward
from fluxjax.rewards.math import MathAnswer

CHECKS = 300
STREAMS = 4  # answers beside the pathological ones that are scored at the same time
PATHOLOGICAL = {
    "tower of powers": "9^{9^{9^9}}",
    "tower of tens": "10^{10^{10^{10}}}",
    "factorial": "(10^{9})!",
    "sum": r"\sum_{n=1}^{10^{9}} \frac{\sin(n)}{n!}",
    "450 brackets": "(" * 450 + "x" + ")" * 450,
    "3000 brackets": "(" * 3000 + "x" + ")" * 3000,
    "100 fractions": r"\frac{" * 100 + "x" + "}{2}" * 100,
    "20 x 20 matrix": r"\begin{pmatrix}" + r"\\".join(["&".join(["x"] * 20)] * 20) + r"\end{pmatrix}",
    "200 x 200 matrix": r"\begin{pmatrix}" + r"\\".join(["&".join(["x"] * 200)] * 200) + r"\end{pmatrix}",
    "matrix of towers": r"\begin{pmatrix}" + r"\\".join(["&".join(["9^{9^9}"] * 10)] * 10) + r"\end{pmatrix}",
}


def measure(options: object = None) -> dict[str, Any]:
    """Returns the figures that the module's docstring lists; there are no options."""
    workers = max(4, cores())
    with contextlib.closing(MathAnswer(workers=workers)) as reward:
        return {"workers": workers, "seconds_allowed": reward.seconds, **asyncio.run(_measured(reward))}


async def _measured(reward: MathAnswer) -> dict[str, Any]:
    await _score_all(reward, [_algebra(-number) for number in range(4 * reward.workers)])  # processes start
    at_once = [(str(number), rf"\boxed{{{number + number % 2}}}") for number in range(10 * CHECKS)]
    quick, _ = await _score_all(reward, at_once)
    seconds, scores = await _score_all(reward, [_algebra(number) for number in range(CHECKS)])
    assert all(score.correct for score in scores), "math-verify no longer takes equal expressions for equal"
    return {
        "at_once_per_second": round(len(at_once) / quick),
        "checks_per_second": round(CHECKS / seconds, 1),
        **await _beside_pathological(reward),
    }


async def _beside_pathological(reward: MathAnswer) -> dict[str, Any]:
    done = asyncio.Event()
    numbers = itertools.count(CHECKS)
    flow_seconds: list[float] = []
    worst: dict[str, float] = {}
    left = list(PATHOLOGICAL.items())

    async def flow() -> None:
        while not done.is_set():
            seconds, (score,) = await _score_all(reward, [_algebra(next(numbers))])
            assert score.correct, "a good answer was not scored beside a pathological one"
            flow_seconds.append(seconds)

    async def pathological() -> None:
        while left:
            name, text = left.pop()
            worst[name], (score,) = await _score_all(reward, [("x + 1", rf"\boxed{{{text}}}")])
            assert not score.correct, name

    begin = time.perf_counter()
    flows = [asyncio.create_task(flow()) for _ in range(STREAMS)]
    await asyncio.gather(pathological(), pathological())
    done.set()
    await asyncio.gather(*flows)
    name = max(worst, key=lambda name: worst[name])
    return {
        "pathological_worst_seconds": round(worst[name], 3),
        "pathological_worst": name,
        "others_per_second": round(len(flow_seconds) / (time.perf_counter() - begin), 1),
        "others_worst_seconds": round(max(flow_seconds), 3),
    }


def _algebra(number: int) -> tuple[str, str]:
    """Returns an answer and an equal response in another form; each number gives another pair."""
    return f"(x + {number})^2", rf"\boxed{{x^2 + {2 * number} x + {number**2}}}"


async def _score_all(reward: MathAnswer, answers: list[tuple[str, str]]) -> tuple[float, list[Reward]]:
    begin = time.perf_counter()
    scores = await asyncio.gather(
        *(reward.score(Completion(Prompt("1", "bench", "?", answer), text)) for answer, text in answers)
    )
    return time.perf_counter() - begin, scores


if __name__ == "__main__":
    print(json.dumps(measure()))
