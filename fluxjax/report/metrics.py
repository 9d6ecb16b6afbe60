"""Writes metrics, logs of processes, and `summary.json`.

Metrics go to a JSON line for each step, to TensorBoard event files, and to a Prometheus port, if set. To show metrics
in another way, add a class with the methods of `Board` and a line in `MetricsLog`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from ..base.import_path import as_if_missing
from ..base.statuses import HostStatus, slowest
from ..base.timeline import Span, activity, compilations, working_time
from ..config import ReportConfig
from ..config.run_folder import replace_text

with as_if_missing("torch"):  # torch takes a second and 200 MB in each process
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto import event_pb2
    from tensorboardX.summary import scalar

_FLUSH_SECONDS = 10.0
_EVENTS: Any = event_pb2  # generated code without types
_LOGS = "processes"
log = logging.getLogger(__name__)


def read(file: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the records of a metrics file, in order, up to a line that the end of a process has cut off."""
    records = []
    with contextlib.suppress(json.JSONDecodeError):
        for line in file.read_text().splitlines() if file.exists() else ():
            records.append(json.loads(line))
    return records


@dataclasses.dataclass
class Summary:
    """The results of a run. Accuracies are, for each source, shares of right greedy answers to held-out prompts. Every
    checkpoint holds the summary, so that the summary of a resumed run covers the complete run."""

    name: str = ""
    complete: bool = False  # False if the run was stopped early and can be resumed
    seed: int = 0
    parameters: int = 0  # number of the model's parameters
    devices: int = 0
    steps: int = 0  # RL steps done
    accuracy: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)  # source -> start, end
    blind: dict[str, float] = dataclasses.field(default_factory=dict)  # accuracies with every pixel blanked
    chance: dict[str, float] = dataclasses.field(default_factory=dict)  # accuracies of the best constant answer
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # wall time of each stage, and `total`
    logprob_gap_max: float = 0.0  # the largest mean absolute gap of a step
    logprob_gap_alarms: int = 0  # steps whose gap exceeded `fluxjax.run.callbacks.GAP_ALARMS`
    samples_trained: int = 0  # responses
    tokens_trained: int = 0  # response tokens
    samples_skipped: dict[str, int] = dataclasses.field(default_factory=dict)  # reason -> prompts of all phases
    rewards_failed: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)  # source -> reason -> responses
    # environment -> reason -> episodes and prompts that failed
    environments_failed: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    steps_not_finite: int = 0  # optimizer steps skipped, as loss or gradients were not finite
    checkpoints_failed: int = 0
    resumed_from: list[int] = dataclasses.field(default_factory=list)  # steps

    def add_seconds(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    def count_skip(self, reason: str) -> None:
        """Counts a prompt that could not be used."""
        self.samples_skipped[reason] = self.samples_skipped.get(reason, 0) + 1

    def count_failure(self, field: str, name: str, reason: str) -> None:
        """Counts a failure of a source or an environment in `rewards_failed` or `environments_failed`. Makes new
        dictionaries, because a thread may write the old ones to a checkpoint meanwhile."""
        failed: dict[str, dict[str, int]] = getattr(self, field)
        reasons = failed.get(name, {})
        setattr(self, field, {**failed, name: {**reasons, reason: reasons.get(reason, 0) + 1}})

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the wall time of the `with` body to the stage, except for compilation (stage `compile`)."""
        started, compiled = working_time(), compilations().seconds
        try:
            with activity(name.replace("_", " ")):
                yield
        finally:
            self.add_seconds(name, working_time() - started)
            self.add_seconds("compile", compilations().seconds - compiled)

    def write(self, run_dir: pathlib.Path) -> pathlib.Path:
        file = run_dir / "summary.json"
        values = dataclasses.asdict(self)
        values["seconds"] = {stage: round(seconds, 2) for stage, seconds in self.seconds.items()}
        replace_text(file, json.dumps(values, indent=2) + "\n")
        return file


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """The result of `fit`: the summary, which is also in `run_dir/summary.json`, and the run's folder."""

    summary: Summary
    run_dir: pathlib.Path

    @property
    def model_dir(self) -> pathlib.Path:
        """The trained model as a Hugging Face folder, with its tokenizer and preprocessor settings."""
        return self.run_dir / "model"


_FIGURES = ("devices", "memory_bytes", "device_memory_bytes")
_FIGURES += ("prepare_seconds", "train_seconds", "wait_seconds", "own_seconds")


def host_lanes(hosts: Sequence[HostStatus], step: int) -> list[Span]:
    """Returns the stages of the last step as bars of the timeline picture, in a lane for each process that has them."""
    return [
        Span(stage.name, f"process {host.process}", stage.start, stage.end, step)
        for host in hosts
        if host.step == hosts[0].step
        for stage in host.stages
    ]


def host_metrics(hosts: Sequence[HostStatus]) -> dict[str, float]:
    """Returns a step's metrics of all processes together, empty for a run of one process."""
    if not hosts:
        return {}
    return {
        "hosts/processes": float(len(hosts)),
        "hosts/slowest": float(slowest(hosts).process),
        "hosts/own_seconds_max": max(host.own_seconds for host in hosts),
        "hosts/own_seconds_mean": sum(host.own_seconds for host in hosts) / len(hosts),
        "hosts/memory_bytes_max": float(max(host.memory_bytes for host in hosts)),
    }


@contextlib.contextmanager
def process_log(run_dir: pathlib.Path, process: int, processes: int) -> Iterator[None]:
    """Appends the log of this process to `run_dir/processes/process-N.log`. The log has notes of fluxjax, warnings of
    libraries, and the error that ends the body of the `with`. The terminal still gets warnings. Does nothing for a run
    of one process. Raises OSError if the file cannot be written."""
    if processes == 1:
        yield
        return
    (run_dir / _LOGS).mkdir(exist_ok=True)
    handler = logging.FileHandler(run_dir / _LOGS / f"process-{process}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    notes = logging.getLogger(__name__.partition(".")[0])
    root = logging.getLogger()
    terminal = root.handlers or [logging.lastResort or logging.StreamHandler()]  # lastResort is Python's default
    levels = {logger_or_handler: logger_or_handler.level for logger_or_handler in [notes, *terminal]}
    for terminal_handler in terminal:
        terminal_handler.setLevel(max(terminal_handler.level, logging.WARNING))
    notes.setLevel(logging.INFO)
    before, root.handlers = root.handlers, [*terminal, handler]
    try:
        log.info("process %d of %d, %s, pid %d", process, processes, socket.gethostname(), os.getpid())
        yield
        log.info("the run is over")
    except BaseException as error:
        log.info("ended by %s: %s", type(error).__name__, error)  # a caller prints the error on the terminal
        raise
    finally:
        root.handlers = before
        for logger_or_handler, level in levels.items():
            logger_or_handler.setLevel(level)
        handler.close()


class Board(Protocol):
    """A way to show the metrics of a run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of a step. Except in RL, names begin with the phase, as in `eval/accuracy/digits`."""

    def close(self) -> None: ...


class TensorBoard:
    """Writes a new event file into `folder`."""

    def __init__(self, folder: pathlib.Path, resume: Mapping[str, int]) -> None:
        folder.mkdir(exist_ok=True)
        # With a full disk, the thread of a `SummaryWriter` would end silently, and its queue would block.
        self._board = EventsWriter(str(folder / "events"))
        self._flushed = time.monotonic()
        if resume:  # TensorBoard then drops the killed run's later steps
            start = _EVENTS.SessionLog(status=_EVENTS.SessionLog.START)
            self._board.write_event(_EVENTS.Event(wall_time=time.time(), step=resume["rl"] + 1, session_log=start))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        event = _EVENTS.Event(wall_time=time.time(), step=step)
        for name, value in metrics.items():
            event.summary.MergeFrom(scalar(name, value))
        self._board.write_event(event)
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._board.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._board.close()


class MetricsLog:
    """The metrics of a run, in `run_dir/metrics.jsonl`, in `run_dir/tensorboard/`, and at the Prometheus port of
    `report.prometheus`. The port also serves the statuses of servers, processes and preprocessors."""

    def __init__(
        self,
        run_dir: pathlib.Path,
        settings: ReportConfig,
        *statuses: Callable[[], Sequence[Any]],
        resume: Mapping[str, int] | None = None,
    ) -> None:
        """`resume` has, by phase, the last step in the checkpoint of a resumed run. Later steps, which the killed run
        wrote, are dropped, so that no step occurs twice. Raises OSError if the folder cannot be written. Raises
        `ConfigError` if the port is taken, or if other machines can reach the port without a token."""
        self.file, resume = run_dir / "metrics.jsonl", resume or {}
        self._boards: list[Board] = []
        host, port = settings.prometheus_address
        if port:
            from .prometheus import COLLECTORS, PrometheusPort

            shown = [collector(said) for collector, said in zip(COLLECTORS, statuses, strict=False)]
            self._boards.append(PrometheusPort(port, host, *shown))
        kept = [r for r in read(self.file) if r["step"] <= resume.get(r["phase"], r["step"])] if resume else []
        replace_text(self.file, "".join(json.dumps(record) + "\n" for record in kept))
        self._lines = self.file.open("a", buffering=1)
        self._boards.append(TensorBoard(run_dir / "tensorboard", resume))

    def log(self, phase: str, step: int, metrics: Mapping[str, float], hosts: Sequence[HostStatus] = ()) -> None:
        """Writes the metrics of a step. `phase` is warm_start, rl or eval. `hosts` are states of several processes."""
        record: dict[str, Any] = {"phase": phase, "step": step, "time": round(time.time(), 3), **metrics}
        if hosts:
            record["hosts"] = [
                {"process": host.process, "host": host.host}
                | {name: round(getattr(host, name), 6) for name in _FIGURES}
                for host in hosts
            ]
        self._lines.write(json.dumps(record) + "\n")
        tagged = metrics if phase == "rl" else {f"{phase}/{name}": value for name, value in metrics.items()}
        for board in self._boards:
            board.log(step, tagged)

    def close(self) -> None:
        self._lines.close()
        for board in self._boards:
            board.close()
