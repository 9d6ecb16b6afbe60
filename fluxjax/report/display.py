"""The live view of a run. A terminal shows a panel, with tables of the processes, servers and preprocessors. Other
outputs get a line of a step every few seconds, with counts of servers and, while some are down, of preprocessors, and
a line for each process every minute."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..base.statuses import HostStatus, PreprocessorStatus, slowest
from ..base.timeline import under_way, working_time

if TYPE_CHECKING:
    from rollout.fleet_server import ServerStatus

_POLICY = {  # metrics of scheduling, and what they are called where there is little room
    "barriers": "barriers",
    "long_rounds": "long rounds",
    "deferred": "deferred",
    "held": "held",
    "dropped": "dropped",
    "too_old": "too old",
    "lent": "lent engines",
}
_SPARKS = "▁▂▃▄▅▆▇█"
_PLAIN_SECONDS = 5.0
_PLAIN_HOSTS_SECONDS = 60.0
_NAMES = ("process", "host", "server", "preprocessor")  # columns with texts on the left
MOST = 16  # at most this many processes are shown, the slowest ones
_BUSY = "rewards/busy/"
_NOTABLE = 0.5  # the least share of busy slots at which a kind of reward is shown


class Display:
    """Shows the progress of a run while used as a context manager. `note` prints a line that stays."""

    def __init__(self, total_steps: int, *, console: Console | None = None) -> None:
        self._servers: Callable[[], Sequence[ServerStatus]] = tuple
        self._hosts: Callable[[], Sequence[HostStatus]] = tuple
        self._preprocessors: Callable[[], Sequence[PreprocessorStatus]] = tuple
        self._console = console or Console(file=sys.stdout, soft_wrap=True)
        self._total = total_steps
        self._rewards: deque[float] = deque(maxlen=60)
        self._last_line = 0.0
        self._last_hosts = 0.0  # time when lines of processes were last printed
        self._seconds: dict[str, float] = {}
        self._eval: dict[str, float] = {}
        first, last = (
            TextColumn("[bold]{task.description}"),
            TextColumn("{task.fields[left]} [dim]{task.fields[words]}"),
        )
        columns = first, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), last
        self._progress = Progress(*columns, console=self._console)
        self._task = self._progress.add_task("starting", total=None, left="", words="")
        self._phase = "starting"
        self._ended: deque[float] = deque(maxlen=30)  # times by `working_time` at which the last steps ended
        self.stopping = False  # whether the run stops after the present step
        self._step_tables: list[Table] = []  # the last step's table; empty before the first step
        self._live = Live(get_renderable=self._drawn, console=self._console) if self._console.is_terminal else None

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        self._left, self._noted = threading.Event(), time.monotonic()
        threading.Thread(target=self._break_silence, args=(self._left,), name="display", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        if self._live:
            self._live.transient = self._phase == "starting"  # removes the panel of a run that did not begin
            self._live.stop()

    def _break_silence(self, left: threading.Event) -> None:
        while not left.wait(0.5):
            words = f"stopping, waits for: {under_way() or 'this step'}" if self.stopping else under_way()
            self._progress.update(self._task, words=escape(words))
            if words and not self._live and time.monotonic() > self._noted + (3 if self.stopping else 10):
                self.note(f"{self._phase} {self._progress.tasks[0].completed:.0f}/{self._total} | {words}")

    def note(self, text: str) -> None:
        self._noted = time.monotonic()
        self._console.print(Text(text), highlight=False)  # rich must not read `[word]` as a style

    def show(
        self,
        servers: Callable[[], Sequence[ServerStatus]] = tuple,
        hosts: Callable[[], Sequence[HostStatus]] = tuple,
        preprocessors: Callable[[], Sequence[PreprocessorStatus]] = tuple,
    ) -> None:
        """Shows the statuses that these functions return. The functions must be thread-safe."""
        self._servers, self._hosts, self._preprocessors = servers, hosts, preprocessors

    def _drawn(self) -> Group:
        """Returns the panel, with current tables of statuses and the last step's. A thread of `Live` calls it often."""
        tables = host_table(self._hosts()), preprocessor_table(self._preprocessors()), server_table(self._servers())
        return Group(self._progress, *self._step_tables, *chain.from_iterable(tables))

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
        """Shows that a step is done, with its `metrics` (as in `metrics.jsonl`) and its `seconds` by stage."""
        self._ended.append(working_time())
        self._rewards.append(metrics.get("reward/mean", -metrics.get("loss", 0.0)))
        self._seconds = {name: value + 0.9 * self._seconds.get(name, 0.0) for name, value in seconds.items()}
        per_step = statistics.median(b - a for a, b in pairwise(self._ended))  # the median, because some steps evaluate
        left = f"{per_step:.2f} s/step, eta {per_step * (self._total - step):.0f} s"
        self._progress.update(self._task, completed=step, left=left)
        if self._live:
            self._step_tables = [self._step_table(metrics)]
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
        if words := policy_words(metrics):
            shown["policy"] = words
        if words := data_words(metrics):
            shown["data"] = words
        if words := reward_words(metrics):
            shown["rewards"] = words
        return shown

    def _shares(self) -> str:
        total = sum(self._seconds.values())
        return " ".join(f"{name} {value / total:.0%}" for name, value in self._seconds.items() if total)

    def _step_table(self, metrics: Mapping[str, float]) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, text in self._numbers(metrics).items():
            table.add_row(f"[dim]{name}", text)
        if self._seconds:
            table.add_row("[dim]time", self._shares())
        low, high = min(self._rewards), max(self._rewards)
        scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
        table.add_row("[dim]trend", "".join(_SPARKS[int((value - low) * scale)] for value in self._rewards))
        return table


