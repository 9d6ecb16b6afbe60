"""Calls slow rewards in threads, event loops and processes, one by one or in batches, within bounds of time."""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import contextlib
import dataclasses
import inspect
import pickle
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from ..base.call_slots import Slots
from ..base.errors import said
from ..base.scored import Completion, Reward
from ..base.worker_pool import WorkerDied, WorkerError, WorkerPool, WorkerTimeout
from ..config import RewardKindConfig
from .named import Failing, FoundReward, RewardFailure, as_batch, as_reward, find_reward

BATCH = 64  # responses in a call of a batched reward, at most
BATCH_WAIT = 0.05  # seconds that a response waits for further responses of its batch
_PING_SECONDS = 0.5  # seconds within which a loop answers if it is not blocked
MEMORY_GIB = 4.0  # memory that a process of a user's reward may take beside its imports


@dataclasses.dataclass(frozen=True)
class Callee:
    """The way to call a reward: `function(*arguments(completions))`, `batched` or not. `kind` selects the bounds."""

    function: Callable[..., Any]
    arguments: Callable[[Sequence[Completion]], tuple[Any, ...]]
    kind: str
    batched: bool = False

    @classmethod
    def of(cls, reward: Any) -> Callee:
        if callable(compute := getattr(reward, "compute", None)):
            callee = cls(compute, lambda batch: ([c.prompt for c in batch], [c.text for c in batch]), "batch", True)
        elif callable(score := getattr(reward, "score", None)):
            callee = cls(score, lambda batch: (batch[0],), "function")
        else:
            callee = cls(reward, lambda batch: (batch[0].prompt, batch[0].text), "function")
        kind = getattr(reward, "kind", None)
        return dataclasses.replace(callee, kind=kind) if isinstance(kind, str) else callee

    @property
    def asynchronous(self) -> bool:
        called = getattr(self.function, "__call__", None)  # noqa: B004 - the method, which may be `async def`
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(called)


class Caller(abc.ABC):
    """Calls one reward in the slots of its kind; a batched reward gets up to `BATCH` responses at once."""

    def __init__(self, slots: Slots, batched: bool) -> None:
        self._slots, self._batched = slots, batched
        self._open: _Batch | None = None  # the batch that other completions may join

    async def answer(self, completion: Completion) -> Any:
        """Returns the answer for a completion. Raises RewardFailure."""
        if not self._batched:
            (answer,) = await self._in_a_slot([completion])
        else:
            if self._open is None or self._open.answers.done():  # the batch was cancelled with its loop
                self._open = _Batch(self._send)
            batch, place = self._open, len(self._open.completions)
            batch.completions.append(completion)
            if place + 1 == BATCH:
                self._open = None
                batch.full.set()
            answer = (await asyncio.shield(batch.answers))[place]
        if isinstance(answer, RewardFailure):
            raise answer
        return answer

    async def _send(self, batch: _Batch) -> list[Any]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BATCH_WAIT):
                await batch.full.wait()
        if self._open is batch:
            self._open = None
        return await self._in_a_slot(batch.completions)

    async def _in_a_slot(self, completions: Sequence[Completion]) -> list[Any]:
        async with self._slots.slot():
            return await self.call(completions)

    @abc.abstractmethod
    async def call(self, completions: Sequence[Completion]) -> list[Any]:
        """Returns an answer for each completion. Only a reward that scores batches gets several completions. The answer
        for a completion may be a RewardFailure. Raises RewardFailure if the call as a whole fails."""

    def close(self) -> None:  # noqa: B027 - calls in this process go on
        """Ends calls under way, if they can be ended."""


class _Batch:
    """Completions that `send` scores together as soon as the batch is `full` or `BATCH_WAIT` seconds old."""

    def __init__(self, send: Callable[[_Batch], Coroutine[Any, Any, list[Any]]]) -> None:
        self.completions: list[Completion] = []
        self.full = asyncio.Event()
        self.answers = asyncio.create_task(send(self))
        # Reads the task's error: asyncio would log an unread error if all calls of the batch were cancelled.
        self.answers.add_done_callback(lambda answers: answers.cancelled() or answers.exception())


class LocalCaller(Caller):
    """Calls a reward in this process: a blocking function in a daemon thread, a user's coroutine in `UsersLoop`, this
    package's coroutines in the run's loop. A call that takes too long is abandoned."""

    def __init__(self, reward: Any, seconds: float, loop: UsersLoop, slots: Slots) -> None:
        self._callee, self._seconds, self._loop = Callee.of(reward), seconds, loop
        super().__init__(slots, self._callee.batched)
        self._built_in = str(getattr(reward, "__module__", "")).startswith("fluxjax.")

    async def call(self, completions: Sequence[Completion]) -> list[Any]:
        function, arguments = self._callee.function, self._callee.arguments(completions)
        if not self._callee.asynchronous:
            running = asyncio.wrap_future(in_daemon_thread(function, *arguments))
        elif self._built_in:
            running = asyncio.ensure_future(function(*arguments))
        else:
            running = asyncio.wrap_future(self._loop.submit(function, *arguments))
        try:  # not `wait_for`: it would wait for ever for a coroutine that refuses to be cancelled
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
        return as_batch(running.result(), len(completions)) if self._callee.batched else [running.result()]


