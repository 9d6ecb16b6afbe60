"""The loggers of a run: one JSON line a step, TensorBoard event files, and a Prometheus port, if there is one. A logger
of another kind is a class with the methods of `Logger` and a line in `MetricsLog`."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ..base.host_status import HostStatus
from ..base.import_path import as_if_missing
from ..config import ReportConfig
from ..config.run_folder import replace_text
from .hosts_shown import host_records
from .metrics import read, tag

with as_if_missing("torch"):  # that alone takes a second and 200 MB of each process, for tensors that we don't have
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto import event_pb2
    from tensorboardX.summary import scalar

_FLUSH_SECONDS = 10.0
_EVENTS: Any = event_pb2  # generated, without types


class Logger(Protocol):
    def log(self, phase: str, step: int, metrics: Mapping[str, float], hosts: Sequence[HostStatus] = ()) -> None:
        """Writes the metrics of a step: `phase` is warm_start, rl or eval, `metrics` has names like `reward/digits`;
        `hosts` are the states of several processes after the step."""

    def close(self) -> None: ...


class JsonLines:
    """Appends to `file`."""

    def __init__(self, file: pathlib.Path, resume: Mapping[str, int]) -> None:
        kept = [r for r in read(file) if r["step"] <= resume.get(r["phase"], r["step"])] if resume else []
        replace_text(file, "".join(json.dumps(record) + "\n" for record in kept))
        self._stream = file.open("a", buffering=1)

    def log(self, phase: str, step: int, metrics: Mapping[str, float], hosts: Sequence[HostStatus] = ()) -> None:
        record: dict[str, Any] = {"phase": phase, "step": step, "time": round(time.time(), 3), **metrics}
        if hosts:
            record["hosts"] = host_records(hosts)
        self._stream.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._stream.close()


class TensorBoard:
    """Writes a new event file into `folder`."""

    def __init__(self, folder: pathlib.Path, resume: Mapping[str, int]) -> None:
        folder.mkdir(exist_ok=True)
        # Not a `SummaryWriter`: its thread ends without a word when the disk is full, and then its queue blocks.
        self._board = EventsWriter(str(folder / "events"))
        self._flushed = time.monotonic()
        if resume:  # TensorBoard forgets the later steps of the killed run
            start = _EVENTS.SessionLog(status=_EVENTS.SessionLog.START)
            self._board.write_event(_EVENTS.Event(wall_time=time.time(), step=resume["rl"] + 1, session_log=start))

    def log(self, phase: str, step: int, metrics: Mapping[str, float], hosts: object = ()) -> None:
        event = _EVENTS.Event(wall_time=time.time(), step=step)
        for name, value in metrics.items():
            event.summary.MergeFrom(scalar(tag(phase, name), value))
        self._board.write_event(event)
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._board.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._board.close()


class MetricsLog:
    """All loggers of a run, as one: `run_dir/metrics.jsonl`, `run_dir/tensorboard/`, and a Prometheus port if
    `report.prometheus` names one, which serves the statuses of servers, processes and preprocessors, too."""

    def __init__(
        self,
        run_dir: pathlib.Path,
        settings: ReportConfig,
        *statuses: Callable[[], Sequence[Any]],
        resume: Mapping[str, int] | None = None,
    ) -> None:
        """`resume`: by phase, the last step that the checkpoint of a resumed run contains. Later ones, which the killed
        run wrote, are dropped, so that no step is there twice. Raises OSError if the folder cannot be written,
        `ConfigError` if the port is taken, or others reach it without a token."""
        self.file = run_dir / "metrics.jsonl"
        self._loggers: list[Logger] = []
        host, port = settings.prometheus_address
        if port:
            from .prometheus import COLLECTORS, PrometheusPort

            shown = [collector(said) for collector, said in zip(COLLECTORS, statuses, strict=False)]
            self._loggers.append(PrometheusPort(port, host, *shown))
        self._loggers += [JsonLines(self.file, resume or {}), TensorBoard(run_dir / "tensorboard", resume or {})]

    def log(self, phase: str, step: int, metrics: Mapping[str, float], hosts: Sequence[HostStatus] = ()) -> None:
        for logger in self._loggers:
            logger.log(phase, step, metrics, hosts)

    def close(self) -> None:
        for logger in self._loggers:
            logger.close()
