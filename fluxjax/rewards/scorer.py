"""Scores responses by the rewards of each source. A call that raises, hangs or returns nonsense can't end a run."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import inspect
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigError, said
from ..base.scored import Completion, Prompt, Response, Reward
from ..config import RewardKindConfig, RewardsConfig, SourceConfig
from ..config.data import JUDGED, term_weights
from ..config.schedules import RunSchedule
from .named import SHAPES, Failing, FoundReward, RewardFailure, as_reward, find, is_reward
from .rules import UNREADABLE

if TYPE_CHECKING:
    from ..base.call_slots import Slots
    from .calls import Caller, UsersLoop

log = logging.getLogger("fluxjax.rewards")

_KEPT = 65_536  # the number of prompts for which the scorer remembers progress; far fewer are in flight
_LOOKED_AT = 500  # answers of a source that are read before a run begins
_CLOSING_SECONDS = 5.0  # seconds that a reward's `close` may take
_HERE = ("math", "format", "code", "judge")  # kinds of rewards that this process always calls
_LOGGED = 5  # failures of one reward that are logged one by one
_WINDOW = 1000  # last responses over which the share of failures is computed
_REASONS = 32  # reasons that are counted one by one; further reasons are counted together
_LENGTH = 200  # characters after which a reason is cut off


@dataclasses.dataclass(eq=False)
class GuardedReward:
    """One reward of one source. A failure is scored 0 with a reason, counted, and logged a few times. `note(source,
    text)` is called for each failure, `give_up(line)` whenever too many calls failed."""

    source: str
    name: str
    reward: Any  # None: the reward is built only in its processes
    caller: Caller | None  # None: a built-in rule, which is called directly
    max_failed: float
    note: Callable[[str, str], None]
    give_up: Callable[[str], object]
    # The number of failures by `Failing`; `Scorer.metrics` reads and clears the counts.
    since: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    _reasons: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    _recent: collections.deque[bool] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=_WINDOW))

    async def score(self, completion: Completion) -> Reward:
        """Returns the reward of one completion; for a failure, the value 0 with the reason."""
        begin = time.monotonic()
        try:
            if self.caller is None:
                reward = self.reward(completion.prompt, completion.text)
            else:
                reward = as_reward(await self.caller.answer(completion))
            self._recent.append(False)
        except Exception as error:  # even reading a user's object may raise, and must not end the run
            failure = error if isinstance(error, RewardFailure) else RewardFailure(Failing.INVALID, said(error))
            self._failed(completion.prompt.id, failure)
            reward = Reward(0.0, False, failure.reason)
        if self.caller is None or reward.seconds:
            return reward
        return dataclasses.replace(reward, seconds=time.monotonic() - begin)

    def unreadable(self, prompt: Prompt) -> str:
        """Returns the reason why the reward can't grade the prompt's answer; empty if no check finds a reason."""
        rule = UNREADABLE.get(self.reward) if inspect.isfunction(self.reward) else None
        tells: Any = rule or getattr(self.reward, "unreadable", None)
        return str(tells(prompt)) if callable(tells) else ""

    def _failed(self, id: str, failure: RewardFailure) -> None:
        self._recent.append(True)
        reason = failure.reason if len(failure.reason) <= _LENGTH else f"{failure.reason[:_LENGTH]}..."
        if reason not in self._reasons and len(self._reasons) >= _REASONS:
            reason = "other reasons"
        self._reasons[reason] += 1
        self.since[failure.failing.value] += 1
        if (count := self._reasons.total()) <= _LOGGED:
            more = "; more failures of this source are not logged" if count == _LOGGED else ""
            log.warning("reward of %s for prompt %s: %s; scored 0%s", self.source, id, failure.reason, more)
        self.note(self.source, f"{self.name}: {reason}")
        scored, failed = len(self._recent), sum(self._recent)
        if scored >= JUDGED and failed > self.max_failed * scored:
            self._recent.clear()  # `give_up` is called again after `JUDGED` further responses at the earliest
            self.give_up(
                f"reward {self.name!r} of data.sources.{self.source} failed on {failed / scored:.0%} of the last "
                f"{scored} responses, more than rewards.max_failed = {self.max_failed:g}; most often: "
                f"{self._reasons.most_common(1)[0][0]}"
            )


@dataclasses.dataclass(frozen=True)
class WeightedSum:
    """The rewards of a source by name, and their weights, which may change in a run. A single reward has no weight. The
    first reward says whether a response is correct. A reward that failed adds nothing to the sum."""

    rewards: Mapping[str, GuardedReward]
    weights: Mapping[str, RunSchedule]

    @property
    def changes(self) -> bool:
        """Says whether the sum depends on the run's progress."""
        return any(low != high for low, high in (weight.bounds for weight in self.weights.values()))

    @property
    def takes_time(self) -> bool:
        """Says whether any of the rewards is not a built-in rule."""
        return any(reward.caller is not None for reward in self.rewards.values())

    async def score(self, completion: Completion, progress: float) -> Reward:
        """Returns the sum of a completion's rewards, weighted as at `progress` (in [0, 1]), and unweighted `parts`."""
        if not self.weights:
            (reward,) = self.rewards.values()
            return await reward.score(completion)
        found = await asyncio.gather(*(reward.score(completion) for reward in self.rewards.values()))
        named = dict(zip(self.rewards, found, strict=True))
        parts = {name: reward.value for name, reward in named.items()}
        parts |= {f"{name}/{part}": value for name, reward in named.items() for part, value in reward.parts.items()}
        return Reward(
            sum(self.weights[name].value(progress) * reward.value for name, reward in named.items()),
            found[0].correct,
            "; ".join(f"{name}: {reward.reason}" for name, reward in named.items() if reward.reason),
            parts,
            max(reward.seconds for reward in found),
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the rewards that have a state, by name."""
        states = {name: getattr(reward.reward, "state_dict", None) for name, reward in self.rewards.items()}
        return {name: state() for name, state in states.items() if callable(state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, reward in self.rewards.items():
            if name in state and callable(load := getattr(reward.reward, "load_state_dict", None)):
                load(state[name])


class Scorer:
    """Scores each response by its source's rewards; `decode` turns token ids into the text. Built-in rules run
    immediately, all other rewards in slots of their kind (`calls.py`). If a reward raises, takes too long, or returns
    neither a `Reward` nor a finite number, the reward counts as 0, and the reason is kept."""

    def __init__(
        self,
        sources: Mapping[str, SourceConfig],
        decode: Callable[[Sequence[int]], str],
        settings: RewardsConfig | None = None,
        *,
        given: Mapping[str, Any] | None = None,
        progress: Callable[[], float] = lambda: 0.0,
        note: Callable[[str, str], None] = lambda source, text: None,
        give_up: Callable[[str], object] = log.error,
    ) -> None:
        """`given` has objects that replace configured rewards, by source; for a source with several rewards, a mapping
        of their names to objects. `progress` returns the run's progress, in [0, 1]. `note(source, text)` is called for
        each failure, `give_up(line)` for a reward that fails too often. Raises `ConfigError`."""
        self.decode = decode
        self._settings, self._note, self._give_up = settings or RewardsConfig(), note, give_up
        self._progress = progress
        self._users_loop: UsersLoop | None = None
        self._rewards: list[GuardedReward] = []
        self._slots: dict[str, Slots] = {}  # by kind
        self._counting: list[Callable[[], Mapping[str, float]]] = []  # functions that return rewards' counts
        # The seconds that each response waited for rewards other than rules, since the last `metrics`.
        self._seconds: list[float] = []
        self._open = 0  # responses that wait for rewards other than rules
        self._begun: dict[int, float] = {}  # by draw: the progress when the prompt's first response was scored
        given = dict(given or {})
        if unknown := given.keys() - sources.keys():
            raise ConfigError(f"rewards: there is no source {', '.join(sorted(unknown))}, only {', '.join(sources)}")
        self._training = {name: self._summed(name, source, given.get(name)) for name, source in sources.items()}
        self._held_out: dict[str, WeightedSum] = {}  # by source, if it has an `eval_reward`
        for name, source in sources.items():
            if source.eval_reward:
                reward = self._guarded(name, source.eval_reward, f"data.sources.{name}.eval_reward")
                self._held_out[name] = WeightedSum({"": reward}, {})

    def check_answers(self, texts: Mapping[str, Iterable[str]], held_out: bool = False) -> None:
        """Reads each source's `texts`, a prompt and its answer alternately, and warns of answers, among the first 500,
        that a reward can't grade. Raises `ConfigError` if the share of these answers is above
        `rewards.max_unreadable`."""
        for name, prompts_and_answers in texts.items():
            some = list(itertools.islice(prompts_and_answers, 2 * _LOOKED_AT))
            pairs = [(text, answer) for text, answer in zip(some[::2], some[1::2], strict=True) if answer]
            prompts = [Prompt("", name, text, answer) for text, answer in pairs]  # records without answers are skipped
            rewards = (held_out and self._held_out.get(name)) or self._training[name]
            for reward in rewards.rewards.values():
                found = [f"{prompt.answer[:80]!r} {why}" for prompt in prompts if (why := reward.unreadable(prompt))]
                line = (
                    f"the reward {reward.name!r} of data.sources.{name} can't grade {len(found)} of the first "
                    f"{len(prompts)} {'held-out ' * held_out}answers, such as {', '.join([*dict.fromkeys(found)][:3])}"
                )
                if len(found) > self._settings.max_unreadable * len(prompts):
                    self.close()
                    share = f"a share of more than rewards.max_unreadable = {self._settings.max_unreadable:g}"
                    raise ConfigError(
                        f"{line}: {share}; choose another reward ('math' reads formulas), or mend the answers"
                    )
                if found:
                    log.warning("%s: responses to such prompts score 0", line)

    # --- scoring --------------------------------------------------------------------------------

    async def score(self, prompt: Prompt, response: Response) -> Reward:
        """Returns the reward of one response. Raises `KeyError` for an unknown source, nothing for a reward's failure.
        The run's progress at the prompt's first response, read before any `await`, sets the weights for all."""
        rewards = self._training[prompt.source]
        progress = self._of_prompt(prompt.draw) if rewards.changes else 0.0
        text = self.decode(response.last_turn)
        completion = Completion(prompt, text, response.num_trained, response.finish, response.rewards)
        return await self._measured(rewards, completion, progress)

    async def score_text(self, prompt: Prompt, text: str, episode: tuple[float, ...] = ()) -> Reward:
        """Returns the reward of an answer to a held-out prompt. `episode` has the rewards of its environment."""
        rewards = self._held_out.get(prompt.source) or self._training[prompt.source]
        return await self._measured(rewards, Completion(prompt, text, rewards=episode), self._progress())

    async def _measured(self, rewards: WeightedSum, completion: Completion, progress: float) -> Reward:
        if not rewards.takes_time:
            return await rewards.score(completion, progress)
        begin = time.monotonic()
        self._open += 1
        try:
            reward = await rewards.score(completion, progress)
            self._seconds.append(time.monotonic() - begin)
            return reward
        finally:
            self._open -= 1

    def _of_prompt(self, draw: int) -> float:
        """Returns the progress that sets the weights for all samples of a prompt, since samples are compared."""
        if draw not in self._begun:
            self._begun[draw] = self._progress()
            if len(self._begun) > _KEPT:
                del self._begun[next(iter(self._begun))]
        return self._begun[draw]

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of rewards since the last call, by their names in `metrics.jsonl` (docs/rewards.md, "What
        is measured"): seconds, counts, and shares in [0, 1]; empty if only rules were called, and no rule failed."""
        seconds, self._seconds = sorted(self._seconds), []
        usages = {kind: slots.usage() for kind, slots in self._slots.items()}
        used = {kind: usage for kind, usage in usages.items() if usage[1]}
        ways: collections.Counter[str] = collections.Counter()
        for reward in self._rewards:
            ways.update(reward.since)
            reward.since.clear()
        counted: collections.Counter[str] = collections.Counter()
        for take_counts in self._counting:
            counted.update(take_counts())  # type: ignore[arg-type]  # floats are added, too
        if not used and not ways:
            return {}
        metrics = {"rewards/scored": float(len(seconds)), "rewards/open": float(self._open)}
        if used:
            metrics["rewards/waiting"] = float(max(waited for waited, _ in used.values()))
        if seconds:
            metrics["rewards/seconds_median"] = statistics.median(seconds)
            metrics["rewards/seconds_p95"] = seconds[min(int(0.95 * len(seconds)), len(seconds) - 1)]
            metrics["rewards/seconds_max"] = seconds[-1]
        metrics |= {f"rewards/busy/{kind}": busy for kind, (_, busy) in used.items()}
        metrics |= {f"rewards/{name}": count for name, count in counted.items()}
        metrics["rewards/failed"] = float(ways.total())
        return metrics | {f"rewards/failed/{way}": float(count) for way, count in sorted(ways.items())}

    # --- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns JSON: the states of rewards, and the progress that sets each prompt's weights."""
        return {
            "begun": [[draw, progress] for draw, progress in self._begun.items()],
            "training": {name: rewards.state_dict() for name, rewards in self._training.items()},
            "held_out": {name: rewards.state_dict() for name, rewards in self._held_out.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`. Checkpoints of earlier releases have an empty state."""
        self._begun = dict(state.get("begun", []))
        for part, sums in (("training", self._training), ("held_out", self._held_out)):
            for name, rewards in sums.items():
                rewards.load_state_dict(state.get(part, {}).get(name, {}))

    def close(self) -> None:
        """Ends processes and the loop of users' coroutines; calls each reward's `close`, for a few seconds at most."""
        for reward in self._rewards:
            if reward.caller is not None:
                reward.caller.close()
            if callable(close := getattr(reward.reward, "close", None)):
                from .calls import in_daemon_thread

                try:
                    in_daemon_thread(close).result(_CLOSING_SECONDS)
                except Exception as error:  # whatever a user's `close` raises, or TimeoutError
                    log.warning("closing reward %s: %s: %s", reward.name, type(error).__name__, error)
        if self._users_loop is not None:
            self._users_loop.close()

    # --- building -------------------------------------------------------------------------------

    def _summed(self, name: str, source: SourceConfig, given: Any) -> WeightedSum:
        field = f"data.sources.{name}"
        if not source.rewards:
            return WeightedSum({"": self._guarded(name, source.reward, f"{field}.reward", given=given)}, {})
        given = dict(given) if isinstance(given, Mapping) else {"": given} if given is not None else {}
        if unknown := given.keys() - source.rewards.keys():
            raise ConfigError(
                f"rewards: source {name} has the rewards {', '.join(source.rewards)}; give a dictionary with some of "
                f"these names, not {', '.join(map(repr, sorted(unknown)))}"
            )
        rewards = {}
        for term, settings in source.rewards.items():
            where = f"{field}.rewards.{term}.reward"
            arguments, instead = settings.arguments, given.get(term)
            rewards[term] = self._guarded(name, settings.reward or term, where, arguments, instead)
        return WeightedSum(rewards, term_weights(source.rewards, f"{field}.rewards"))

    def _guarded(
        self, source: str, name: str, field: str, arguments: Mapping[str, Any] | None = None, given: Any = None
    ) -> GuardedReward:
        """Returns the reward of this name and arguments, or the object `given` in its place. Raises `ConfigError`."""
        if given is None:
            found = find(name, field, arguments)
        elif is_reward(given) and not inspect.isclass(given):
            found = FoundReward(getattr(given, "__qualname__", type(given).__qualname__), field, given, {})
        else:
            raise ConfigError(f"rewards: the reward for source {source} is {given!r}; it must be {SHAPES}")
        reward, caller = self._called(found, given is not None)
        guards = self._settings.max_failed, self._note, self._give_up
        self._rewards.append(GuardedReward(source, found.name, reward, caller, *guards))
        return self._rewards[-1]

    def _called(self, found: FoundReward, is_object: bool) -> tuple[Any, Caller | None]:
        """Returns a reward and its caller: None for a built-in rule. Processes build and call a user's reward that has
        an import path, unless it was given as an object, is asynchronous, keeps state or has a kind of `_HERE`. This
        process calls the remaining rewards."""
        if inspect.isfunction(found.value) and found.value in UNREADABLE and not found.arguments:
            return found.value, None
        from ..base.call_slots import Slots
        from .calls import Callee, LocalCaller, ProcessCaller, UsersLoop

        def bounds_of(kind: str) -> tuple[RewardKindConfig, Slots]:
            bounds = self._settings.kind(kind)
            return bounds, self._slots.setdefault(kind, Slots(bounds.concurrency))

        callee = Callee.of(found.value)
        stays = is_object or callee.asynchronous or ":" not in found.name or hasattr(found.value, "state_dict")
        stays = stays or found.name.startswith("__main__:")  # no other process can import it
        if not stays and callee.kind not in _HERE:
            return None, ProcessCaller(found, *bounds_of(callee.kind))
        reward = found.build()
        bounds, slots = bounds_of(Callee.of(reward).kind)
        if callable(call_within := getattr(reward, "call_within", None)):  # the reward ends a call with its own reason
            call_within(bounds.seconds)
        if (take_counts := getattr(reward, "take_counts", None)) is not None:
            self._counting.append(take_counts)
        self._users_loop = self._users_loop or UsersLoop()
        return reward, LocalCaller(reward, bounds.seconds, self._users_loop, slots)
