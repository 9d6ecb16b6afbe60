"""Episodes of environments in processes that can be killed, for one event loop."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import pathlib
import pickle
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..base.call_slots import Slots
from ..base.errors import ConfigError, DataError
from ..base.medium import Media, MediaKind
from ..base.scored import Prompt
from ..base.worker_pool import HeldWorker, WorkerDied, WorkerError, WorkerMemory, WorkerPool, WorkerTimeout
from ..config.bounds import check_fields
from ..config.data import EnvironmentLimits
from ..data.sources import marked
from .observation import EnvironmentFailure, Fault

_CLOSING_SECONDS = 5.0  # seconds that an environment's `close` may take
# A process above this share of its bound ends after its episode, since the next episode must not pay for its leak.
_WORN = 0.5
_ABANDONED = 3600.0  # seconds after which nobody writes a part of a file any more
_LENGTH = 200  # characters after which a reason is cut off
_FAULTS = {WorkerTimeout: Fault.TIMED_OUT, WorkerMemory: Fault.MEMORY, WorkerError: Fault.RAISED}


@dataclasses.dataclass(frozen=True)
class Observed:
    """An observation that was checked. The marks of `text` stand in the order of `media`, which are files. If there are
    no media, marks in `text` are plain words."""

    text: str
    media: tuple[Media, ...]
    reward: float
    done: bool
    info: Mapping[str, Any]
    seconds: float = dataclasses.field(default=0.0, compare=False)  # not compared, because it is a measurement


class EnvironmentPool:
    """Starts episodes of environments; every environment lives in a process of its own until its episode ends. Whatever
    an environment does, its episode alone fails, with a reason. Media of observations become files in `folder`, named
    by the SHA-256 of their content."""

    def __init__(
        self,
        folder: str | pathlib.Path,
        limits: EnvironmentLimits | None = None,
        *,
        note: Callable[[str, str], None] = lambda environment, text: None,
    ) -> None:
        """`note(environment, text)` is called for each failure. Raises DataError if `folder` can't be made, and
        `ConfigError` for limits beyond their bounds."""
        self.folder, self.limits = pathlib.Path(folder).absolute(), limits or EnvironmentLimits()
        check_fields(self.limits, "environment limits: ")
        self._note = note
        self._slots = Slots(self.limits.concurrency)
        self.episodes: set[LiveEpisode] = set()
        self.seconds: list[float] = []  # of turns since the last `metrics`
        self._counts: collections.Counter[str] = collections.Counter()  # since the last `metrics`
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{self.folder}: the folder for media of observations can't be made: {error}") from error
        for part in self.folder.glob(".*.part"):  # of processes that were killed; others may still write theirs
            with contextlib.suppress(FileNotFoundError):
                if time.time() - part.stat().st_mtime > _ABANDONED:
                    part.unlink()
        self._workers = WorkerPool(
            f"{__package__}.environment_process:playing_function",
            self.limits.concurrency,
            seconds=self.limits.seconds,
            memory_gib=self.limits.memory_gib,
            name="environments",
            made_with={"folder": str(self.folder), "limits": dataclasses.asdict(self.limits)},
            patient=False,
            look_at_memory=True,
        )

    async def start(
        self, name: str, prompt: Prompt, seed: int, arguments: Mapping[str, Any] | None = None
    ) -> LiveEpisode:
        """Begins an episode, whose `observation` is then that of `reset`. `name` is a name in `ENVIRONMENTS` or an
        import path, of a class or a function that makes an environment with the `arguments`, or of an environment.
        Waits for earlier episodes while `limits.concurrency` episodes live. Raises EnvironmentFailure; `ConfigError` if
        there is no such environment, or it does not take the `arguments`; DataError if media can't be written."""
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._slots.slot())
            try:
                held = await self._workers.ahold()
            except WorkerDied as error:
                raise self.failed(name, EnvironmentFailure(Fault.DIED, error.reason)) from None
            episode = LiveEpisode(self, name, held, stack.pop_all())
        self.episodes.add(episode)
        self._counts["started"] += 1
        await episode.begin(prompt, seed, dict(arguments or {}))
        return episode

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of environments since the last call: seconds of turns, counts, and the share of time in
        which environments lived, in [0, 1]; empty if no environment lived."""
        waited, busy = self._slots.usage()
        counts, self._counts = self._counts, collections.Counter()
        seconds, self.seconds = sorted(self.seconds), []
        if not busy and not counts:
            return {}
        metrics = {"waiting": float(waited), "busy": busy, "started": 0.0, "failed": 0.0}
        metrics |= {name: float(count) for name, count in sorted(counts.items())}
        if seconds:
            metrics["seconds_median"], metrics["seconds_max"] = statistics.median(seconds), seconds[-1]
        return {f"environments/{name}": value for name, value in metrics.items()}

    async def close(self) -> None:
        """Kills all environments and their processes. Turns under way fail."""
        for episode in list(self.episodes):
            await episode.kill()
        await asyncio.to_thread(self._workers.close)

    def failed(self, name: str, failure: EnvironmentFailure) -> EnvironmentFailure:
        """Counts a failure, with a reason of bounded length, and returns it."""
        failure.reason = failure.reason[:_LENGTH]
        self._counts["failed"] += 1
        self._counts[f"failed/{failure.fault.value}"] += 1
        self._note(name, failure.reason)
        return failure


class LiveEpisode:
    """An episode in its process. One method runs at a time. A method that raises, or is cancelled, ends the episode;
    otherwise the caller ends it, whether or not the environment is done."""

    observation: Observed  # the newest observation

    def __init__(self, pool: EnvironmentPool, name: str, held: HeldWorker, slot: contextlib.AsyncExitStack) -> None:
        self._pool, self._name, self._held, self._slot = pool, name, held, slot
        self._ended = False
        self._offers: Sequence[str] = ()  # the optional methods that the environment has

    async def begin(self, prompt: Prompt, seed: int, arguments: Mapping[str, Any]) -> None:
        values = self._name, arguments, pickle.dumps(prompt), seed
        (observation, self._offers), seconds = await self._ask("start", *values)
        self.observation = await self._observed(observation, seconds)

    async def act(self, text: str) -> Observed:
        """Gives a turn of the model to the environment and returns the answer. Raises EnvironmentFailure, DataError if
        media can't be written, and RuntimeError if the environment is done or the episode has ended."""
        if self.observation.done:
            raise RuntimeError(f"{self._name} is done; no turn can follow")
        answer, seconds = await self._ask("step", text)
        self._pool.seconds.append(seconds)
        self.observation = await self._observed(answer, seconds)
        return self.observation

    async def snapshot(self) -> bytes | None:
        """Returns the state of the episode, or None if the environment has no snapshots. Raises what `act` raises."""
        return (await self._ask("snapshot"))[0] if self.has_snapshots else None

    @property
    def has_snapshots(self) -> bool:
        return {"snapshot", "restore"} <= {*self._offers}

    async def demonstrate(self) -> str:
        """Returns a good next turn. Raises what `act` raises; `ConfigError` if the environment can't tell one."""
        if "demonstrate" not in self._offers:
            fix = "add it, or set warm_start.steps=0"
            raise ConfigError(f"environment {self._name!r} has no demonstrate(), which the warm start imitates; {fix}")
        return (await self._ask("demonstrate"))[0]

    async def restore(self, snapshot: bytes) -> None:
        """Sets the state that an episode of the same environment, prompt and seed had at its `snapshot`. `observation`
        does not change. Raises what `act` raises."""
        if not self.has_snapshots:
            raise ConfigError(f"environment {self._name!r} has no snapshot() and restore()")
        await self._ask("restore", snapshot)

    async def end(self) -> None:
        """Closes the environment. Its process stays for further episodes unless it has grown much. An environment that
        fails to close is counted. Does nothing once the episode has ended."""
        if not self._ended and "answer" not in (reply := await self._finish()):
            self._pool.failed(self._name, _failure_of(reply))

    async def kill(self) -> None:
        """Ends the episode and its process at once."""
        if not self._ended:
            self._held.kill()
            await self._leave()

    async def _ask(self, order: str, *values: Any) -> tuple[Any, float]:
        """Returns the answer of the process, and the seconds that it took. If there is none, the episode ends."""
        if self._ended:
            raise RuntimeError(f"the episode of {self._name} has ended")
        begin = time.monotonic()
        reply = await self._order(order, *values)
        if "answer" in reply:
            return reply["answer"], time.monotonic() - begin
        await self._finish()
        if "mend" in reply:
            raise (ConfigError if reply["setting"] else DataError)(reply["mend"])
        raise self._pool.failed(self._name, _failure_of(reply))

    async def _order(self, order: str, *values: Any) -> dict[str, Any]:
        limits = self._pool.limits
        seconds = {"start": limits.start_seconds, "end": _CLOSING_SECONDS}.get(order, limits.seconds)
        try:
            return await self._held.acall({"do": order, "with": values}, seconds)
        except (WorkerTimeout, WorkerDied, WorkerError) as error:
            return {"fault": _FAULTS.get(type(error), Fault.DIED).value, "reason": str(error)}
        except BaseException:  # cancelled: the process may be in the middle of a turn
            await self.kill()
            raise

    async def _finish(self) -> dict[str, Any]:
        """Closes the environment if its process still answers, and returns the reply."""
        if self._ended:  # killed meanwhile
            return {"fault": Fault.DIED.value, "reason": "was killed"}
        reply = await self._order("end")
        fit = "answer" in reply and self._held.resident <= _WORN * self._pool.limits.memory_gib * (1 << 30)
        self._held.release(fit)
        await self._leave()
        return reply

    async def _leave(self) -> None:
        self._ended = True
        self._pool.episodes.discard(self)
        await self._slot.aclose()

    async def _observed(self, answer: Mapping[str, Any], seconds: float) -> Observed:
        media: dict[MediaKind, list[Media]] = {}
        for kind, name in answer["media"]:
            media.setdefault(MediaKind(kind), []).append(Media(MediaKind(kind), str(self._pool.folder / name)))
        values = answer["reward"], answer["done"], json.loads(answer["info"])
        if not media:
            return Observed(answer["text"], (), *values, seconds)
        try:
            prompt = marked("", self._name, answer["text"], "", media)
        except ValueError as error:
            await self._finish()
            raise self._pool.failed(self._name, EnvironmentFailure(Fault.INVALID, str(error))) from None
        return Observed(prompt.text, prompt.media, *values, seconds)


def _failure_of(reply: Mapping[str, Any]) -> EnvironmentFailure:
    if "mend" in reply:
        return EnvironmentFailure(Fault.RAISED, reply["mend"])
    return EnvironmentFailure(Fault(reply["fault"]), reply["reason"])