def policy_words(metrics: Mapping[str, float]) -> str:
    """Says how far generation runs ahead, and how many prompts and groups were put off or given up, if any."""
    ratio, values = metrics.get("scheduling/async_ratio"), {k: metrics.get(f"scheduling/{k}", 0.0) for k in _POLICY}
    words = [] if ratio is None else [f"async ratio {ratio:.2f}"]
    return ", ".join([*words, *(f"{_POLICY[name]} {value:.0f}" for name, value in values.items() if value)])


def data_words(metrics: Mapping[str, float]) -> str:
    """Says how long a step waited for pixels, how fast media were decoded, and how much was fetched, if any."""
    waited, frames = metrics.get("data/waited", 0.0), metrics.get("data/decoded_frames_per_second", 0.0)
    size = metrics.get("data/fetched_mb", 0.0)
    words = [f"waits {waited:.2f} s"] if size or waited else []
    words += [f"decodes {frames:,.0f} frames/s"] if frames >= 0.5 else []
    words += [f"fetches {size:,.0f} MB" if size >= 10 else f"fetches {size:.1f} MB"] if size else []
    return ", ".join(words)


def reward_words(metrics: Mapping[str, float]) -> str:
    """Says how long rewards took, how many waited, which kinds were busy, how many failed. Empty for rules alone."""
    words = []
    if "rewards/seconds_median" in metrics:
        words.append(f"{metrics['rewards/seconds_median']:.2g} s, 95 % {metrics['rewards/seconds_p95']:.2g} s")
    if waiting := metrics.get("rewards/waiting", 0.0):
        words.append(f"{waiting:.0f} waited")
    busy = {name.removeprefix(_BUSY): share for name, share in metrics.items() if name.startswith(_BUSY)}
    words += [f"{kind} {share:.0%} busy" for kind, share in busy.items() if share >= _NOTABLE]
    if failed := metrics.get("rewards/failed", 0.0):
        words.append(f"{failed:.0f} failed")
    return ", ".join(words)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[Table]:
    """Returns a list of one table, or of none without rows. A row has a cell for each column, and one for words."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="left" if column in _NAMES else "right", no_wrap=True)
    table.add_column()  # a narrow terminal cuts this column
    for *cells, words in rows:
        table.add_row(*cells, Text(words, no_wrap=True, overflow="ellipsis"))
    return [table] * bool(table.rows)


def preprocessor_table(preprocessors: Sequence[PreprocessorStatus]) -> list[Table]:
    def row(place: PreprocessorStatus) -> list[str]:
        sizes = _size(place.bytes), _size(place.memory_bytes)
        state = _state_words(place.up, place.lost, place.reason)
        return [place.name, f"{place.queued:,}", f"{place.decoded:,}", *sizes, str(place.lost), state]

    return _table(("preprocessor", "queued", "decoded", "gave", "keeps", "restarts"), map(row, preprocessors))


def _size(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _state_words(up: bool, lost: int, reason: str) -> str:
    if up:
        return "up"
    return "lost: " + "".join(reason.strip().splitlines()[:1]) if lost else "starting"


def server_table(servers: Sequence[ServerStatus]) -> list[Table]:
    def row(server: ServerStatus) -> list[str]:
        version = "-" if server.version < 0 else str(server.version)
        numbers = [str(server.running), str(server.waiting), f"{server.tokens_per_second:,.0f}", str(server.restarts)]
        asleep = server.up and server.asleep
        state = "asleep" if asleep else _state_words(server.up, server.restarts, server.reason)
        return [server.name, version, *numbers, state]

    return _table(("server", "version", "running", "queued", "tok/s", "restarts"), map(row, servers))


def host_lines(hosts: Sequence[HostStatus]) -> list[str]:
    """Returns a line for each of the `MOST` slowest processes, and a line that counts the other processes."""
    lines = []
    for host in _shown(hosts):
        numbers = " | ".join(f"{name} {text}" for name, text in _figures(host).items())
        mark = _mark(host, hosts)
        lines.append(f"process {host.process} ({host.host}) | {numbers}{f' | {mark}' if mark else ''}")
    return lines + _others(hosts)


def host_table(hosts: Sequence[HostStatus]) -> list[Table]:
    rows = [[str(host.process), host.host, *_figures(host).values(), _mark(host, hosts)] for host in _shown(hosts)]
    rows += [["", line, *[""] * 7] for line in _others(hosts)]
    return _table(("process", "host", "devices", "memory", "on device", "prepares", "trains", "waits"), rows)


def _shown(hosts: Sequence[HostStatus]) -> list[HostStatus]:
    chosen = sorted(hosts, key=lambda host: -host.own_seconds)[:MOST]
    return sorted(chosen, key=lambda host: host.process)


def _others(hosts: Sequence[HostStatus]) -> list[str]:
    return [f"and {len(hosts) - MOST} faster ones"] if len(hosts) > MOST else []


def _figures(host: HostStatus) -> dict[str, str]:
    return {
        "devices": str(host.devices),
        "memory": f"{host.memory_bytes / 1e9:.1f} GB",
        "on device": f"{host.device_memory_bytes / 1e9:.1f} GB" if host.device_memory_bytes else "-",
        "prepares": f"{host.prepare_seconds:.2f} s",
        "trains": f"{host.train_seconds:.2f} s",
        "waits": f"{host.wait_seconds:.2f} s",
    }


def _mark(host: HostStatus, hosts: Sequence[HostStatus]) -> str:
    return "slowest" if len(hosts) > 1 and host is slowest(hosts) else ""
