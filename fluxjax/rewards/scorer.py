"""Scoring of responses: the rule of each source, protected from rules that raise, hang or answer nonsense."""

import asyncio
import concurrent.futures
import importlib
import inspect
import logging
import math
import numbers
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar, cast

from ..base.types import Prompt, Response, Reward
from ..config import ConfigError, SourceConfig
from . import rules

log = logging.getLogger("fluxjax.rewards")

T = TypeVar("T")
RewardFunction = Callable[[Prompt, str], Reward | float | Awaitable[Reward | float]]

REWARDS: dict[str, Callable[[Prompt, str], Reward]] = {
    "exact": rules.exact,
    "positions": rules.positions,
    "digits": rules.digits,
    "number": rules.number,
}
_LOGGED = 5  # failures of one source that are logged one by one


def find_reward(name: str, field: str = "reward") -> RewardFunction:
    """Returns a reward by its name in `REWARDS`, or a user's function as `module:function`.

    Raises `ConfigError` naming `field` when there is no such name, module or function.
    """
    if ":" not in name:
        if name in REWARDS:
            return REWARDS[name]
        raise ConfigError(f"{field} is {name!r}; it must be one of {', '.join(REWARDS)}, or module:function")
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever importing the user's module raises
        raise ConfigError(
            f"{field} is {name!r}, but importing {module_name!r} raised {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, attribute, None)
    if function is None:
        known = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
        raise ConfigError(f"{field} is {name!r}, but {module_name} has no {attribute!r}; it has {', '.join(known)}")
    if not callable(function):
        raise ConfigError(f"{field} is {name!r}, which is not a function but of type {type(function).__name__}")
    return cast(RewardFunction, function)


class Scorer:
    """Scores each response by its source's rule; `decode` turns token ids into the text.

    The built-in rules run at once, a user's functions in threads of their own, at most `concurrency` at a time, for
    at most `timeout` seconds each.

    A rule that raises, takes too long or returns neither a `Reward` nor a finite number gives a scored 0 with the
    reason. A thread cannot be killed: one that hangs is abandoned (a daemon, so that it cannot hold up the end of
    the process) and its place is given to the next.
    """

    def __init__(
        self,
        sources: Mapping[str, SourceConfig],
        decode: Callable[[Sequence[int]], str],
        *,
        timeout: float = 10.0,
        concurrency: int = 8,
    ) -> None:
        self.decode = decode
        self.timeout = timeout
        self.concurrency = concurrency
        self._rules = {
            name: find_reward(source.reward, f"data.sources.{name}.reward") for name, source in sources.items()
        }
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._failures: dict[str, int] = {}

    async def score(self, prompt: Prompt, response: Response) -> Reward:
        """Returns the reward of one response. Never raises for what a rule does; `KeyError` for an unknown source."""
        return await self.score_text(prompt, self.decode(response.token_ids))

    async def score_text(self, prompt: Prompt, text: str) -> Reward:
        rule = self._rules[prompt.source]
        if rule in REWARDS.values():
            try:
                return self._checked(prompt, rule(prompt, text))
            except Exception as error:
                return self._failed(prompt, f"{type(error).__name__}: {error}")
        async with self._semaphore():
            if inspect.iscoroutinefunction(rule):
                running = asyncio.ensure_future(rule(prompt, text))
            else:
                running = asyncio.wrap_future(_in_daemon_thread(rule, prompt, text))
            try:  # not wait_for: a coroutine that refuses to be cancelled would hold that up for ever
                done, _ = await asyncio.wait({running}, timeout=self.timeout)
            finally:
                running.cancel()
            if not done:
                return self._failed(prompt, f"timed out after {self.timeout:g} s")
            if running.cancelled():
                return self._failed(prompt, "cancelled itself")
            if (error := running.exception()) is not None:
                return self._failed(prompt, f"{type(error).__name__}: {error}")
            return self._checked(prompt, running.result())

    def _checked(self, prompt: Prompt, result: object) -> Reward:
        if isinstance(result, Reward):
            reward = result
        elif isinstance(result, numbers.Real):  # a bool or a number: full marks are correct
            reward = Reward(float(result), float(result) >= 1.0)
        else:
            return self._failed(prompt, f"returned {type(result).__name__}, expected Reward or a number")
        if not math.isfinite(reward.value):
            return self._failed(prompt, f"returned {reward.value}")
        return reward

    def _failed(self, prompt: Prompt, reason: str) -> Reward:
        self._failures[prompt.source] = count = self._failures.get(prompt.source, 0) + 1
        if count <= _LOGGED:
            more = "; more failures of this source are not logged" if count == _LOGGED else ""
            log.warning("reward of %s for prompt %s: %s; scored 0%s", prompt.source, prompt.id, reason, more)
        return Reward(0.0, False, reason)

    def _semaphore(self) -> asyncio.Semaphore:
        """Returns the semaphore of the running event loop: one belongs to the loop that first waits on it."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self.concurrency)
        return self._slots[1]


def _in_daemon_thread(function: Callable[[Prompt, str], T], prompt: Prompt, text: str) -> concurrent.futures.Future[T]:
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def work() -> None:
        try:
            result = function(prompt, text)
        except BaseException as error:  # also SystemExit: it must not look like a hang
            outcome = error if isinstance(error, Exception) else RuntimeError(f"raised {type(error).__name__}")
            if future.set_running_or_notify_cancel():
                future.set_exception(outcome)
            return
        if future.set_running_or_notify_cancel():
            future.set_result(result)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return future
