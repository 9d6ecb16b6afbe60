"""Measures the policies on the embedded engine, with answers of long-tailed lengths: rollout and total time a sample.

A part of `tail_batching.py`. A tiny model writes strings of lognormal lengths backwards. Few strings run at once, so
that a step of the engine takes equally long for one string and for all, as on GPUs. Every policy trains its own copy of
the model, from the same warm start, on the same prompts. The policies take turns, a few steps each, so that other load
on the machine hits all of them alike. Times are a trained sample's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation

import numpy as np
from common import cores
from compile_clock import CompileClock
from rich.console import Console

from fluxjax.base.process import use_compile_cache
from fluxjax.base.types import Group
from fluxjax.config import POLICIES as KINDS
from fluxjax.config import Config, Importance, LossAggregation, Schedule, SourceConfig, TailBatchingConfig
from fluxjax.report.display import Display
from fluxjax.run.callbacks import Callback, Run
from fluxjax.run.trainer import FluxTrainer

POLICIES = ("synchronous", "tail_batching", "tail_batching_spread", "april", "adaptive_async")
TAIL = {  # `tail_batching` strictly on-policy, and with its defaults; neither has spare responses
    "tail_batching": TailBatchingConfig(prompts=1.25, responses=1.0, max_staleness=0),
    "tail_batching_spread": TailBatchingConfig(prompts=2.0, responses=1.0, max_staleness=1),
}
LETTERS, MEDIAN, SIGMA = "abc", 6.0, 1.5


@dataclasses.dataclass(frozen=True)
class Sizes:
    longest: int = 160  # letters of an answer
    prompts: int = 16  # a step
    responses: int = 2  # a prompt
    warm_start: int = 150  # supervised steps
    steps: int = 30  # steps of a turn: complete periods of tail batching, for periods of five steps and of three
    turns: int = 6  # turns of each policy; the first turn compiles and is not counted


def write_strings(folder: pathlib.Path, sizes: Sizes, records: int = 4000, held_out: int = 200) -> None:
    """Writes `train.jsonl` and `eval.jsonl`: strings of lognormal lengths, and their reverses as answers."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(MEDIAN), SIGMA, records + held_out).round(), 1, sizes.longest).astype(int)
    words = ["".join(rng.choice(list(LETTERS), length)) for length in lengths]
    for name, part in (("eval", words[:held_out]), ("train", words[held_out:])):
        lines = (
            json.dumps({"id": f"{name}-{i}", "prompt": f"Reverse {word}:", "answer": word[::-1]})
            for i, word in enumerate(part)
        )
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def configuration(folder: pathlib.Path, policy: str, sizes: Sizes) -> Config:
    config = Config(name=policy, run_dir=str(folder / policy))
    source = SourceConfig(path=str(folder / "train.jsonl"), eval_path=str(folder / "eval.jsonl"), reward="positions")
    config.data.sources = {"strings": source}
    config.model.tiny |= {"architecture": "qwen2", "rope_theta": 100.0}
    config.steps = sizes.steps * sizes.turns
    config.warm_start.steps, config.warm_start.batch_size = sizes.warm_start, 64
    config.rollout.prompts_per_step, config.rollout.group_size = sizes.prompts, sizes.responses
    config.rollout.max_new_tokens = sizes.longest + 16
    config.rollout.max_sequence_tokens = 2 * sizes.longest + 32
    config.rollout.slots = 2 * sizes.prompts * sizes.responses
    config.packing.tokens_per_row, config.packing.rows_per_device = 2 * sizes.longest + 32, 8
    config.algorithm.loss_aggregation = LossAggregation.SEQUENCE_MEAN
    config.optim.schedule, config.optim.lr, config.optim.betas = Schedule.CONSTANT, 3e-4, (0.9, 0.95)
    config.checkpoint.every, config.evaluation.every = 0, 0
    config.evaluation.samples = 200
    config.report.dump_samples_every = 0
    config.policy = TAIL[policy] if policy in TAIL else KINDS[policy.removesuffix("_spread")]()
    if policy in ("tail_batching_spread", "april", "adaptive_async"):
        importance = config.algorithm.importance
        importance.kind = Importance.TRUNCATE
    return config


