"""The books of the coordinator: where every prompt and every response of the run is.

A prompt is drawn, waits, is generated, has its responses scored, and is then either trained on exactly once or
skipped with a reason; nothing else can happen to it. Facts come in from the runtime and may be late, repeated or
about an attempt that was given up: those are counted in `ignored` and change nothing. What can't be explained
that way is a `CoordinatorError`, which ends the run.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..types import Group, Prompt, Response, Reward, Sample
from .messages import response_id

_ABORTED = "abort"  # the value of `rollout.engine.FinishReason.ABORT`


class CoordinatorError(RuntimeError):
    """The coordinator heard or was about to say something that contradicts its books."""


class Stage(enum.Enum):
    WAITING = "waiting"  # drawn, with no engine yet
    RUNNING = "running"  # responses or their rewards are still to come
    LOST = "lost"  # this attempt can't complete: its engine failed, or a response was aborted
    SCORED = "scored"  # every response is there with its reward
    TRAINING = "training"


@dataclasses.dataclass
class Entry:
    """One prompt on its way. `responses` and `rewards` are those of the current attempt, by sample."""

    prompt: Prompt
    stage: Stage = Stage.WAITING
    n: int = 0
    attempt: int = -1
    failure: str = ""  # why the last attempt was lost
    responses: dict[int, Response] = dataclasses.field(default_factory=dict)
    rewards: dict[int, Reward] = dataclasses.field(default_factory=dict)

    def group(self) -> Group:
        samples = tuple(Sample(self.responses[i], self.rewards[i]) for i in range(self.n))
        return Group(self.prompt, samples)


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A prompt that was not trained on, and why."""

    draw: int
    id: str
    source: str
    reason: str


