"""A layer-streamed judge that shares a device with an engine: its layers compute between the turns (`rollout.turns`).

The judge gets a share of the time, one layer after the other. It was not tried on a GPU (`docs/rewards.md`).
"""

import asyncio
import concurrent.futures
import dataclasses
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from typing import Any, TypeAlias, TypeVar

from .engine import EngineError
from .streamed import StreamedModel, Work

Result = TypeVar("Result")


# `JaxEngine.between_turns`: the engine, which owns the device, does the work. Returns the result of the work.
Turns: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]


def in_loop(turns: Callable[[Any], Coroutine[Any, Any, Any]], loop: asyncio.AbstractEventLoop) -> Turns:
    """Makes `turns` of an engine on `loop` usable for a judge that is called from another loop."""
    return lambda work: asyncio.wrap_future(asyncio.run_coroutine_threadsafe(turns(work), loop))


@dataclasses.dataclass(eq=False)
class _Asked:
    prompts: Sequence[Sequence[int]]
    answers: list | None = None


class StreamedJudge:
    """Answers calls from one event loop with `model`. Waiting calls that differ only in their prompts are computed
    together, since a pass takes as long for one prompt as for a few. `turns` runs each layer when the device is free
    (`JaxEngine.between_turns`); None: at once, in the judge's thread. The judge computes for at most `share` of the
    time, and waits while the engine has its turns."""

    def __init__(self, model: StreamedModel, turns: Turns | None = None, share: float = 1.0) -> None:
        if not 0 < share <= 1:
            raise EngineError(f"share={share}: it must be above 0 and at most 1")
        self.model, self.share = model, share
        self.layers_computed, self.seconds = 0, 0.0  # seconds of the device that the judge used
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="judge")
        self._turns = turns or self._in_thread
        self._busy = asyncio.Lock()
        self._waiting: dict[Hashable, list[_Asked]] = {}
        self._closed = False

    async def score(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
    ) -> list[tuple[float, ...]]:
        """Scores answers to prompts: see `StreamedModel.score`."""
        alike = tuple(map(tuple, answers))
        return await self._ask(("score", alike), prompts, lambda prompts: self.model.score(prompts, alike))

    async def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Sequence[int] = ()
    ) -> list[tuple[int, ...]]:
        """Generates answers to prompts: see `StreamedModel.generate`."""
        alike = max_new_tokens, tuple(stop_ids)
        return await self._ask(("generate", *alike), prompts, lambda prompts: self.model.generate(prompts, *alike))

    async def release(self) -> None:
        """Frees the device memory of the layers, after the present batch."""
        async with self._busy:
            self.model.release()

    async def close(self) -> None:
        """Ends the present batch after its current layer. This batch and all later batches fail with EngineError."""
        self._closed = True
        await self.release()
        self._thread.shutdown(wait=False)

    async def _ask(
        self, alike: Hashable, prompts: Sequence[Sequence[int]], start: Callable[[list[Sequence[int]]], Work[list]]
    ) -> list:
        """Returns the answers to `prompts`. `start` makes one `Work` of all waiting prompts that have this `alike`."""
        self.model.check("prompt", prompts)  # a bad prompt must not fail the batch of another call
        asked = _Asked(prompts)
        self._waiting.setdefault(alike, []).append(asked)
        try:
            async with self._busy:
                if asked.answers is None:
                    await self._answer(list(self._waiting[alike]), start)
                if asked.answers is None:  # the batch failed, perhaps by another call's fault: this call tries alone
                    await self._answer([asked], start)
                assert asked.answers is not None
                return asked.answers
        finally:
            self._waiting[alike].remove(asked)
            if not self._waiting[alike]:
                del self._waiting[alike]

    async def _answer(self, asked: list[_Asked], start: Callable[[list[Sequence[int]]], Work[list]]) -> None:
        prompts = [prompt for several in asked for prompt in several.prompts]
        try:
            answers = iter(await self._compute(start(prompts)))
        except EngineError:
            if len(asked) == 1:
                raise
            return
        for several in asked:
            several.answers = [next(answers) for _ in several.prompts]

    async def _compute(self, work: Work[Result]) -> Result:
        try:
            while True:
                if self._closed:
                    raise EngineError("the judge was closed")
                took, answer = await _to_its_end(self._turns(lambda: _next_layer(work)))
                self.layers_computed += not answer
                self.seconds += took
                if answer:
                    return answer[0]
                await asyncio.sleep(took * (1 - self.share) / self.share)
        finally:
            work.close()

    async def _in_thread(self, function: Callable[[], Result], /) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


async def _to_its_end(step: Awaitable[Result]) -> Result:
    """Waits for a layer even if the caller was cancelled, so that the next batch finds the model between two layers."""
    task = asyncio.ensure_future(step)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # marks the error as retrieved
        raise


def _next_layer(work: Work[Result]) -> tuple[float, tuple[Result] | None]:
    """Computes the next layer or, after the last layer, the result. Returns (seconds, None or (result,))."""
    start = time.perf_counter()
    try:
        next(work)
        answer = None
    except StopIteration as end:
        answer = (end.value,)
    return time.perf_counter() - start, answer
