"""The same engine as `fluxjax.simulation.simulated_engine`, one token at a time: what the jumps must be equal to."""

import dataclasses
import itertools

from fluxjax.simulation.hardware import QWEN2_5_7B, Hardware
from sharding.cost import ModelSizes

BEFORE = -1  # the version of what had begun before a sample was submitted


@dataclasses.dataclass(frozen=True)
class Cost(Hardware):
    """Numbers of few binary digits: sums of times are exact, in whatever order they are added up."""

    model: ModelSizes = QWEN2_5_7B
    limit: int = 0  # tokens that the cache holds

    def step_seconds(self, batch: int, degree: int) -> float:
        return (16 + batch) / (1024 * degree)

    def kv_seconds(self, degree: int) -> float:
        return 1 / (65536 * degree)

    def prefill_seconds(self, tokens: int, degree: int) -> float:
        return tokens / (4096 * degree)

    def kv_limit(self, degree: int) -> int:
        return self.limit


@dataclasses.dataclass(eq=False)
class One:
    rid: str
    sample: int
    prompt: int
    total: int
    tokens: int
    versions: list[int] = dataclasses.field(default_factory=list)

    def result(self) -> tuple:
        runs = tuple((version, len(list(some))) for version, some in itertools.groupby(self.versions))
        return (self.rid, self.sample, self.tokens, runs)


class NaiveEngine:
    def __init__(self, limit: int, max_running: int) -> None:
        self.cost, self.limit, self.max_running = Cost(limit=limit), limit, max_running
        self.now, self.version, self.newest, self.slowdown = 0.0, 0, 0, 1.0
        self.running: list[One] = []
        self.waiting: list[One] = []
        self.updates: list[tuple] = []
        self.phase, self.until, self.paused = "idle", 0.0, False
        self.finished: list[tuple] = []
        self.answers: list[list] = []
        self.preemptions = self.decoded = self.prefilled = self.highest = 0
        self.busy = 0.0
        self.submitted: dict[tuple[str, int], One] = {}

    def kv(self) -> int:
        return sum(one.prompt + one.tokens for one in self.running)

    def run(self, events: list[tuple]) -> None:
        """Events are (time, name, arguments), in order of time."""
        events = list(events)
        while events or self.phase not in ("idle", "down"):
            working = self.phase not in ("idle", "down")
            if working and not (events and events[0][0] < self.until):
                self._pass_to(self.until)
                if self.phase == "decode":
                    for one in self.running:
                        one.tokens += 1
                        one.versions.append(self.version)
                        self.decoded += 1
                    self.highest = max(self.highest, self.kv())
                while events and events[0][0] == self.now:
                    self._apply(*events.pop(0)[1:])
                self._step_ends()
            elif working:
                self._pass_to(events[0][0])
                self._apply(*events.pop(0)[1:])
            else:
                self._pass_to(events[0][0])
                while events and events[0][0] == self.now:
                    self._apply(*events.pop(0)[1:])
                self._go()

    def _pass_to(self, time: float) -> None:
        if self.phase in ("decode", "prefill"):
            self.busy += time - self.now
        self.now = time

    def _step_ends(self) -> None:
        if self.phase == "down":
            return
        if self.phase == "update":
            _, version, recompute = self.updates.pop(0)
            self.version = version
            if recompute:
                self.waiting = self.running + self.waiting
                self.running = []
        for one in [one for one in self.running if one.tokens == one.total]:
            self.running.remove(one)
            del self.submitted[one.rid, one.sample]
            self.finished.append((self.now, *one.result()))
        self._go()

    def _go(self) -> None:
        if self.phase == "down":
            return
        self.phase = "idle"
        if self.updates:
            self.phase, self.until = "update", self.now + self.updates[0][0]
            return
        if self.paused:
            return
        while self.kv() + len(self.running) > self.limit:
            self.waiting.insert(0, self.running.pop())
            self.preemptions += 1
        tokens = 0
        while self.waiting and len(self.running) < self.max_running:
            context = self.waiting[0].prompt + self.waiting[0].tokens
            room = max(len(self.running) + 1, self.limit // 100)
            if self.running and self.kv() + context + room > self.limit:
                break
            self.running.append(self.waiting.pop(0))
            tokens += context
        self.prefilled += tokens
        self.highest = max(self.highest, self.kv())
        if tokens:
            self.phase, self.until = "prefill", self.now + self.cost.prefill_seconds(tokens, 1) * self.slowdown
        elif self.running:
            seconds = self.cost.step_seconds(len(self.running), 1) + self.kv() * self.cost.kv_seconds(1)
            self.phase, self.until = "decode", self.now + seconds * self.slowdown

    def _apply(self, name: str, *arguments) -> None:
        getattr(self, f"_{name}")(*arguments)

    def _submit(self, rid: str, sample: int, prompt: int, total: int, begun: int) -> None:
        one = One(rid, sample, prompt, total, begun, [BEFORE] * begun)
        self.submitted[rid, sample] = one
        self.waiting.append(one)

    def _abort(self, name: str) -> None:
        rid, _, sample = name.partition("/")
        found = [one for one in self.submitted.values() if one.rid == rid and sample in ("", str(one.sample))]
        self.answers.append([one.result() for one in found])
        for one in found:
            del self.submitted[one.rid, one.sample]
            (self.running if one in self.running else self.waiting).remove(one)

    def _pause(self) -> None:
        self.paused = True

    def _resume(self) -> None:
        self.paused = False

    def _slow_down(self, factor: float) -> None:
        self.slowdown = factor

    def _update(self, seconds: float, version: int, recompute: bool) -> None:
        self.newest = version
        if self.phase != "down":
            self.updates.append((seconds, version, recompute))

    def _crash(self) -> None:
        self.answers.append(sorted({one.rid for one in self.submitted.values()}))
        self.submitted.clear()
        self.running, self.waiting, self.updates = [], [], []
        self.phase, self.slowdown = "down", 1.0

    def _recover(self) -> None:
        if self.phase == "down":
            self.phase, self.version = "idle", self.newest
