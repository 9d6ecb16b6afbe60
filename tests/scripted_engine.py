"""A text-only engine without a model: it says what its script says, in the time its script says, on the real protocol.

What it draws depends on the seed, sample and weight version only, as for a real engine.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from rollout.engine import EngineError, EngineStats, FinishReason, GenerateRequest, TokenChunk

Script = Callable[[GenerateRequest], str]


class ScriptedEngine:
    """`script(request)` is what happens to a request: `ok`, `error` (EngineError after the first sample), `refuse`
    (EngineError at once), `crash` (another exception), `hang`, `short` (the stream ends early), `stray` (a chunk of an
    unknown sample), `abort` (the first sample ends as aborted, the others go on) or `cancel` (an inner cancellation
    leaks out). `pace` makes turns take longer, by chance: a scheduler that must not change the results."""

    def __init__(self, script: Script = lambda request: "ok", pace: random.Random | None = None) -> None:
        self.script, self.pace = script, pace
        self.version = 0
        self.params: Mapping[str, Any] = {}
        self.log: list[str] = []  # pause, resume, submissions and tokens, in order
        self.aborted: list[str] = []
        self.open_streams = 0
        self.streams: list[AsyncIterator[TokenChunk]] = []  # keeps them alive: nothing is closed by being forgotten
        self.asleep = False
        self._go = asyncio.Event()
        self._go.set()

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        assert not self.asleep
        self.streams.append(self._speak(request))
        return self.streams[-1]

    async def _speak(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self.log.append(f"submit {request.rid}")
        fate = self.script(request)
        self.open_streams += 1
        try:
            if fate == "refuse":
                raise EngineError(f"{request.rid} does not fit")
            if fate == "stray":
                yield TokenChunk(request.rid, request.n, (1,), (-1.0,), (self.version,))
            for sample in self._order(request):
                if sample == request.n - 1 and fate not in ("ok", "abort"):
                    await self._misbehave(fate, request)
                    return
                reason = FinishReason.ABORT if (fate, sample) == ("abort", 0) else FinishReason.STOP
                draw = random.Random(f"{request.seed} {sample}")
                length = draw.randint(1, 4)
                begun = len(request.prefix_ids[sample]) if request.prefix_ids else 0
                numbers = [draw.randint(1, 99) for _ in range(length)]
                for i in range(begun, length):
                    await self._turn()
                    self.log.append(f"token {request.rid}")
                    token = numbers[i] * 1000 + self.version
                    finish = reason if i == length - 1 else None
                    if request.rid in self.aborted and finish is None:
                        self.log.append(f"abort {request.rid}/{sample}")
                        finish = FinishReason.ABORT
                    yield TokenChunk(request.rid, sample, (token,), (-0.5,), (self.version,), finish)
                    if finish is FinishReason.ABORT:
                        break
                if begun >= length:  # it was complete before
                    yield TokenChunk(request.rid, sample, (), (), (), reason)
        finally:
            self.open_streams -= 1

    def _order(self, request: GenerateRequest) -> list[int]:
        order = list(range(request.n - 1))
        if self.pace is not None:
            self.pace.shuffle(order)
        return [*order, request.n - 1]

    async def _turn(self) -> None:
        await self._go.wait()
        for _ in range(1 if self.pace is None else self.pace.randint(1, 5)):
            await asyncio.sleep(0)

    async def _misbehave(self, fate: str, request: GenerateRequest) -> None:
        await self._turn()
        if fate == "error":
            raise EngineError(f"{request.rid} was lost")
        if fate == "crash":
            raise ZeroDivisionError(f"in {request.rid}")
        if fate == "hang":
            await asyncio.Event().wait()
        if fate == "cancel":
            inner = asyncio.ensure_future(asyncio.Event().wait())
            asyncio.get_running_loop().call_soon(inner.cancel)
            await inner
        assert fate == "short"

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)

    async def end_session(self, session: str) -> None: ...

    async def update_weights(self, version: int, params: Mapping[str, Any]) -> None:
        await asyncio.sleep(0)
        self.version, self.params = version, params

    async def set_parallelism(self, devices: Sequence[Any]) -> None: ...

    async def pause(self) -> None:
        self._go.clear()
        self.log.append("pause")

    async def resume(self) -> None:
        self._go.set()
        self.log.append("resume")

    async def sleep(self, *, weights: bool = False) -> None:
        if self.open_streams:
            raise AssertionError("asleep with open streams")
        self.asleep = True
        self.log.append("sleep")

    async def wake(self) -> None:
        self.asleep = False
        self.log.append("wake")

    def stats(self) -> EngineStats:
        return EngineStats(self.version, self.open_streams, 0, 1000, 0, 0)

    async def close(self) -> None: ...
