"""Calls rewards within their time, in this process and in batches; `process_caller` does in processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from ..base.errors import said
from ..base.scored import Completion
from .answers import Failing, RewardFailure, as_batch
from .named import Callee
from .users_loop import UsersLoop, in_daemon_thread


@runtime_checkable
class Caller(Protocol):
    async def call(self, completions: Sequence[Completion]) -> list[Any]:
        """Returns an answer for each completion: one, unless the reward scores batches. An answer that is a
        RewardFailure is to be raised; one that is true of all is raised here."""
        ...

    def close(self) -> None: ...


class LocalCaller:
    """Calls a reward in this process: a blocking function in a daemon thread, users' coroutines in a loop of their own,
    coroutines of this package in the run's loop, where the engines are. A call that takes too long is left behind."""

    def __init__(self, reward: Any, seconds: float, loop: UsersLoop) -> None:
        self._callee, self._seconds, self._loop = Callee.of(reward), seconds, loop
        built_in = str(getattr(reward, "__module__", "")).startswith("fluxjax.")
        self._in_run_loop = getattr(reward, "in_run_loop", built_in)

    async def call(self, completions: Sequence[Completion]) -> list[Any]:
        result = await self._result(*self._callee.arguments(completions))
        return as_batch(result, len(completions)) if self._callee.batched else [result]

    async def _result(self, *arguments: Any) -> Any:
        function = self._callee.function
        if not self._callee.asynchronous:
            running = asyncio.wrap_future(in_daemon_thread(function, *arguments))
        elif self._in_run_loop:
            running = asyncio.ensure_future(function(*arguments))
        else:
            running = asyncio.wrap_future(self._loop.submit(function, *arguments))
        try:  # not wait_for: a coroutine that refuses to be cancelled would hold that up for ever
            done, _ = await asyncio.wait({running}, timeout=self._seconds)
        finally:
            running.cancel()
        if not done:
            await self._loop.check()
            raise RewardFailure(Failing.TIMED_OUT, f"timed out after {self._seconds:g} s")
        if running.cancelled():
            raise RewardFailure(Failing.RAISED, "cancelled itself")
        if isinstance(error := running.exception(), RewardFailure):
            raise error
        if error is not None:
            raise RewardFailure(Failing.RAISED, said(error)) from error
        return running.result()

    def close(self) -> None: ...


class Batches:
    """Collects completions into batches of at most `size`; none waits longer than `wait` seconds for others."""

    def __init__(self, call: Callable[[Sequence[Completion]], Awaitable[list[Any]]], size: int, wait: float) -> None:
        self._call, self._size, self._wait = call, size, wait
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: list[tuple[Completion, asyncio.Future[Any]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def call(self, completion: Completion) -> Any:
        """Returns the answer for one completion of a batch. Raises RewardFailure."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # what the loop before left open was cancelled with it
            self._loop, self._open, self._timer = loop, [], None
        future = loop.create_future()
        self._open.append((completion, future))
        if len(self._open) >= self._size:
            self._send()
        elif self._timer is None:
            self._timer = loop.call_later(self._wait, self._send)
        return await future

    def _send(self) -> None:
        batch, self._open = [(c, future) for c, future in self._open if not future.done()], []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if batch:
            task = asyncio.ensure_future(self._score(batch))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _score(self, batch: Sequence[tuple[Completion, asyncio.Future[Any]]]) -> None:
        try:
            answers: Sequence[Any] = await self._call([completion for completion, _ in batch])
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        else:
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)


def answered(answer: Any) -> Any:
    """Returns an answer, or raises the RewardFailure that it is."""
    if isinstance(answer, RewardFailure):
        raise answer
    return answer