class Ledger:
    """See the module's docstring. Policies read it; only the `Coordinator` writes."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}  # by draw: prompts neither trained nor skipped yet
        self.unscored: dict[str, Response] = {}  # by rid: finished, `Score` not said yet; in order of arrival
        self.last_draw = -1
        self.drawn = 0  # prompts; always equals trained + skipped + live
        self.trained = 0  # prompts
        self.trained_responses = 0
        self.skipped: list[Skipped] = []
        self.skipped_in_a_row = 0  # prompts that could not be prepared since the last usable one
        self.accepted = 0  # whole responses taken in
        self.epochs: dict[int, int] = {}  # epoch -> prompts of it that were trained on
        self.ignored: collections.Counter[str] = collections.Counter()  # late and repeated facts, by kind
        self._stages: dict[Stage, dict[int, Entry]] = {stage: {} for stage in Stage}
        self._scoring: set[str] = set()  # rids whose reward is awaited

    # --- reading --------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """Prompts drawn and neither trained nor skipped yet."""
        return len(self.entries)

    def at(self, stage: Stage) -> list[Entry]:
        """The prompts at a stage, in draw order."""
        entries = self._stages[stage]
        return [entries[draw] for draw in sorted(entries)]

    def count(self, stage: Stage) -> int:
        return len(self._stages[stage])

    @property
    def awaits_something(self) -> bool:
        """Whether an engine owes a response or the scorer a reward."""
        return bool(self._scoring) or any(len(e.responses) < e.n for e in self._stages[Stage.RUNNING].values())

    # --- facts ----------------------------------------------------------------------------------

    def draw(self, prompts: Sequence[Prompt], skipped: Sequence[tuple[Prompt, str]]) -> None:
        draws = sorted([p.draw for p in prompts] + [p.draw for p, _ in skipped])
        if draws and (draws[0] <= self.last_draw or len(set(draws)) != len(draws)):
            raise CoordinatorError(f"draws {draws} must be new (beyond {self.last_draw}) and all different")
        self.drawn += len(draws)
        self.last_draw = draws[-1] if draws else self.last_draw
        self.skipped_in_a_row = 0 if prompts else self.skipped_in_a_row + len(skipped)
        for prompt in prompts:
            self.entries[prompt.draw] = self._stages[Stage.WAITING][prompt.draw] = Entry(prompt)
        for prompt, reason in skipped:
            self.skipped.append(Skipped(prompt.draw, prompt.id, prompt.source, reason))

    def finish(self, response: Response, newest_version: int) -> None:
        """A response has ended. No token of it can be of a version that was never published."""
        if response.versions and max(response.versions) > newest_version:
            raise CoordinatorError(
                f"response {response.rid} has tokens of version {max(response.versions)}, "
                f"but {newest_version} is the newest one published"
            )
        entry = self._current(response.rid, "response")
        if entry is None:
            return
        if response.rid != response_id(response.draw, entry.attempt, response.sample):
            raise CoordinatorError(
                f"response {response.rid} says that it is sample {response.sample} of draw {response.draw}"
            )
        if response.sample in entry.responses:
            self.ignored["repeated response"] += 1
            return
        if response.finish == _ABORTED:
            self._lose(entry, "a response was aborted")
            return
        self.accepted += 1
        entry.responses[response.sample] = response
        self.unscored[response.rid] = response

    def reward(self, rid: str, reward: Reward) -> None:
        entry = self._current(rid, "reward")
        if entry is None:
            return
        sample = int(rid.rpartition("/")[2])
        if sample in entry.rewards:
            self.ignored["repeated reward"] += 1
            return
        if rid not in self._scoring:
            raise CoordinatorError(f"reward for {rid}, which nobody asked for")
        self._scoring.discard(rid)
        entry.rewards[sample] = reward
        if len(entry.rewards) == entry.n:
            self._move(entry, Stage.SCORED)

    def fail(self, request_ids: Iterable[str], reason: str) -> None:
        """The engine lost these requests. One whose responses are all here has lost nothing."""
        for request in request_ids:
            entry = self._current(f"{request}/0", "failure")
            if entry is not None and len(entry.responses) < entry.n:
                self._lose(entry, reason)
            elif entry is not None:
                self.ignored["late failure"] += 1

    def train_done(self) -> None:
        for entry in self.at(Stage.TRAINING):
            self._remove(entry)
            self.trained += 1
            self.trained_responses += entry.n
            self.epochs[entry.prompt.epoch] = self.epochs.get(entry.prompt.epoch, 0) + 1

    # --- decisions ------------------------------------------------------------------------------

    def generate(self, prompt: Prompt, n: int, attempt: int) -> None:
        entry = self._at(prompt, Stage.WAITING, Stage.LOST)
        if attempt != entry.attempt + 1 or n < 1:
            raise CoordinatorError(f"draw {prompt.draw}: attempt {attempt} of {n} after attempt {entry.attempt}")
        entry.n, entry.attempt = n, attempt
        self._move(entry, Stage.RUNNING)

    def score(self, response: Response) -> None:
        if self.unscored.pop(response.rid, None) is None:
            raise CoordinatorError(f"response {response.rid} is not there to be scored, or was scored before")
        self._scoring.add(response.rid)

    def train(self, groups: Sequence[Group]) -> None:
        for group in groups:
            entry = self._at(group.prompt, Stage.SCORED)
            if group != entry.group():
                raise CoordinatorError(f"draw {entry.prompt.draw}: the group to train on is not the one scored")
            self._move(entry, Stage.TRAINING)

    def skip(self, prompt: Prompt, reason: str) -> None:
        entry = self._at(prompt, Stage.WAITING, Stage.LOST, Stage.SCORED)
        self._remove(entry)
        self.skipped.append(Skipped(prompt.draw, prompt.id, prompt.source, reason))

    # --- inside ---------------------------------------------------------------------------------

    def _at(self, prompt: Prompt, *stages: Stage) -> Entry:
        entry = self.entries.get(prompt.draw)
        if entry is None or entry.stage not in stages:
            where = "not in flight" if entry is None else entry.stage.value
            raise CoordinatorError(f"draw {prompt.draw} is {where}, not {' or '.join(s.value for s in stages)}")
        return entry

    def _current(self, rid: str, kind: str) -> Entry | None:
        """The entry that `rid` belongs to, None if it comes too late to matter; raises for an id never given out."""
        draw, attempt, sample = _parse(rid)
        entry = self.entries.get(draw)
        if entry is None:
            if draw > self.last_draw:
                raise CoordinatorError(f"{kind} {rid}: draw {draw} was never drawn")
            self.ignored[f"late {kind}"] += 1
            return None
        if attempt > entry.attempt or sample >= entry.n:
            raise CoordinatorError(f"{kind} {rid}: no such request was made")
        if attempt < entry.attempt or entry.stage is Stage.LOST:
            self.ignored[f"late {kind}"] += 1
            return None
        return entry

    def _lose(self, entry: Entry, reason: str) -> None:
        for response in entry.responses.values():
            self.unscored.pop(response.rid, None)
            self._scoring.discard(response.rid)
        entry.failure, entry.responses, entry.rewards = reason, {}, {}
        self._move(entry, Stage.LOST)

    def _move(self, entry: Entry, stage: Stage) -> None:
        del self._stages[entry.stage][entry.prompt.draw]
        entry.stage = stage
        self._stages[stage][entry.prompt.draw] = entry

    def _remove(self, entry: Entry) -> None:
        del self._stages[entry.stage][entry.prompt.draw]
        del self.entries[entry.prompt.draw]

    # --- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self.entries:
            raise CoordinatorError(f"{self.live} prompts are in flight: state is taken between steps only")
        return {
            "last_draw": self.last_draw,
            "drawn": self.drawn,
            "trained": self.trained,
            "trained_responses": self.trained_responses,
            "accepted": self.accepted,
            "skipped": [dataclasses.asdict(s) for s in self.skipped],
            "epochs": {str(epoch): count for epoch, count in self.epochs.items()},
            "ignored": dict(self.ignored),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.last_draw = state["last_draw"]
        self.drawn = state["drawn"]
        self.trained = state["trained"]
        self.trained_responses = state["trained_responses"]
        self.accepted = state["accepted"]
        self.skipped = [Skipped(**s) for s in state["skipped"]]
        self.epochs = {int(epoch): count for epoch, count in state["epochs"].items()}
        self.ignored = collections.Counter(state["ignored"])


def _parse(rid: str) -> tuple[int, int, int]:
    request, _, sample = rid.partition("/")
    draw, _, attempt = request.partition(".")
    parts = (draw, attempt, sample)
    if all(p.isascii() and p.isdigit() for p in parts) and response_id(*map(int, parts)) == rid:
        return int(draw), int(attempt), int(sample)
    raise CoordinatorError(f"{rid!r} is no response id of this run")
