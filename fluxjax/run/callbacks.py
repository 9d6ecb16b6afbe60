"""Callbacks, the reporter that calls them, and the lines that open and sum up a run."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from models.decoder import Decoder
from models.processing import Processor
from rollout.engine import Engine

from ..base.process import settle_heap
from ..base.timeline import Timeline, working_time
from ..base.types import Group, Prompt
from ..batch.composer import Team
from ..config import Config, DType
from ..coordinator.machine import Coordinator
from ..learner.gradients import GAP
from ..learner.learner import Learner
from ..report import pictures
from ..report.display import Display
from ..report.metrics import MetricsLog, Summary, TrainingResult, host_lanes, host_metrics, read
from ..report.samples import dump_samples
from ..rewards import Scorer
from ..runtime.engine_pool import EnginePool
from ..runtime.runtime import Observer, StepReport
from .build import AnyPixels

if TYPE_CHECKING:
    from rollout.fleet_server import ServerStatus

    from ..runtime.fleet_pool import FleetPool
    from .play import Play


@runtime_checkable
class Run(Protocol):
    """The parts of a `FluxTrainer` that callbacks may rely on."""

    config: Config
    run_dir: pathlib.Path
    processor: Processor
    learner: Learner
    timeline: Timeline

    @property
    def engine(self) -> Engine: ...
    @property
    def coordinator(self) -> Coordinator: ...
    @property
    def summary(self) -> Summary: ...
    @property
    def model(self) -> Decoder: ...
    def stop(self) -> None: ...
    def evaluate(self, limit: int | None = None, *, blind: bool = False) -> dict[str, float]: ...


class ReportedRun(Run, Protocol):
    """The parts of a `FluxTrainer` that its reporter needs."""

    display: Display
    gang: Team
    metrics: MetricsLog
    pixels: AnyPixels
    pool: EnginePool | FleetPool
    rewards: Scorer
    play: Play | None

    def tell(self, hook: Callable[..., None], *event: object) -> None: ...


class Callback:
    """The base class of a user's callbacks. All methods run on the event loop of the run, and should be short.
    `on_checkpoint` is called after the writing of a checkpoint has begun. `trainer` is the `FluxTrainer`. An exception
    in a callback ends the run. `trainer.stop()` ends the run cleanly, with a checkpoint."""

    def on_fit_start(self, trainer: Run) -> None: ...
    def on_step(self, trainer: Run, step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> None: ...
    def on_evaluation(self, trainer: Run, step: int, accuracy: Mapping[str, float]) -> None: ...
    def on_checkpoint(self, trainer: Run, step: int) -> None: ...
    def on_fit_end(self, trainer: Run, result: TrainingResult) -> None: ...


class SettledHeap(Callback):
    """Calls `settle_heap` after the steps 1, 2, 4, 8 and so on of a process."""

    def __init__(self) -> None:
        self._steps = 0

    def on_step(self, trainer: Run, step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> None:
        self.count()

    def count(self) -> None:
        self._steps += 1
        if self._steps.bit_count() == 1:
            settle_heap()


_ALARMS_SHOWN = 3
_DUMPED = 8  # responses in a dump
# A mean absolute difference (nats) between log-probs of engine and trainer above this value raises an alarm. Rounding
# causes smaller differences.
GAP_ALARMS = {DType.FLOAT32: 1e-4, DType.BFLOAT16: 0.05}


class Reporter(Observer):
    """Writes the runtime's reports into metrics, summary and display, and passes them to the run's callbacks."""

    def __init__(self, run: ReportedRun) -> None:
        self._run, self._summary, self._display = run, run.summary, run.display
        self._since = working_time()  # when the last step, evaluation or checkpoint ended
        self._served = time.perf_counter(), _tokens(run.pool.servers())  # clock and tokens at the last step
        self._told = run.gang.bytes_told  # bytes sent to other processes until the last step

    def on_step(self, report: StepReport) -> None:
        run, summary, step = self._run, self._summary, report.step
        responses = [sample.response for group in report.groups for sample in group.samples]
        tokens = sum(response.num_trained for response in responses)
        seconds = dict(report.seconds)
        metrics = dict(report.metrics) | {f"seconds/{name}": value for name, value in seconds.items()}
        # The time counts from the last step, evaluation or checkpoint, because stages overlap with each other and with
        # other steps.
        before, self._since = self._since, working_time()
        metrics["tokens_per_second"] = tokens / max(self._since - before, 1e-9)
        hosts = run.gang.statuses()
        metrics |= run.coordinator.scheduling()
        metrics |= self._server_metrics() | run.pixels.metrics() | run.rewards.metrics()
        if hosts:
            told, self._told = run.gang.bytes_told - self._told, run.gang.bytes_told
            metrics |= host_metrics(hosts) | {"hosts/bytes_told": float(told)}
        if run.play is not None:
            metrics |= run.play.metrics()
        for span in host_lanes(hosts, step):
            run.timeline.add(span)
        summary.steps_not_finite += int(metrics.get("skipped_nonfinite", 0.0))
        for stage, value in seconds.items():
            summary.add_seconds(stage, value)
        summary.samples_trained += len(responses)
        summary.tokens_trained += tokens
        self._watch_gap(step, metrics.get(GAP, 0.0))
        run.metrics.log("rl", step, metrics, hosts)
        every = run.config.report.dump_samples_every
        if every and step % every == 0:
            dump_samples(run.run_dir, step, report.groups, run.processor.decode, _DUMPED)
        self._display.step(step, metrics, seconds)
        run.tell(Callback.on_step, step, report.groups, metrics)

    def _server_metrics(self) -> dict[str, float]:
        """Returns the metrics of servers. Their tokens include those of evaluations."""
        servers = self._run.pool.servers()
        if not servers:
            return {}
        (then, before), self._served = self._served, (time.perf_counter(), _tokens(servers))
        now, tokens = self._served
        return {
            "servers/up": float(sum(server.up for server in servers)),
            "servers/restarts": float(sum(server.restarts for server in servers)),
            # The servers' own rates do not count the time in which a server is idle.
            "servers/tokens_per_second": max(tokens - before, 0) / max(now - then, 1e-9),  # too small if a server left
        }

    def _watch_gap(self, step: int, gap: float) -> None:
        summary, limit = self._summary, GAP_ALARMS[self._run.config.model.compute_dtype]
        summary.logprob_gap_max = max(summary.logprob_gap_max, gap)
        if gap <= limit:
            return
        summary.logprob_gap_alarms += 1
        if summary.logprob_gap_alarms <= _ALARMS_SHOWN:
            more = "; further alarms are only counted" if summary.logprob_gap_alarms == _ALARMS_SHOWN else ""
            self._display.note(
                f"ALARM: step {step}: log-probs of engine and trainer differ by {gap:.1e} in the mean, more than "
                f"{limit:.1e}: the engine serves another policy{more}"
            )

    def on_evaluation(self, step: int, full: bool, result: Mapping[str, float]) -> None:
        self._run.metrics.log("eval", step, {f"accuracy/{source}": value for source, value in result.items()})
        self._display.evaluated(result)
        if full:
            when = "start" if step == 0 else "end"
            for source, value in result.items():
                self._summary.accuracy.setdefault(source, {})[when] = value
            self._display.note(
                f"held out at the {when} of RL: "
                + ", ".join(f"{source} {value:.1%}" for source, value in result.items())
            )
        self._run.tell(Callback.on_evaluation, step, result)
        self._since = working_time()

    def on_skip(self, prompt: Prompt, reason: str) -> None:
        self._summary.count_skip(reason)

    def on_checkpoint(self, step: int) -> None:
        self._run.tell(Callback.on_checkpoint, step)
        self._since = working_time()


def _tokens(servers: Sequence[ServerStatus]) -> int:
    return sum(server.tokens for server in servers)


def opening(summary: Summary, sources: Mapping[str, Sized], run_dir: pathlib.Path, resumed: int | None) -> str:
    """Returns the line that `fit` prints first."""
    begin = "starting" if resumed is None else f"resuming after step {resumed}"
    named = ", ".join(f"{name} ({len(source):,})" for name, source in sources.items())
    devices = f"{summary.devices} device{'s' if summary.devices > 1 else ''}"
    return f"{begin}: {summary.parameters:,} parameters on {devices}, sources {named}, run folder {run_dir}"


def closing(summary: Summary, reason: str) -> str:
    """Returns the lines that sum up a run: accuracies beside the controls (blind, chance), and failures."""
    lines = [f"{reason}: {summary.steps} steps in {summary.seconds['total']:.0f} s"]
    for source, accuracy in summary.accuracy.items():
        values = [f"{accuracy[when]:.1%}" for when in ("start", "end") if when in accuracy]
        parts = [f"{source}: held out {' -> '.join(values)}{' by RL' if len(values) == 2 else ''}"]
        parts += [f"blind {summary.blind[source]:.1%}"] if source in summary.blind else []
        parts += [f"chance {summary.chance[source]:.1%}"] if source in summary.chance else []
        lines.append(", ".join(parts))
    lines.append(f"largest log-prob gap between engine and trainer: {summary.logprob_gap_max:.1e}")
    failures = {"skipped prompts": summary.samples_skipped}
    failures |= {f"failed rewards of source {name}, each scored 0": by for name, by in summary.rewards_failed.items()}
    failures |= {f"failures of environment {name}": by for name, by in summary.environments_failed.items()}
    for what, by_reason in failures.items():
        if by_reason:
            lines.append(f"{what}: {', '.join(f'{reason} ({count})' for reason, count in by_reason.items())}")
    if summary.steps_not_finite:
        lines.append(f"optimizer steps skipped, as loss or gradients were not finite: {summary.steps_not_finite}")
    if summary.checkpoints_failed:
        lines.append(f"checkpoints that could not be written: {summary.checkpoints_failed}")
    return "\n".join(lines)


def write_pictures(run: ReportedRun) -> None:
    """Writes the learning curve. If this process made steps, writes the timeline of the last steps, and a picture of
    the media that each preprocessor held over time."""
    controls = {"blind": run.summary.blind, "chance": run.summary.chance}
    pictures.learning_curve(read(run.metrics.file), controls, run.run_dir / "learning.png")
    if stages := pictures.of_steps(run.timeline.spans()):  # a run that was already complete keeps its timeline
        pictures.timeline([*run.pool.lanes(stages), *run.pixels.lanes(stages)], run.run_dir / "timeline.png")
        run.pixels.draw(run.run_dir / "media.png")
