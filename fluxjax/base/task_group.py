"""Tasks of a group, none of whose failures is overlooked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rollout.engine import Engine


async def on_all(engines: Sequence[Engine], call: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
    """At the same time; the first failure ends the others."""
    async with asyncio.TaskGroup() as group:
        for engine in engines:
            group.create_task(not_silently_cancelled(call, engine))


async def not_silently_cancelled(work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
    """A task group overlooks a task that ends as cancelled. Where nobody cancelled it, a collaborator's own inner
    cancellation leaked out, and the event that everyone waits for would never come."""
    try:
        await work(*args)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            raise RuntimeError(f"{work.__qualname__} was cancelled from inside") from error
        raise


def first_of(failures: BaseExceptionGroup) -> BaseException:
    """The first error, however deep in groups."""
    error = failures.exceptions[0]
    return first_of(error) if isinstance(error, BaseExceptionGroup) else error
