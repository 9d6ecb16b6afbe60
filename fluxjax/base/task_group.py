"""Tasks of an `asyncio.TaskGroup` none of whose failures is overlooked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rollout.engine import Engine


async def on_all(engines: Sequence[Engine], call: Callable[[Engine], Awaitable[None]]) -> None:
    """Calls all engines at the same time; the first failure cancels the other calls."""
    async with asyncio.TaskGroup() as tasks:
        for engine in engines:
            tasks.create_task(not_silently_cancelled(call, engine))


async def not_silently_cancelled(work: Callable[..., Awaitable[None]], *args: object) -> None:
    """Awaits `work(*args)`; raises RuntimeError if that ends as cancelled although nobody cancelled this task.

    A task group overlooks a task that ends as cancelled. If a cancellation leaked out of a collaborator, the event that
    everyone waits for would never come.
    """
    try:
        await work(*args)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            raise RuntimeError(f"{work.__qualname__} was cancelled from inside") from error
        raise


def first_of(failures: BaseExceptionGroup) -> BaseException:
    """Returns the first error within groups of errors, however deep."""
    error = failures.exceptions[0]
    return first_of(error) if isinstance(error, BaseExceptionGroup) else error
