"""Rewards that can't hurt their run: called in a slot of their kind; a failure is scored 0, with a reason."""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ..base.errors import said
from ..base.scored import Completion, Prompt, Reward
from ..config import RewardKindConfig, RewardsConfig
from .answers import Failing, RewardFailure, as_reward
from .call_slots import CallSlots
from .callers import Batches, Caller, LocalCaller, answered
from .failures import Failures
from .named import Callee, FoundReward
from .rules import UNREADABLE
from .users_loop import UsersLoop

BATCH = 64  # responses that a batched reward gets at once, at most
BATCH_WAIT = 0.05  # seconds that a response waits for others of its batch
_HERE = ("math", "format", "code", "judge")  # kinds of built-in rewards, which have processes of their own


@dataclasses.dataclass(frozen=True)
class GuardedReward:
    """One reward of one source. `answer` is how it is called; it raises RewardFailure."""

    name: str
    reward: Any  # None: it is made in its processes only
    answer: Callable[[Completion], Awaitable[Any]]
    failures: Failures
    caller: Caller | None = None

    async def score(self, completion: Completion) -> Reward:
        """Returns the reward of one completion; what it fails on has the value 0 and the reason."""
        begin = time.monotonic()
        try:
            reward = as_reward(await self.answer(completion))
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


@runtime_checkable
class PacesItself(Protocol):
    """A reward that ends within its time by itself, with a reason of its own."""

    def call_within(self, seconds: float) -> None:
        """Takes in how many seconds a call may take."""
        ...


@runtime_checkable
class Counts(Protocol):
    """A reward that counts what it does."""

    def take_counts(self) -> Mapping[str, float]:
        """Returns counts of what happened since the last call, by the names of metrics behind `rewards/`."""
        ...


class RewardGuard:
    """Makes guarded rewards; all of one kind share its slots."""

    def __init__(self, settings: RewardsConfig, loop: UsersLoop) -> None:
        self._settings, self._loop = settings, loop
        self.slots: dict[str, CallSlots] = {}
        self.counting: list[Callable[[], Mapping[str, float]]] = []  # what rewards count, for `Measures`

    def of_found(self, found: FoundReward, failures: Failures) -> GuardedReward:
        """Guards a reward that has a name: in processes, unless its kind is a built-in one or a part of it
        has to be here."""
        if inspect.isfunction(found.value) and found.value in UNREADABLE and not found.arguments:
            return GuardedReward(found.name, found.value, _at_once(found.value), failures)
        callee = Callee.of(found.value)
        kind, bounds = self._kind(found.value, callee)
        stays = callee.asynchronous or ":" not in found.name or hasattr(found.value, "state_dict")
        stays = stays or found.name.startswith("__main__:")  # no other process can import it
        if stays or kind in _HERE:
            return self.of_object(found.name, found.build(), failures)
        from .process_caller import ProcessCaller

        return self._guarded(found.name, None, callee.batched, kind, ProcessCaller(found, bounds), failures)

    def of_object(self, name: str, reward: Any, failures: Failures) -> GuardedReward:
        """Guards a reward as it is, in this process."""
        callee = Callee.of(reward)
        kind, bounds = self._kind(reward, callee)
        if isinstance(reward, PacesItself):
            reward.call_within(bounds.seconds)
        if isinstance(reward, Counts):
            self.counting.append(reward.take_counts)
        caller = LocalCaller(reward, bounds.seconds, self._loop)
        return self._guarded(name, reward, callee.batched, kind, caller, failures)

    def _kind(self, reward: Any, callee: Callee) -> tuple[str, RewardKindConfig]:
        kind = getattr(reward, "kind", None)
        if not isinstance(kind, str):
            kind = "batch" if callee.batched else "function"
        return kind, self._settings.kind(kind)

    def _guarded(
        self, name: str, reward: Any, batched: bool, kind: str, caller: Caller, failures: Failures
    ) -> GuardedReward:
        if kind not in self.slots:
            self.slots[kind] = CallSlots(self._settings.kind(kind).concurrency)
        slots = self.slots[kind]

        async def in_a_slot(completions: Sequence[Completion]) -> list[Any]:
            async with slots.slot():
                return await caller.call(completions)

        async def alone(completion: Completion) -> Any:
            return answered((await in_a_slot([completion]))[0])

        batches = Batches(in_a_slot, BATCH, BATCH_WAIT)

        async def in_a_batch(completion: Completion) -> Any:
            return answered(await batches.call(completion))

        return GuardedReward(name, reward, in_a_batch if batched else alone, failures, caller)


def _at_once(rule: Callable[..., Any]) -> Callable[[Completion], Awaitable[Any]]:
    async def answer(completion: Completion) -> Any:
        try:
            return rule(completion.prompt, completion.text)
        except Exception as error:
            raise RewardFailure(Failing.RAISED, f"{type(error).__name__}: {error}") from error

    return answer
