"""Rewards that can't hurt their run: called in a slot of their kind; a failure is scored 0, with a reason."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..base.errors import ConfigError, said
from ..base.scored import Completion, Prompt, Reward
from ..config import RewardKindConfig, RewardsConfig
from .answers import Failing, Failures, RewardFailure, as_reward
from .calls import Caller, LocalCaller, Slots, UsersLoop, in_daemon_thread
from .named import SHAPES, Callee, FoundReward, find, is_reward
from .rules import UNREADABLE

log = logging.getLogger("fluxjax.rewards")

_CLOSING_SECONDS = 5.0  # that the `close` of a reward may take
_HERE = ("math", "format", "code", "judge")  # kinds of built-in rewards, which have processes of their own


@dataclasses.dataclass(frozen=True)
class GuardedReward:
    """One reward of one source."""

    name: str
    reward: Any  # None: it is made in its processes only
    failures: Failures
    caller: Caller | None = None  # None: a built-in rule, which is called at once

    async def score(self, completion: Completion) -> Reward:
        """Returns the reward of one completion; what it fails on has the value 0 and the reason."""
        begin = time.monotonic()
        try:
            if self.caller is None:
                answer = self.reward(completion.prompt, completion.text)
            else:
                answer = await self.caller.answer(completion)
            reward = as_reward(answer)
            self.failures.passed()
        except Exception as error:  # whatever a user's object does when it is looked at must not end the run
            failure = error if isinstance(error, RewardFailure) else RewardFailure(Failing.INVALID, said(error))
            self.failures.failed(completion.prompt.id, failure)
            reward = Reward(0.0, False, failure.reason)
        if self.caller is None or reward.seconds:
            return reward
        return dataclasses.replace(reward, seconds=time.monotonic() - begin)

    def unreadable(self, prompt: Prompt) -> str:
        """Says why the reward can't grade the prompt's answer; empty if it can, or can't tell."""
        rule = UNREADABLE.get(self.reward) if inspect.isfunction(self.reward) else None
        tells: Any = rule or getattr(self.reward, "unreadable", None)
        return str(tells(prompt)) if callable(tells) else ""


class RewardGuard:
    """Makes guarded rewards, those of one kind with the same slots; and measures all that take time, since the last
    step. Built-in rules take none."""

    def __init__(
        self, settings: RewardsConfig, note: Callable[[str, str], None], give_up: Callable[[str], object]
    ) -> None:
        self._settings, self._note, self._give_up = settings, note, give_up
        self._users_loop: UsersLoop | None = None
        self._rewards: list[GuardedReward] = []
        self._slots: dict[str, Slots] = {}  # by kind
        self._counting: list[Callable[[], Mapping[str, float]]] = []  # return what rewards count themselves
        self._seconds: list[float] = []  # that the responses scored since the last step waited for their reward
        self._open = 0  # responses that are still to be scored

    def guarded(
        self, source: str, name: str, field: str, arguments: Mapping[str, Any] | None = None, given: Any = None
    ) -> GuardedReward:
        """Returns the reward of this name and these arguments, or the object that is `given` in its place. It is called
        in processes, unless its kind is a built-in one or a part of it has to be here. Raises `ConfigError`."""
        if given is None:
            found = find(name, field, arguments)
        elif is_reward(given) and not inspect.isclass(given):
            found = FoundReward(getattr(given, "__qualname__", type(given).__qualname__), field, given, {})
        else:
            raise ConfigError(f"rewards: what is given for source {source} is {given!r}; it must be {SHAPES}")
        failures = Failures(source, found.name, self._settings.max_failed, self._note, self._give_up)
        reward = self._guarded(found, failures, given is not None)
        self._rewards.append(reward)
        return reward

    def _guarded(self, found: FoundReward, failures: Failures, is_object: bool) -> GuardedReward:
        if inspect.isfunction(found.value) and found.value in UNREADABLE and not found.arguments:
            return GuardedReward(found.name, found.value, failures)
        callee = Callee.of(found.value)
        stays = is_object or callee.asynchronous or ":" not in found.name or hasattr(found.value, "state_dict")
        stays = stays or found.name.startswith("__main__:")  # no other process can import it
        if not stays and callee.kind not in _HERE:
            from .process_caller import ProcessCaller

            bounds, slots = self._bounds(callee.kind)
            return GuardedReward(found.name, None, failures, ProcessCaller(found, bounds, slots))
        reward = found.build()
        bounds, slots = self._bounds(Callee.of(reward).kind)
        if callable(call_within := getattr(reward, "call_within", None)):  # it ends by itself, with its own reason
            call_within(bounds.seconds)
        if (take_counts := getattr(reward, "take_counts", None)) is not None:
            self._counting.append(take_counts)
        self._users_loop = self._users_loop or UsersLoop()
        caller = LocalCaller(reward, bounds.seconds, self._users_loop, slots)
        return GuardedReward(found.name, reward, failures, caller)

    def _bounds(self, kind: str) -> tuple[RewardKindConfig, Slots]:
        bounds = self._settings.kind(kind)
        return bounds, self._slots.setdefault(kind, Slots(bounds.concurrency))

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measures its body, which scores a response."""
        begin = time.monotonic()
        self._open += 1
        try:
            yield
            self._seconds.append(time.monotonic() - begin)
        finally:
            self._open -= 1

    def metrics(self) -> dict[str, float]:
        """Returns metrics by name, in seconds, counts and shares in [0, 1] (docs/rewards.md, "What is measured"), since
        the last call; none where only rules were at work."""
        seconds, self._seconds = sorted(self._seconds), []
        usages = {kind: slots.usage() for kind, slots in self._slots.items()}
        used = {kind: usage for kind, usage in usages.items() if usage[1]}
        ways: collections.Counter[str] = collections.Counter()
        for reward in self._rewards:
            ways.update(reward.failures.since)
            reward.failures.since.clear()
        counted: collections.defaultdict[str, float] = collections.defaultdict(float)
        for take_counts in self._counting:
            for name, count in take_counts().items():
                counted[name] += count
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

    def close(self) -> None:
        """Ends processes and threads; calls `close` of the rewards that have it, and waits a moment for that."""
        for reward in self._rewards:
            if reward.caller is not None:
                reward.caller.close()
            if callable(close := getattr(reward.reward, "close", None)):
                try:
                    in_daemon_thread(close).result(_CLOSING_SECONDS)
                except Exception as error:  # whatever a user's `close` raises, or TimeoutError
                    log.warning("closing reward %s: %s: %s", reward.name, type(error).__name__, error)
        if self._users_loop is not None:
            self._users_loop.close()
