"""The live view of a run: a panel on a terminal, elsewhere a plain line every few seconds."""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rollout.fleet_job import ServerStatus

from ..base.host_status import HostStatus
from ..base.preprocessor_status import PreprocessorStatus
from .data_shown import PreprocessorTable, data_words
from .hosts_shown import HostTable, host_lines
from .rewards_shown import reward_words

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
            TextColumn("eta"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task("starting", total=None)
        self._phase = ""
        self._ended: deque[float] = deque(maxlen=30)  # when the last steps ended
        self._live = Live(self._progress, console=self._console, refresh_per_second=4) if self._terminal else None

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def note(self, text: str) -> None:
        self._console.print(Text(text), highlight=False)  # a `[word]` in it is no style

    def show_servers(self, servers: Callable[[], Sequence[ServerStatus]]) -> None:
        """Shows rollout servers as they are at each moment; `servers` is called from any thread."""
        self._servers = servers
        if self._live:
            self._live.update(self._drawn())

    def show_hosts(self, hosts: Callable[[], Sequence[HostStatus]]) -> None:
        """Shows the processes of the run as they are at each moment; `hosts` is called from any thread."""
        self._hosts = hosts
        if self._live:
            self._live.update(self._drawn())

    def show_preprocessors(self, preprocessors: Callable[[], Sequence[PreprocessorStatus]]) -> None:
        """Shows preprocessors as they are at each moment; `preprocessors` is called from any thread."""
        self._preprocessors = preprocessors
        if self._live:
            self._live.update(self._drawn())

    def _drawn(self, *more: Table) -> Group:
        tables = HostTable(self._hosts), PreprocessorTable(self._preprocessors), _ServerTable(self._servers)
        return Group(self._progress, *more, *tables)

    def phase(self, name: str, total: int, done: int = 0) -> None:
        """Begins a phase of `total` steps, of which `done` were done before the run was resumed."""
        self._phase = name
        self._ended.clear()
        self._ended.append(time.monotonic())
        self._total = total
        self._rewards.clear()
        self._progress.reset(self._task, description=name, total=total, completed=done)

    def evaluated(self, accuracy: Mapping[str, float]) -> None:
        self._eval = dict(accuracy)

    def step(self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        """Shows that `step` steps are done, with its `metrics` as in `metrics.jsonl` and its `seconds` by stage."""
        self._ended.append(time.monotonic())
        self._rewards.append(metrics.get("reward/mean", -metrics.get("loss", 0.0)))
        self._seconds = {name: value + 0.9 * self._seconds.get(name, 0.0) for name, value in seconds.items()}
        self._progress.update(self._task, completed=step)
        if self._live:
            self._live.update(self._drawn(self._table(metrics)))
        elif time.monotonic() - self._last_line > _PLAIN_SECONDS or step == self._total:
            self._last_line = time.monotonic()
            self.note(self._line(step, metrics))
            if time.monotonic() - self._last_hosts > _PLAIN_HOSTS_SECONDS or step == self._total:
                self._last_hosts = time.monotonic()
                for line in host_lines(self._hosts()):
                    self.note(line)

    def _line(self, step: int, metrics: Mapping[str, float]) -> str:
        # The median: a step that compiles takes a hundred times as long as the next one.
        per_step = statistics.median(b - a for a, b in pairwise(self._ended))
        numbers = [f"{name} {value}" for name, value in self._numbers(metrics).items()]
        parts = [f"{self._phase} {step}/{self._total}", *numbers, self._shares()]
        if servers := self._servers():
            parts.append(f"servers {sum(server.up for server in servers)}/{len(servers)} up")
        preprocessors = self._preprocessors()
        if (up := sum(place.up for place in preprocessors)) < len(preprocessors):
            parts.append(f"preprocessors {up}/{len(preprocessors)} up")
        parts.append(f"{per_step:.2f} s/step, eta {per_step * (self._total - step):.0f} s")
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


class _ServerTable:
    """A row for each rollout server, as it is whenever the terminal is drawn; nothing where there are none."""

    def __init__(self, servers: Callable[[], Sequence[ServerStatus]]) -> None:
        self._servers = servers

    def __rich__(self) -> Table | Group:
        servers = self._servers()
        if not servers:
            return Group()
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("server", "version", "running", "queued", "tok/s", "restarts"):
            table.add_column(column, justify="left" if column == "server" else "right", no_wrap=True)
        table.add_column()  # the one that gives way where a terminal is narrow
        for server in servers:
            version = "-" if server.version < 0 else str(server.version)
            numbers = [version, str(server.running), str(server.waiting), f"{server.tokens_per_second:,.0f}"]
            state = Text(_state(server), no_wrap=True, overflow="ellipsis")
            table.add_row(server.name, *numbers, str(server.restarts), state)
        return table


def _state(server: ServerStatus) -> str:
    if server.up:
        return "asleep" if server.asleep else "up"
    return "lost: " + "".join(server.reason.strip().splitlines()[:1]) if server.restarts else "starting"
