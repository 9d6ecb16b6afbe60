"""The embedded engine: continuous batching in this process, on one or more devices, behind `rollout.engine.Engine`.

The engine works in turns, in a worker thread. A *start* prefills waiting prompts into free pages and samples their
first tokens. A *round* gives every running sample some tokens. Between turns the engine delivers chunks and applies
aborts and new weights.

On devices other than CPUs, a turn is dispatched *ahead*: before the host has read the tokens of the previous turn.
Tokens after a stop id are dropped when they are read. Preemption, blame for a failed turn, and all that
`_between_turns` protects wait until all tokens are read. Counts of tokens and pages decide which turn is next, never
the time that the device takes.

A weight update discards the cached keys and values: running samples are prefilled again, so that the log-probs of later
tokens are those of the new weights alone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, TypeVarTuple

import jax
import numpy as np
from jax.typing import DTypeLike

from models.decoder import Decoder, parameter_count
from models.inputs import ModelInput
from models.shadow import Fetch
from sharding.mesh import Device

from . import turns
from .device import DeviceState, NewTokens, decode_program
from .engine import EngineError, EngineStats, FinishReason, GenerateRequest, SamplingParams, TokenChunk
from .engine_weights import EngineLayout
from .in_flight import Flight, Job
from .requests import EngineLimits, Mailbox, TokenStream
from .scheduler import Delivery, Scheduler
from .slots import PAGE_TOKENS, doubling, pages_for

UNKNOWN_MEMORY = 4 << 30  # bytes of a cache, at most, if devices don't report their free memory
LEAST_CACHE = 256  # tokens in the smallest cache of `generate_once`, doubled until the response fits
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


@dataclasses.dataclass(frozen=True)
class CacheUsage:
    bytes: int  # bytes of keys, values and states on all devices of the engine; 0 while there is no cache
    pages: int
    peak_pages: int  # the largest number of pages that samples held at once


class JaxEngine:
    """The embedded engine; see `rollout.engine.Engine`. All methods must be called on one event loop, or on one loop
    after another.

    `slots` samples run at once, each with at most `max_sequence_tokens` of prompt and response. Their cache has
    `kv_tokens` tokens; 0: as many as all slots may need, in at most `kv_fraction` of the device memory (or of
    `UNKNOWN_MEMORY`) that is free before the first request. `steps_per_sync` and `ahead`: see `EngineLimits.pace`.
    `compute_dtype` casts new weights (None: weights keep their dtype). `devices` compute together: 1, 2, 4, ... of this
    process; None: its first device. `model` may be abstract; the first `update_weights` then brings the weights. A
    model with Gated DeltaNet keeps `kept_states` states between the turns of sessions (0: turns compute their history).
    Several threads call `fetch` for prompts without pixels (`models.shadow`); a failure of `fetch` loses the request.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        slots: int = 256,
        max_sequence_tokens: int = 128,
        steps_per_sync: int = 0,
        ahead: bool | None = None,
        kv_tokens: int = 0,
        kv_fraction: float = 0.5,
        kept_states: int = 0,
        compute_dtype: DTypeLike | None = None,
        devices: Sequence[Device] | None = None,
        version: int = 0,
        fetch: Fetch | None = None,
    ) -> None:
        sizes = {"slots": slots, "max_sequence_tokens": max_sequence_tokens}
        if min(sizes.values()) < 1 or min(steps_per_sync, kept_states) < 0:
            raise EngineError(f"these must be positive: {sizes}; and not negative: {steps_per_sync=}, {kept_states=}")
        if kv_tokens < 0 or not 0 < kv_fraction <= 1:
            raise EngineError(f"{kv_tokens=} must not be negative, and {kv_fraction=} must be in (0, 1]")
        layout = EngineLayout.of(devices)
        self._limits = EngineLimits.of(
            model.config,
            **sizes,
            **EngineLimits.pace(layout.devices[0], steps_per_sync, ahead),
            small_model=jax.default_backend() != "cpu" or parameter_count(model) <= turns.SMALL_MODEL,
            kv_tokens=kv_tokens,
            kept_states=kept_states if model.config.text.delta is not None else 0,
            shadows=fetch is not None,
        )
        self._kv_fraction, self._kv_given = kv_fraction, kv_tokens  # kv_tokens 0: the first request determines the size
        self._device = DeviceState(model, self._limits, layout, compute_dtype, fetch)
        self._scheduler = Scheduler(self._limits)
        self._version = version
        self._tokens_prefilled = 0
        self._paused = self.asleep = self._closed = False
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # held during a turn; tasks get it in the order of asking
        self._flights: deque[Flight] = deque()  # dispatched turns whose tokens are unread, at most two

    # --- requests -------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest) -> TokenStream:
        """Queues the request at once (not at the first `await`) and returns the stream of its chunks, whose closing,
        cancelling or dropping aborts the request. Raises EngineError for a request that can't be served."""
        self._attach()
        if not self.has_weights:
            raise EngineError("the engine has no weights: call update_weights first")
        if not self._limits.kv_tokens and not self._scheduler.jobs:
            # The longest sequence always fits, however little memory is free.
            self._limits = self._device.limits = self._with_cache(self._kv_fraction)
            self._scheduler.resize(self._limits)
        mailbox = Mailbox()
        job, deliveries = self._scheduler.submit(request, mailbox)
        self._deliver(deliveries)
        self._kick()
        return TokenStream(mailbox, functools.partial(self._abandon, job))

    def _with_cache(self, share: float) -> EngineLimits:
        """The limits with a cache within `share` of the free device memory, unless the size is configured."""
        if self._limits.kv_tokens:
            return self._limits
        room = self._device.room(share, UNKNOWN_MEMORY) // PAGE_TOKENS * PAGE_TOKENS
        longest = pages_for(self._limits.max_sequence_tokens) * PAGE_TOKENS
        tokens = max(min(self._limits.pages * PAGE_TOKENS, room), longest)
        return dataclasses.replace(self._limits, kv_tokens=tokens)

    def compile_ahead(self, sampling: SamplingParams, samples: int, threads: concurrent.futures.Executor) -> None:
        """Compiles, in `threads`, the programs of the rounds that `samples` samples surely need if they start together.
        A round waits for its program. Does nothing if the size of the cache depends on the free memory, which is known
        only when the weights are on the devices."""
        limits = self._with_cache(self._kv_fraction)
        if limits != self._with_cache(self._kv_fraction / 4):  # a smaller share of memory, a smaller cache
            return
        from .lowered import EngineArrays

        arrays = EngineArrays(self._device.abstract, limits, self._device.dtype, self.devices)
        for size in turns.round_sizes(limits, samples, sampling.max_new_tokens):
            batch = arrays.round(size, sampling)
            compiling = threads.submit(lambda batch=batch: arrays.decode(batch).compile())
            self._device.compiling[decode_program(batch)] = compiling

    async def abort(self, rid: str) -> None:
        """Returns when the slots are free. Streams still get the tokens of turns in flight, before the `ABORT`."""
        self._attach()
        if self._scheduler.mark_aborted(rid):
            async with self._between_turns():
                pass

    def _abandon(self, job: Job) -> None:
        for sample in job.samples:
            sample.aborted = True
        if not self._turn.locked():  # otherwise the holder of `_turn` reaps
            self._deliver(self._scheduler.reap())

    async def end_session(self, session: str) -> None:
        self._attach()
        self._scheduler.end_session(session)

    async def between_turns(self, work: Callable[[], Result], /) -> Result:
        """Calls `work` in the engine's thread while no turn is in flight, and returns its result, so that another model
        can compute on the engine's devices. Callers get the device in the order of their calls."""
        async with self._between_turns():
            return await self._in_thread(work)

    # --- weights and memory ---------------------------------------------------------------------

    async def update_weights(self, version: int, params: Mapping[str, Any]) -> None:
        """Raises EngineError for weights that do not fit (`DeviceState.update`); the old weights then stay. An update
        that fails later (no memory) loses all weights and requests."""
        async with self._between_turns():
            try:
                await self._in_thread(self._device.update, params)
            except Exception as error:
                if self._device.params is None:
                    self._lose(self._scheduler.clear(), f"the engine's weights were lost: {_described(error)}", error)
                raise
            self._version = version
            self._scheduler.invalidate()

    async def disk_tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """`DeviceState.disk_tensors`, each copied to the host when the iterator reaches it. Any thread may iterate."""
        async with self._between_turns():
            return self._device.disk_tensors()

    @property
    def has_weights(self) -> bool:
        return self._device.params is not None

    async def copy_weights(self, source: JaxEngine) -> None:
        """Serves the weights and version of `source`, an engine with the same model."""
        async with self._between_turns(), source._between_turns():
            await self._in_thread(self._device.take, source._device)
            self._version = source._version
            self._scheduler.invalidate()

    async def set_parallelism(self, devices: Sequence[Device]) -> None:
        """Moves the weights to these devices, piece by piece. Raises EngineError while samples run or wait."""
        layout = EngineLayout.of(devices)
        async with self._between_turns():
            if self._scheduler.jobs:
                raise EngineError(
                    f"can't move to other devices: {self._scheduler.running} samples are running and "
                    f"{len(self._scheduler.waiting)} waiting; abort them first"
                )
            if layout != self._device.layout:
                self._scheduler.invalidate()
                await self._in_thread(self._device.move, layout)
                self._limits = dataclasses.replace(self._limits, kv_tokens=self._kv_given)

    async def pause(self) -> None:
        self._paused = True
        async with self._between_turns():
            pass

    async def resume(self, *, by_seed: bool = False) -> None:
        """Continues generating. With `by_seed`, waiting requests are admitted in the order of seeds, not of arrival."""
        if by_seed:
            self._scheduler.by_seed()
        self._paused = False
        self._attach()
        self._kick()

    async def sleep(self, *, weights: bool = False) -> None:
        """Frees the cache's memory (`Engine.sleep`). With `weights`, frees the weights, too, until an update."""
        async with self._between_turns():
            if self._scheduler.running:
                raise EngineError(f"can't sleep: {self._scheduler.running} samples are running; abort them first")
            self._scheduler.invalidate()
            self._device.cache = None
            if weights:
                self._device.params = None
            self.asleep = True

    async def wake(self) -> None:
        self.asleep = False
        self._attach()
        self._kick()

    async def close(self) -> None:
        """Waits for turns in flight; then open streams fail with EngineError. May be called again."""
        if self._closed:
            return
        self._attach()
        async with self._turn:
            self._closed = True
            await self._read(0)
            self._lose(self._scheduler.clear(), "the engine was closed")
        self._thread.shutdown(wait=False)
        if self._device.pixels is not None:
            self._device.pixels.close()

    def stats(self) -> EngineStats:
        return EngineStats(
            version=self._version,
            running=self._scheduler.running,
            waiting=len(self._scheduler.waiting),
            slots=self._limits.slots,
            tokens_generated=self._scheduler.tokens_generated,
            tokens_prefilled=self._tokens_prefilled,
            preemptions=self._scheduler.preemptions,
        )

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that the engine computes on."""
        return self._device.layout.devices

    @property
    def shadows(self) -> bool:
        """Says whether prompts may lack their pixels, which the engine then fetches."""
        return self._limits.shadows

    @property
    def cache_usage(self) -> CacheUsage:
        """The size of the cache, and the most pages in use at once since the cache got this size."""
        return CacheUsage(self._device.cache_bytes, self._scheduler.pool.total, self._scheduler.pool.peak)

    @property
    def compiled_shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Every (program, bucketed sizes) used so far."""
        return tuple(sorted(self._device.shapes))

    # --- the loop -------------------------------------------------------------------------------

    def _attach(self) -> None:
        """Binds the engine to the running event loop, and drops jobs of an earlier, closed loop."""
        self._refuse_if_closed()
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise EngineError("the engine is in use on another event loop")
        self._loop, self._turn, self._task = loop, asyncio.Lock(), None
        self._lose(self._scheduler.clear(), "the event loop of this request was closed")

    def _kick(self) -> None:
        if self._ready() and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run(), name="rollout engine")

    def _ready(self) -> bool:
        return bool(self._scheduler.jobs) and not (self._paused or self.asleep or self._closed)

    @contextlib.asynccontextmanager
    async def _between_turns(self) -> AsyncIterator[None]:
        """Runs the block while no turn is in flight. Samples that were aborted meanwhile end when the block ends."""
        self._attach()
        async with self._turn:
            self._refuse_if_closed()  # perhaps closed while waiting
            await self._read(0)
            try:
                yield
            finally:
                self._deliver(self._scheduler.reap())

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    async def _run(self) -> None:
        while self._ready() or self._flights:
            async with self._turn:
                try:
                    await (self._one_turn() if self._ready() else self._read(0))
                except asyncio.CancelledError:
                    self._lose(self._scheduler.clear(), "the event loop is shutting down")
                    raise
                except Exception as error:
                    self._lose(self._scheduler.clear(), _described(error), error)
                self._deliver(self._scheduler.reap())
        if self._device.pixels is not None:
            self._device.pixels.expect(())

    async def _one_turn(self) -> None:
        """Dispatches a turn, and reads the tokens of the previous turn (without `ahead`: of this turn). If the next
        turn must wait for unread tokens, reads these tokens and dispatches nothing."""
        scheduler = self._scheduler
        if not scheduler.next_turn(unread=bool(self._flights)):
            await self._read(0)
            return
        jobs, ahead, prefilled = scheduler.at_turn(), self._limits.ahead, 0
        try:
            if scheduler.starting:
                starts = turns.plan_starts(scheduler)
                self._expect_pixels(starts)
                prefilled = sum(step.batch.tokens for step in starts if step.batch.outputs is None)
                dispatch = functools.partial(self._device.start, starts)
            else:
                dispatch = functools.partial(self._device.decode, turns.plan_round(scheduler))
                self._expect_pixels(())
            tokens = await self._in_thread(lambda: dispatch() if ahead else dispatch().read())
        except Exception as error:
            if not jobs:
                raise
            if await self._read(0):  # else the previous turn failed, and spoiled the cache for this one
                self._lose(scheduler.blame(jobs), _described(error), error)
            return
        self._tokens_prefilled += prefilled
        self._flights.append(scheduler.dispatched(tokens.slots_B, self._version, tokens))
        await self._read(int(ahead))

    async def _read(self, most: int) -> bool:
        """Reads and delivers the tokens of the oldest flights, until at most `most` flights are left. Returns False if
        the device failed."""
        failed = False
        while len(self._flights) > most:
            flight = self._flights[0]
            tokens = flight.tokens
            try:
                new = tokens if isinstance(tokens, NewTokens) else await self._in_thread(tokens.read)
            except Exception as error:
                self._lose(self._scheduler.blame(flight.jobs), _described(error), error)
                failed = True
            else:  # a cancelled reader does not get here: another reader takes the flight
                self._flights.popleft()
                self._record(flight, new)
            self._deliver(self._scheduler.reap())
        return not failed

    def _record(self, flight: Flight, new: NewTokens) -> None:
        lost = {job: new.lost[job.request.rid] for job in flight.jobs if job.open and job.request.rid in new.lost}
        for job, error in lost.items():
            self._fail(self._scheduler.drop([job]), _described(error), error)
        new = new.only(self._scheduler.holds(flight, new.slots_B))
        finite_B = new.finite_B
        broken, new = self._scheduler.holders(new.slots_B[~finite_B]), new.only(finite_B)
        self._deliver(self._scheduler.record(flight, new.slots_B, new.tokens_BR, new.logprobs_BR, new.count_B))
        if broken:
            reason = f"a sampled token has a log-prob that is not finite under weights {flight.version}"
            self._lose(self._scheduler.blame(broken), reason)

    def _expect_pixels(self, plan: Sequence[turns.StartStep]) -> None:
        if self._device.pixels is not None:
            now = (tensor for step in plan if step.batch.outputs is None for tensor in step.batch.pixels())
            ahead = turns.pixels_ahead(self._scheduler)
            self._device.pixels.expect(itertools.chain(now, ahead))

    async def _in_thread(self, function: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        for job, chunk in deliveries:
            job.sink.put(chunk)
        for job in dict.fromkeys(job for job, chunk in deliveries if chunk.finish is not None):
            if not job.open:
                job.sink.close()

    def _lose(self, jobs: Sequence[Job], reason: str, cause: Exception | None = None) -> None:
        """Fails the streams of jobs that the scheduler has dropped, and drops the cache and unread tokens. A failed
        turn may have left values in the cache that are not finite. These would spoil later samples, even where they are
        masked."""
        self._device.cache = None
        self._flights.clear()
        self._fail(jobs, reason, cause)

    @staticmethod
    def _fail(jobs: Sequence[Job], reason: str, cause: Exception | None) -> None:
        if cause is not None:
            traceback.clear_frames(cause.__traceback__)  # else the error would keep the turn's arrays alive
        for job in jobs:
            error = EngineError(f"request {job.request.rid!r} was lost: {reason}")
            error.__cause__ = cause
            job.sink.close(error)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


async def generate_once(
    model: Decoder,
    prompt: ModelInput,
    sampling: SamplingParams,
    *,
    seed: int = 0,
    on_chunk: Callable[[TokenChunk], bool] = lambda chunk: False,
) -> TokenChunk:
    """Returns the complete response to one prompt, from a new engine, which copies the layers of `model`. `on_chunk`
    gets each chunk, and ends the response by returning True. Raises EngineError as the engine does."""
    room = doubling(len(prompt) + sampling.max_new_tokens, LEAST_CACHE)
    engine = JaxEngine(model, slots=1, max_sequence_tokens=room)
    del model
    stream = engine.generate(GenerateRequest("single", prompt, sampling, seed=seed))
    chunks: list[TokenChunk] = []
    try:
        async for chunk in stream:
            chunks.append(chunk)
            if on_chunk(chunk):
                break
    finally:
        await stream.aclose()
        await engine.close()
    ids, logprobs, versions = (
        tuple(itertools.chain.from_iterable(getattr(chunk, name) for chunk in chunks))
        for name in ("token_ids", "logprobs", "versions")
    )
    return TokenChunk("single", 0, ids, logprobs, versions, chunks[-1].finish or FinishReason.ABORT)
