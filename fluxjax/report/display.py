"""The live view of a run: a panel on a terminal, elsewhere a plain line every few seconds."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..base.host_status import HostStatus
from ..base.process import under_way, working_time
from .shown import data_words, host_lines, host_table, preprocessor_table, reward_words, server_table

if TYPE_CHECKING:
    from rollout.fleet_server import ServerStatus

    from ..base.preprocessor_status import PreprocessorStatus

_SPARKS = "▁▂▃▄▅▆▇█"
_PLAIN_SECONDS = 5.0
_PLAIN_HOSTS_SECONDS = 60.0


class Display:
    """Shows where a run stands while used as a context manager; `note` prints a line that stays."""

    def __init__(self, total_steps: int, *, console: Console | None = None) -> None:
        self._servers: Callable[[], Sequence[ServerStatus]] = tuple
        self._hosts: Callable[[], Sequence[HostStatus]] = tuple
        self._preprocessors: Callable[[], Sequence[PreprocessorStatus]] = tuple
        self._console = console or Console(file=sys.stdout, soft_wrap=True)
        self._terminal = self._console.is_terminal
        self._total = total_steps
        self._rewards: deque[float] = deque(maxlen=60)
        self._last_line = 0.0
        self._last_hosts = 0.0  # when their lines were printed
        self._seconds: dict[str, float] = {}
        self._eval: dict[str, float] = {}
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]} [dim]{task.fields[words]}"),
            console=self._console,
        )
        self._task = self._progress.add_task("starting", total=None, left="", words="")
        self._phase = "starting"
        self._ended: deque[float] = deque(maxlen=30)  # when the last steps ended, by `working_time`
        self.stopping = False  # whether the run ends in good order
        self._live = Live(self._progress, console=self._console, refresh_per_second=4) if self._terminal else None

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        self._left, self._noted = threading.Event(), time.monotonic()
        threading.Thread(target=self._break_silence, args=(self._left,), name="display", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        if self._live:
            self._live.transient = self._phase == "starting"  # what was shown before the run began is of no use
            self._live.stop()

    def _break_silence(self, left: threading.Event) -> None:
        while not left.wait(0.5):
            words = f"stopping, waits for: {under_way() or 'this step'}" if self.stopping else under_way()
            self._progress.update(self._task, words=escape(words))
            if words and not self._live and time.monotonic() > self._noted + (3 if self.stopping else 10):
                self.note(f"{self._phase} {self._progress.tasks[0].completed:.0f}/{self._total} | {words}")

    def note(self, text: str) -> None:
        self._noted = time.monotonic()
        self._console.print(Text(text), highlight=False)  # a `[word]` in it is no style

    def show(
        self,
        servers: Callable[[], Sequence[ServerStatus]] = tuple,
        hosts: Callable[[], Sequence[HostStatus]] = tuple,
        preprocessors: Callable[[], Sequence[PreprocessorStatus]] = tuple,
    ) -> None:
        """Shows them as they are at each moment; the functions are called from any thread."""
        self._servers, self._hosts, self._preprocessors = servers, hosts, preprocessors
        if self._live:
            self._live.update(self._drawn())

    def _drawn(self, *more: Table) -> Group:
        tables = host_table(self._hosts), preprocessor_table(self._preprocessors), server_table(self._servers)
        return Group(self._progress, *more, *tables)

    def phase(self, name: str, total: int, done: int = 0) -> None:
        """Begins a phase of `total` steps, of which `done` were done before the run was resumed."""
        self._phase = name
        self._ended.clear()
        self._ended.append(working_time())
        self._total = total
        self._rewards.clear()
        self._progress.reset(self._task, description=name, total=total, completed=done, left="", words="")

    def evaluated(self, accuracy: Mapping[str, float]) -> None:
        self._eval = dict(accuracy)

    def step(self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        """Shows that `step` steps are done, with its `metrics` as in `metrics.jsonl` and its `seconds` by stage."""
        self._ended.append(working_time())
        self._rewards.append(metrics.get("reward/mean", -metrics.get("loss", 0.0)))
        self._seconds = {name: value + 0.9 * self._seconds.get(name, 0.0) for name, value in seconds.items()}
        per_step = statistics.median(b - a for a, b in pairwise(self._ended))  # before some, the run was evaluated
        left = f"{per_step:.2f} s/step, eta {per_step * (self._total - step):.0f} s"
        self._progress.update(self._task, completed=step, left=left)
        if self._live:
            self._live.update(self._drawn(self._table(metrics)))
        elif time.monotonic() - self._last_line > _PLAIN_SECONDS or step == self._total:
            self._last_line = time.monotonic()
            self.note(f"{self._line(step, metrics)} | {left}")
            if time.monotonic() - self._last_hosts > _PLAIN_HOSTS_SECONDS or step == self._total:
                self._last_hosts = time.monotonic()
                for line in host_lines(self._hosts()):
                    self.note(line)

    def _line(self, step: int, metrics: Mapping[str, float]) -> str:
        numbers = [f"{name} {value}" for name, value in self._numbers(metrics).items()]
        parts = [f"{self._phase} {step}/{self._total}", *numbers, self._shares()]
        if servers := self._servers():
            parts.append(f"servers {sum(server.up for server in servers)}/{len(servers)} up")
        preprocessors = self._preprocessors()
        if (up := sum(place.up for place in preprocessors)) < len(preprocessors):
            parts.append(f"preprocessors {up}/{len(preprocessors)} up")
        return " | ".join(part for part in parts if part)

    def _numbers(self, metrics: Mapping[str, float]) -> dict[str, str]:
        shown = {}
        if "reward/mean" in metrics:
            shown["reward"] = f"{metrics['reward/mean']:.3f}"
            accuracies = {k: v for k, v in metrics.items() if k.startswith("accuracy/")}
            shown["sampled"] = ", ".join(f"{k.removeprefix('accuracy/')} {v:.0%}" for k, v in accuracies.items())
        elif "loss" in metrics:
            shown["loss"] = f"{metrics['loss']:.3f}"
        if self._eval:
            shown["held out"] = ", ".join(f"{k} {v:.0%}" for k, v in self._eval.items())
        if "tokens_per_second" in metrics:
            shown["speed"] = f"{metrics['tokens_per_second']:,.0f} tok/s"
        if "rollout_trainer_logprob_gap" in metrics:
            shown["gap"] = f"{metrics['rollout_trainer_logprob_gap']:.1e}"
        if words := data_words(metrics):
            shown["data"] = words
        if words := reward_words(metrics):
            shown["rewards"] = words
        return shown

    def _shares(self) -> str:
        total = sum(self._seconds.values())
        return " ".join(f"{name} {value / total:.0%}" for name, value in self._seconds.items() if total)

    def _table(self, metrics: Mapping[str, float]) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, text in self._numbers(metrics).items():
            table.add_row(f"[dim]{name}", text)
        if self._seconds:
            table.add_row("[dim]time", self._shares())
        table.add_row("[dim]trend", self._sparkline())
        return table

    def _sparkline(self) -> str:
        low, high = min(self._rewards), max(self._rewards)
        scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
        return "".join(_SPARKS[int((value - low) * scale)] for value in self._rewards)
