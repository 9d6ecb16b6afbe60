"""Writes down what happens in a run: metrics, summary, sample dumps, display, callbacks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..base.types import Prompt
from ..learner.learner import GAP
from ..learner.policy_trainer import PolicyTrainer
from ..report.samples import dump_samples
from ..report.summary import Summary
from ..runtime.runtime import Observer, StepReport

if TYPE_CHECKING:
    from .trainer import FluxTrainer


_ALARMS_SHOWN = 3


class Reporter(Observer):
    """Writes down what the runtime reports."""

    def __init__(self, owner: FluxTrainer, trainer: PolicyTrainer) -> None:
        self._owner = owner
        self._trainer = trainer
        self._since = time.perf_counter()  # when the last step ended, or what came after it

    def on_step(self, report: StepReport) -> None:
        owner, settings = self._owner, self._owner.config.report
        summary, step = owner.summary, report.step
        responses = [sample.response for group in report.groups for sample in group.samples]
        tokens = sum(len(response.token_ids) for response in responses)
        seconds = dict(report.seconds)
        metrics = dict(report.metrics) | {f"seconds/{name}": value for name, value in seconds.items()}
        # From step to step: the stages of one overlap with each other, and with those of the next.
        before, self._since = self._since, time.perf_counter()
        metrics["tokens_per_second"] = tokens / max(self._since - before, 1e-9)
        summary.steps_not_finite += int(metrics.get("skipped_nonfinite", 0.0))
        for stage, value in seconds.items():
            summary.add_seconds(stage, value)
        summary.samples_trained += len(responses)
        summary.tokens_trained += tokens
        self._watch_gap(step, metrics.get(GAP, 0.0))
        owner.metrics.log("rl", step, metrics)
        if settings.dump_samples_every and step % settings.dump_samples_every == 0:
            groups = self._trainer.last_groups
            dump_samples(owner.run_dir / "samples", step, groups, owner.processor.decode, settings.dump_samples)
        owner.display.step(step, metrics, seconds)
        owner.call(lambda callback: callback.on_step(owner, step, report.groups, metrics))

    def _watch_gap(self, step: int, gap: float) -> None:
        summary, limit = self._owner.summary, self._owner.config.report.logprob_gap_alarm
        summary.logprob_gap_max = max(summary.logprob_gap_max, gap)
        if gap <= limit:
            return
        summary.logprob_gap_alarms += 1
        if summary.logprob_gap_alarms <= _ALARMS_SHOWN:
            more = "; further alarms are only counted" if summary.logprob_gap_alarms == _ALARMS_SHOWN else ""
            self._owner.display.note(
                f"ALARM: step {step}: log-probs of engine and trainer differ by {gap:.1e} in the mean, more than "
                f"report.logprob_gap_alarm = {limit:.1e}: the engine serves another policy{more}"
            )

    def on_evaluation(self, step: int, full: bool, result: Mapping[str, float]) -> None:
        owner = self._owner
        owner.metrics.log("eval", step, {f"accuracy/{source}": value for source, value in result.items()})
        owner.display.evaluated(result)
        if full:
            when = "start" if step == 0 else "end"
            for source, value in result.items():
                owner.summary.accuracy.setdefault(source, {})[when] = value
            owner.display.note(
                f"held out at the {when} of RL: "
                + ", ".join(f"{source} {value:.1%}" for source, value in result.items())
            )
        owner.call(lambda callback: callback.on_evaluation(owner, step, result))
        self._since = time.perf_counter()

    def on_skip(self, prompt: Prompt, reason: str) -> None:
        self._owner.count_skip(reason)

    def on_checkpoint(self, step: int) -> None:
        self._owner.call(lambda callback: callback.on_checkpoint(self._owner, step))
        self._since = time.perf_counter()


def opening(trainer: FluxTrainer, resumed: int | None) -> str:
    """The first line of a run."""
    summary = trainer.summary
    begin = "starting" if resumed is None else f"resuming after step {resumed}"
    sources = ", ".join(f"{name} ({len(source):,})" for name, source in trainer.sources.items())
    devices = f"{summary.devices} device{'s' if summary.devices > 1 else ''}"
    return f"{begin}: {summary.parameters:,} parameters on {devices}, sources {sources}, run folder {trainer.run_dir}"


def closing(summary: Summary, reason: str) -> str:
    """The last lines of a run: what it reached, against which controls."""
    lines = [f"{reason}: {summary.steps} steps in {summary.seconds['total']:.0f} s"]
    for source, accuracy in summary.accuracy.items():
        values = [f"{accuracy[when]:.1%}" for when in ("start", "end") if when in accuracy]
        parts = [f"{source}: held out {' -> '.join(values)}{' by RL' if len(values) == 2 else ''}"]
        parts += [f"blind {summary.blind[source]:.1%}"] if source in summary.blind else []
        parts += [f"chance {summary.chance[source]:.1%}"] if source in summary.chance else []
        lines.append(", ".join(parts))
    lines.append(f"largest log-prob gap between engine and trainer: {summary.logprob_gap_max:.1e}")
    if summary.samples_skipped:
        skipped = ", ".join(f"{reason} ({count})" for reason, count in summary.samples_skipped.items())
        lines.append(f"skipped prompts: {skipped}")
    if summary.steps_not_finite:
        lines.append(f"steps left out because their gradients were not finite: {summary.steps_not_finite}")
    if summary.checkpoints_failed:
        lines.append(f"checkpoints that could not be written: {summary.checkpoints_failed}")
    return "\n".join(lines)
