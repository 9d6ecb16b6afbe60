"""Measures a run that scores responses as they end, beside one that scores after rollout: the part `async` of
`rewards.py`.

The embedded run of `policies_measured.py` (strings of lognormal lengths, synchronous policy) has a reward that takes as
long as a remote judge: lognormal seconds, `SLOTS` responses at a time. One side scores each response when it ends, the
other side begins when all responses of a step have ended. Both have the same seed and so the same responses, with the
same seconds of scoring; they take turns, and each step is compared with the same step of the other side.

- `by_share`: for the seconds of scoring a step alone, over the seconds of its rollout (`share`), the median seconds of
  a step on both sides, and `speedup`, the median of their quotients;
- `asynchronous_speedup` is the `speedup` at share 1;
- `same_rewards` says whether both sides gave every step the same rewards.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import pathlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from compile_clock import CompileClock
from policies_measured import Sizes, configuration, write_strings
from rich.console import Console

from fluxjax.base.process import use_compile_cache
from fluxjax.base.scored import Completion, Reward
from fluxjax.base.types import Group
from fluxjax.config import Config, RewardKindConfig
from fluxjax.report.display import Display
from fluxjax.rewards.rules import positions
from fluxjax.run.callbacks import Callback, Run
from fluxjax.run.trainer import FluxTrainer

SHARES = 0.0, 0.1, 0.5, 1.0, 3.0  # share 0 measures the seconds of a rollout
SLOTS, SIGMA = 8, 0.5
SIZES = Sizes(longest=96, prompts=16, responses=2, warm_start=30, steps=5, turns=2)  # turns of each share


class Step(NamedTuple):
    seconds: float  # without the seconds of compiling
    rollout: float
    rewards: tuple[float, ...]


class RemoteJudge:
    """Scores by the rule `positions`, after a wait of `seconds` on average. With `held`, nothing is scored before
    `step` responses wait."""

    kind = "judge"

    def __init__(self, held: bool, step: int) -> None:
        self.seconds = 0.0
        self._held, self._step = held, step
        self._slots = asyncio.Semaphore(SLOTS)
        self._waiting, self._rollout_is_over = 0, asyncio.Event()

    async def score(self, completion: Completion) -> Reward:
        if self._held:
            await self._rollout()
        async with self._slots:
            await asyncio.sleep(self._drawn(completion))
        return positions(completion.prompt, completion.text)

    async def _rollout(self) -> None:
        over = self._rollout_is_over
        self._waiting += 1
        if self._waiting == self._step:
            over.set()
            self._waiting, self._rollout_is_over = 0, asyncio.Event()
        await over.wait()

    def _drawn(self, completion: Completion) -> float:
        draw = random.Random(f"{completion.prompt.draw} {completion.text}")
        return self.seconds * draw.lognormvariate(-(SIGMA**2) / 2, SIGMA)  # its mean is `seconds`


class Watch(Callback):
    """Records the steps of a turn, except the first step: it begins before the clock is read."""

    def __init__(self, clock: CompileClock) -> None:
        self._clock = clock
        self._last: tuple[float, float] | None = None
        self.steps: list[Step] = []

    def on_step(self, trainer: Run, step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> None:
        now = time.perf_counter(), self._clock.seconds
        if self._last is not None:
            rewards = tuple(sample.reward.value for group in groups for sample in group.samples)
            seconds = now[0] - self._last[0] - (now[1] - self._last[1])
            self.steps.append(Step(seconds, metrics["seconds/rollout"], rewards))
        self._last = now


class Side:
    """One of the two runs that are compared: its judge and its trainer."""

    def __init__(self, folder: pathlib.Path, held: bool, sizes: Sizes, clock: CompileClock) -> None:
        self._sizes, self._clock, self._turns = sizes, clock, 0
        self.judge = RemoteJudge(held, sizes.prompts * sizes.responses)
        config = _configuration(folder, "held" if held else "overlapped", sizes)
        display = Display(config.steps, console=Console(file=sys.stderr, soft_wrap=True))
        self.trainer = FluxTrainer(config, display=display, rewards={"strings": self.judge})

    def turn(self) -> list[Step]:
        self._turns += 1
        watch = Watch(self._clock)
        self.trainer.fit(num_steps=self._turns * self._sizes.steps, callbacks=[watch])
        return watch.steps


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures that the module's docstring lists."""
    sizes = dataclasses.replace(SIZES, warm_start=10, steps=3, turns=1) if options.small else SIZES
    use_compile_cache()
    clock = CompileClock(tracing=False)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        write_strings(pathlib.Path(name), sizes)
        sides = [Side(pathlib.Path(name), held, sizes, clock) for held in (False, True)]
        for side in sides:
            stack.enter_context(side.trainer)
            side.turn()  # compiles
        pairs = _paired(sides, sizes)
    shares = [_compared(share, pairs[share]) for share in SHARES]
    return {
        "sizes": dataclasses.asdict(sizes),
        "slots": SLOTS,
        "rollout_seconds": round(_rollout_seconds(pairs[0.0]), 3),
        "by_share": shares,
        "asynchronous_speedup": shares[SHARES.index(1.0)]["speedup"],
        "same_rewards": all(ours.rewards == held.rewards for share in SHARES for ours, held in pairs[share]),
    }


def _configuration(folder: pathlib.Path, name: str, sizes: Sizes) -> Config:
    config = configuration(folder, "synchronous", sizes)
    config.name, config.run_dir = name, str(folder / name)
    config.steps = sizes.steps * (1 + sizes.turns * len(SHARES))
    config.data.sources["strings"].eval_reward = "positions"
    config.rewards.kinds["judge"] = RewardKindConfig(seconds=600.0, concurrency=sizes.prompts * sizes.responses)
    return config


def _paired(sides: Sequence[Side], sizes: Sizes) -> dict[float, list[tuple[Step, Step]]]:
    """Returns by share the steps of both sides. Their turns alternate, and so does the side that begins."""
    pairs: dict[float, list[tuple[Step, Step]]] = {}
    for share in SHARES:
        pairs[share] = []
        for side in sides:
            rollout = _rollout_seconds(pairs[0.0]) if share else 0.0
            side.judge.seconds = share * rollout * SLOTS / (sizes.prompts * sizes.responses)
        for number in range(sizes.turns):
            order = sides if number % 2 == 0 else sides[::-1]
            steps = {side: side.turn() for side in order}
            pairs[share] += zip(steps[sides[0]], steps[sides[1]], strict=True)
        print(f"async: {_compared(share, pairs[share])}", file=sys.stderr)
    return pairs


def _rollout_seconds(pairs: Sequence[tuple[Step, Step]]) -> float:
    return statistics.median(step.rollout for pair in pairs for step in pair)


def _compared(share: float, pairs: Sequence[tuple[Step, Step]]) -> dict[str, float]:
    return {
        "share": share,
        "asynchronous_seconds": round(statistics.median(ours.seconds for ours, _ in pairs), 3),
        "synchronous_seconds": round(statistics.median(held.seconds for _, held in pairs), 3),
        "speedup": round(statistics.median(held.seconds / ours.seconds for ours, held in pairs), 3),
        "steps": len(pairs),
    }