class Watch(Callback):
    """Counts the samples and seconds of a turn, from the end of its first step on, without the seconds of compiling.

    Shapes depend on the samples, so that new shapes appear now and then; a longer run would have compiled all."""

    def __init__(self, clock: CompileClock, overlapping: bool) -> None:
        self._clock, self._overlapping = clock, overlapping
        self._began: tuple[float, float, float] | None = None  # at the end of the first step
        self._samples, self._rollout, self._end = 0, 0.0, 0.0

    def on_step(self, trainer: Run, step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> None:
        self._end = time.perf_counter()
        if self._began is None:
            self._began = self._end, self._clock.in_threads("rollout"), self._clock.seconds
        else:
            self._samples += sum(len(group.samples) for group in groups)
            self._rollout += metrics.get("seconds/rollout", 0.0)

    def milliseconds(self) -> dict[str, float]:
        """Returns the milliseconds of a trained sample. `compiling` was subtracted from `end_to_end`, unless rollouts
        overlap with all other work."""
        assert self._began is not None
        began, rollout, compiling = self._began
        compiled = self._clock.seconds - compiling
        seconds = {"rollout": self._rollout, "end_to_end": self._end - began, "compiling": compiled}
        if not self._overlapping:
            seconds["rollout"] -= self._clock.in_threads("rollout") - rollout
            seconds["end_to_end"] -= compiled
        return {name: round(1e3 * value / self._samples, 3) for name, value in seconds.items()}


def measure(sizes: Sizes) -> dict[str, Any]:
    """Measures the milliseconds of a trained sample under each policy, medians over turns. Ratios above 1 mean that the
    policy is faster than `synchronous`."""
    use_compile_cache()
    clock = CompileClock(tracing=False)  # traces contain each other, and would count twice
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = pathlib.Path(name)
        write_strings(folder, sizes)
        console = Console(file=sys.stderr, soft_wrap=True)
        trainers = {
            policy: stack.enter_context(
                FluxTrainer(configuration(folder, policy, sizes), display=Display(sizes.steps, console=console))
            )
            for policy in POLICIES
        }
        turns: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
        accuracy: dict[str, list[float]] = {policy: [] for policy in POLICIES}
        for turn in range(1, sizes.turns + 1):
            for policy, trainer in trainers.items():
                watch = Watch(clock, overlapping=policy == "adaptive_async")
                result = trainer.fit(num_steps=turn * sizes.steps, callbacks=[watch])
                turns[policy].append(watch.milliseconds())
                accuracy[policy].append(result.summary.accuracy["strings"]["end"])
                print(f"turn {turn} of {policy}: {turns[policy][-1]}", file=sys.stderr)
    counted = {policy: rounds[1:] for policy, rounds in turns.items()}
    medians = {
        policy: {key: statistics.median(turn[key] for turn in rounds) for key in rounds[0]}
        for policy, rounds in counted.items()
    }
    plain = medians["synchronous"]
    return {
        "what": "embedded engine on this CPU, one device, strings of lognormal lengths written backwards",
        "cores": cores(),
        "sizes": dataclasses.asdict(sizes) | {"median": MEDIAN, "sigma": SIGMA},
        "milliseconds_a_trained_sample": medians,
        "turns": counted,
        "against_synchronous": {
            policy: {key: round(plain[key] / figures[key], 3) for key in ("rollout", "end_to_end")}
            for policy, figures in medians.items()
            if policy != "synchronous"
        },
        "held_out_accuracy_after_each_turn": accuracy,
    }


if __name__ == "__main__":
    small = Sizes(warm_start=20, steps=4, turns=2) if "--small" in sys.argv else Sizes()
    print(json.dumps({"benchmark": "policies_measured", "measured": measure(small)}))