def in_daemon_thread(function: Callable[..., Any], *arguments: Any) -> concurrent.futures.Future[Any]:
    """Calls the function in its own thread. The process can end while the function hangs."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def work() -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # the future was cancelled
            try:
                future.set_result(function(*arguments))
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # such as SystemExit: otherwise the call would seem to hang
                future.set_exception(_no_end(error))

    threading.Thread(target=work, name="reward", daemon=True).start()
    return future


def _no_end(error: BaseException) -> RuntimeError:
    """Returns a RuntimeError to raise instead of `error`, which would end a thread or an event loop."""
    return RuntimeError(f"raised {type(error).__name__}")


class UsersLoop:
    """An event loop in a daemon thread, for coroutines of users; a new loop replaces a blocked one. The end of the
    process does not wait for a task that refuses to be cancelled."""

    def __init__(self) -> None:
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None  # the event ends the loop

    def submit(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> concurrent.futures.Future[Any]:
        """Awaits `function(*arguments)` in the loop, which is started if need be."""
        if self._running is None:
            begun: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]
            begun = concurrent.futures.Future()

            async def until_closed() -> None:
                closed = asyncio.Event()
                begun.set_result((asyncio.get_running_loop(), closed))
                await closed.wait()

            threading.Thread(target=lambda: asyncio.run(until_closed()), name="rewards-loop", daemon=True).start()
            self._running = begun.result()
        return asyncio.run_coroutine_threadsafe(_awaited(function, *arguments), self._running[0])

    async def check(self) -> None:
        """Abandons the loop if the loop is blocked; the loop's tasks then time out."""
        if (running := self._running) is None:
            return
        answered = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), running[0]))
        done, _ = await asyncio.wait({answered}, timeout=_PING_SECONDS)
        answered.cancel()
        if not done and self._running is running:
            self._running = None

    def close(self) -> None:
        if self._running is not None:
            loop, closed = self._running
            loop.call_soon_threadsafe(closed.set)
            self._running = None


async def _awaited(function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    try:
        return await function(*arguments)
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise _no_end(error) from None


# --- in processes -----------------------------------------------------------------------------------


class ProcessCaller(Caller):
    """Calls a reward, which must have an import path, in processes. Too much time or memory ends a process."""

    def __init__(self, found: FoundReward, bounds: RewardKindConfig, slots: Slots) -> None:
        super().__init__(slots, Callee.of(found.value).batched)
        path, name = f"{__name__}:scoring_function", found.name
        made_with = {"name": name, "arguments": dict(found.arguments)}
        count, seconds = bounds.concurrency, bounds.seconds
        self._pool = WorkerPool(path, count, seconds=seconds, memory_gib=MEMORY_GIB, name=name, made_with=made_with)

    async def call(self, completions: Sequence[Completion]) -> list[Any]:
        try:
            answers = await self._pool.acall(pickle.dumps(list(completions)))
        except WorkerTimeout as error:
            raise RewardFailure(Failing.TIMED_OUT, str(error)) from None
        except WorkerDied as error:
            raise RewardFailure(Failing.DIED, error.reason) from None
        except WorkerError as error:
            raise RewardFailure(Failing.RAISED, str(error)) from None
        return [RewardFailure(Failing.INVALID, *a) if len(a) == 1 else Reward(*a) for a in answers]

    def close(self) -> None:
        self._pool.close()


def scoring_function(reward: Mapping[str, Any]) -> Callable[[bytes], list[Sequence[Any]]]:
    """Builds the reward of this `name` and `arguments`, and returns the function by which a process scores. The
    function takes pickled completions. For each completion it returns the values of a `Reward`, or only the reason why
    there is no reward. The run's process thus gets no object of a user's code."""
    callee = Callee.of(find_reward(**reward))

    def scored(completions: bytes) -> list[Sequence[Any]]:
        batch = pickle.loads(completions)
        result = callee.function(*callee.arguments(batch))
        try:
            answers = as_batch(result, len(batch)) if callee.batched else [result]
        except RewardFailure as failure:
            return [[failure.reason]] * len(batch)
        return [plain_answer(answer) for answer in answers]

    return scored


def plain_answer(result: Any) -> Sequence[Any]:
    """Returns the values of the `Reward` that `result` means, or only the reason why `result` is no reward."""
    try:
        return dataclasses.astuple(as_reward(result))
    except RewardFailure as failure:
        return [failure.reason]
