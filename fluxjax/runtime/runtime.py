"""Carries out what the coordinator says, with asyncio: engines generate, the scorer scores, the trainer trains.

The pure state machine meets the clock, threads and failures only here. One loop takes an event, asks the coordinator,
and starts a task for each instruction; most tasks end by posting an event. An exception in a task cancels every other
task. Once all tasks and the work of the trainer's thread have ended, the run raises that exception.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from rollout.engine import Engine, EngineError, FinishReason, GenerateRequest, SamplingParams, TokenChunk

from ..base.event_loop import first_of, not_silently_cancelled, on_all
from ..base.scored import request_seed
from ..base.timeline import Span, Timeline, compilations
from ..base.types import Group, PreparedPrompt, Prompt, Response, Reward
from ..coordinator import Coordinator, CoordinatorError, messages
from ..coordinator.messages import Handlers
from .conversations import (
    Observations,
    at_temperature,
    begun_of,
    ended_before,
    longer,
    only_begun,
    session_of,
    to_train,
    turn_request,
    turns_of_request,
    turns_prefix,
)
from .ports import Checkpointer, Environments, EvaluationGivenUp, Observer, StepReport, Trainer

T = TypeVar("T")


@dataclasses.dataclass(eq=False)
class Runtime:
    """Carries out one run: `await Runtime(...).run()`. The caller closes its own engines, files and threads."""

    coordinator: Coordinator
    _: dataclasses.KW_ONLY
    engines: Sequence[Engine]
    # (count) -> the next prompts, in draw order, and the prompts that could not be prepared, with reasons. Together
    # these are `count` prompts, or fewer at the end of the data.
    draw: Callable[[int], Awaitable[tuple[Sequence[PreparedPrompt], Sequence[tuple[Prompt, str]]]]]
    score: Callable[[Prompt, Response], Awaitable[Reward]]  # handles rewards that crash or hang
    trainer: Trainer
    # (full) -> the accuracy of each source; raises `EvaluationGivenUp` if the run is to stop first
    evaluate: Callable[[bool], Awaitable[Mapping[str, float]]]
    checkpointer: Checkpointer
    sampling: SamplingParams
    seed: int = 0  # the seed and a prompt's draw decide the random numbers of its responses; time and engine do not
    observers: Sequence[Observer] = ()
    timeline: Timeline = dataclasses.field(default_factory=Timeline)
    prepared: dataclasses.InitVar[Mapping[int, PreparedPrompt] | None] = None
    tick: float = 0.0  # the coordinator hears the time with every event, and every `tick` seconds; 0: never
    # (degree) -> the new engines, awake: as many engines of `degree` devices as fit. They serve the oldest weights that
    # any engine served before. No request runs during the call. None: the engines never change.
    set_parallelism: Callable[[int], Awaitable[Sequence[Engine]]] | None = None
    environments: Environments | None = None  # answers the turns of prompts with environments
    colocated: bool = False  # engines sleep, without weights, from the trainer's computation until they get new weights

    def __post_init__(self, prepared: Mapping[int, PreparedPrompt] | None) -> None:
        """`prepared` are the prompts, by draw, that a resumed coordinator has in its books."""
        self.engines = tuple(self.engines)
        self._preempted = 0  # preemptions on all engines, at the end of the last step
        self._prepared = dict(prepared or {})  # the prompts in flight, by draw
        self._observed = Observations()
        self._events: asyncio.Queue[messages.Event] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._submitting = asyncio.Lock()
        self._streams: dict[str, tuple[Engine, asyncio.Task[None]]] = {}  # open streams by request id
        self._asleep: set[int] = set()  # engines that sleep: lent, or colocated and without new weights
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._engine_error: EngineError | None = None  # an engine's last error: the cause if the coordinator gives up
        self._compiled = time.perf_counter()  # the end of the last compilation in the timeline
        self._reports: list[StepReport] = []  # of steps whose weights are not published yet
        self._weights: dict[int, Mapping[str, Any]] = {}  # by version: the coordinator's version and newer ones

    async def run(self) -> messages.Finish:
        """Runs, once, until the coordinator is finished. Raises what a collaborator raises, or `CoordinatorError`."""
        self._loop = asyncio.get_running_loop()
        self._post(messages.Started(self.engines[0].stats().version))
        try:
            async with asyncio.TaskGroup() as self._tasks:
                if self.tick:
                    self._spawn(self._tell_time)
                await self._serve()
        except BaseExceptionGroup as failures:
            error = first_of(failures)
            raise error from error.__cause__  # keeps the error's own cause
        finally:
            self._thread.shutdown()
        finish = self.coordinator.finished
        assert finish is not None
        return finish

    def request_stop(self, reason: str = "stopped", *, failed: bool = False) -> None:
        """Ends the run at the next step boundary, with a checkpoint. With `failed`, `run` then raises `RunGivenUp` for
        this reason. May be called from any thread, also before `run`."""
        event = messages.StopRequested(reason, failed)
        if self._loop is None:
            self._post(event)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._post, event)

    # --- the loop -------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Carries out every instruction in a task of its own. Tasks begin in the order of instructions, before the next
        event is handled. Up to its first wait, a task sees the state in which the coordinator instructed it."""
        while self.coordinator.finished is None:
            event = await self._events.get()
            for heard in [self._time(), event] if self.tick else [event]:
                try:
                    instructions = self.coordinator.handle(heard)
                except CoordinatorError as error:
                    raise error from self._engine_error if isinstance(event, messages.EngineFailed) else None
                for instruction in instructions:
                    self._spawn(self._carry_out[type(instruction)], self, instruction)
                if instructions:
                    await asyncio.sleep(0)

    async def _tell_time(self) -> None:
        while True:
            await asyncio.sleep(self.tick)
            self._post(self._time())

    @staticmethod
    def _time() -> messages.Tick:
        return messages.Tick(asyncio.get_running_loop().time())

    def _post(self, event: messages.Event) -> None:
        self._events.put_nowait(event)

    def _tell(self, what: Callable[[Observer], None]) -> None:
        for observer in self.observers:
            what(observer)

    def _spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> asyncio.Task[None]:
        assert self._tasks is not None
        task = self._tasks.create_task(not_silently_cancelled(work, *args))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    # --- instructions ---------------------------------------------------------------------------

    _carry_out: ClassVar = Handlers(messages.Instruction)

    @property
    def _step(self) -> int:
        return self.coordinator.step + 1

    @_carry_out.of(messages.DrawPrompts)
    async def _draw(self, order: messages.DrawPrompts) -> None:
        with self.timeline.span("data", "data", self._step):
            prepared, skipped = await self.draw(order.count)
        self._prepared.update({p.prompt.draw: p for p in prepared})
        for prompt, reason in skipped:
            self._tell(lambda observer, p=prompt, r=reason: observer.on_skip(p, r))
        self._post(messages.PromptsDrawn(tuple(p.prompt for p in prepared), tuple(skipped)))

    @_carry_out.of(messages.Generate)
    async def _generate(self, order: messages.Generate) -> None:
        for request in order.requests:
            self._observed.forget(request.prompt.draw)
            self._prepared[request.prompt.draw] = only_begun(self._prepared[request.prompt.draw], request)
        prepared, step = [self._prepared[request.prompt.draw] for request in order.requests], self._step

        def begin() -> None:
            for prompt, request in zip(prepared, order.requests, strict=True):
                if prompt.prompt.environment and request.begun:
                    for turn in turns_of_request(request):
                        self._begin_turn(turn, prompt, step)
                else:
                    engine = self.engines[request.engine]
                    self._streams[request.rid] = engine, self._spawn(self._stream, engine, prompt, request, step)

        await self._submit({request.engine for request in order.requests}, begin)

    async def _submit(self, numbers: set[int], begin: Callable[[], None]) -> None:
        """Pauses engines until `begin` has queued every request: only their order decides what engines compute."""
        engines = [self.engines[number] for number in sorted(numbers)]
        async with self._submitting:
            await on_all(engines, lambda engine: engine.pause())
            begin()
            await asyncio.sleep(0)  # new tasks run first, in the order of their creation, and queue their requests
            await on_all(engines, lambda engine: engine.resume())

    async def _stream(self, engine: Engine, prepared: PreparedPrompt, order: messages.Request, step: int) -> None:
        try:
            with self.timeline.span("rollout", f"engine {order.engine}", step):
                await self._collect(engine, self._request(prepared, order), order)
        except EngineError as error:
            self._engine_error = error
            self._post(messages.EngineFailed((order.rid,), str(error)))
        finally:
            del self._streams[order.rid]

    def _request(self, prepared: PreparedPrompt, order: messages.Request) -> GenerateRequest:
        return GenerateRequest(
            rid=order.rid,
            prompt=prepared.inputs.laid_out(),
            sampling=at_temperature(self.sampling, order.temperature),
            n=order.n,
            seed=request_seed(self.seed, order.prompt.draw),
            prefix_ids=tuple(() if before is None else before.token_ids for before in order.begun),
            need=0 if order.prompt.environment else order.need,  # a turn that ends is no sample that has ended
            session=session_of(order.prompt),
        )

    async def _collect(self, engine: Engine, request: GenerateRequest, order: messages.Request) -> None:
        begun = order.begun or (None,) * order.n
        open_samples: dict[int, list[TokenChunk]] = {sample: [] for sample in range(order.n)}
        stream = engine.generate(request)
        try:
            async for chunk in stream:
                if chunk.sample not in open_samples:
                    raise EngineError(
                        f"request {request.rid}: a chunk came for sample {chunk.sample}, which has ended or is unknown"
                    )
                open_samples[chunk.sample].append(chunk)
                if chunk.finish is None:
                    continue
                chunks, before = open_samples.pop(chunk.sample), begun[chunk.sample]
                if before is None or before.finish == FinishReason.ABORT.value:  # else it was complete before
                    self._post(messages.ResponseFinished(longer(begun_of(order, chunk.sample), chunks)))
        finally:
            if (close := getattr(stream, "aclose", None)) is not None:
                await close()
        if open_samples:
            raise EngineError(f"request {request.rid}: the stream ended before samples {sorted(open_samples)} did")

    @_carry_out.of(messages.Continue)
    async def _continue(self, order: messages.Continue) -> None:
        for turn in order.turns:
            self._prepared[turn.prompt.draw] = self._observed.taken(turn, self._prepared[turn.prompt.draw])
        prepared, step = [self._prepared[turn.prompt.draw] for turn in order.turns], self._step

        def begin() -> None:
            for turn, prompt in zip(order.turns, prepared, strict=True):
                self._begin_turn(turn, prompt, step)

        await self._submit({turn.engine for turn in order.turns}, begin)

    def _begin_turn(self, turn: messages.Turn, prepared: PreparedPrompt, step: int) -> None:
        if (ended := ended_before(turn.response, self.sampling.stop_ids)) is not None:
            return self._post(messages.ResponseFinished(ended))
        engine, seed = self.engines[turn.engine], request_seed(self.seed, turn.prompt.draw)
        request = turn_request(turn, prepared, self.sampling, seed, self._merge_unit)
        self._streams[request.rid] = engine, self._spawn(self._stream_turn, engine, request, turn, step)

    @property
    def _merge_unit(self) -> int:
        return 1 if self.environments is None else self.environments.merge_unit

    async def _stream_turn(self, engine: Engine, request: GenerateRequest, turn: messages.Turn, step: int) -> None:
        response, chunks = turn.response, list[TokenChunk]()
        attempt, _, _ = response.rid.partition("/")
        try:
            with self.timeline.span("rollout", f"engine {turn.engine}", step):
                async for chunk in engine.generate(request):
                    chunks.append(chunk)
            if not chunks or chunks[-1].finish is None:
                raise EngineError(f"request {request.rid}: the stream ended before its turn did")
            self._post(messages.ResponseFinished(longer(response, chunks)))
        except EngineError as error:
            self._engine_error = error
            self._post(messages.EngineFailed((attempt,), str(error)))
        finally:
            del self._streams[request.rid]

    @_carry_out.of(messages.Act)
    async def _act(self, order: messages.Act) -> None:
        response, environments = order.response, self.environments
        if environments is None:
            raise CoordinatorError(f"{response.rid} has an environment, but this run has none")
        from ..environments import EnvironmentFailure

        try:
            with self.timeline.span("environment", "environment", self._step):
                answer = await environments.act(self._prepared[response.draw], response)
        except EnvironmentFailure as failure:
            return self._post(messages.EnvironmentFailed(response.rid, failure.reason))
        if not answer.done and response.draw in self._prepared:
            self._observed.keep(response.rid, answer.inputs)
        self._post(messages.TurnObserved(answer.response, answer.done))

    @_carry_out.of(messages.Abort, messages.Park)
    async def _abort(self, order: messages.Abort | messages.Park) -> None:
        rid = order.rid if isinstance(order, messages.Abort) else order.request
        request, _, sample = rid.partition("/")
        if (environments := self.environments) is not None:
            leave = environments.park if isinstance(order, messages.Park) and order.keep else environments.end
            self._spawn(leave, int(request.partition(".")[0]), int(sample) if sample else None)
        async with self._submitting:  # the request may not be queued yet
            streams, turns = [(id, engine) for id, (engine, _) in self._streams.items()], turns_prefix(rid)
        for id, engine in streams:
            if id == request or id.startswith(turns):
                with contextlib.suppress(EngineError):  # an engine that is gone has nothing to abort
                    await engine.abort(rid if id == request else id)

    @_carry_out.of(messages.Score)
    async def _score(self, order: messages.Score) -> None:
        response = order.response
        prompt = self._prepared[response.draw].prompt
        if self.environments is not None:  # a response may end within a turn
            self._spawn(self.environments.end, response.draw, response.sample)
        with self.timeline.span("reward", "reward", self._step):
            reward = await self.score(prompt, response)
        self._post(messages.RewardReady(order.response.rid, reward))

    @_carry_out.of(messages.Skip)
    async def _skip(self, order: messages.Skip) -> None:
        del self._prepared[order.prompt.draw]
        await self._end_conversations(order.prompt)
        self._tell(lambda observer: observer.on_skip(order.prompt, order.reason))

    @_carry_out.of(messages.Lend)
    async def _lend(self, order: messages.Lend) -> None:
        await self._rest(order.engines)
        self._post(messages.Lent(order.engines))

    async def _rest(self, numbers: Sequence[int]) -> None:
        """Puts engines to sleep as soon as their requests, and the episodes between two turns, have ended."""
        engines = [self.engines[number] for number in numbers if number not in self._asleep]

        async def ended() -> None:
            while True:  # a request may be repeated after a failure during this wait
                async with self._submitting:  # all requests for these engines are in `_streams` then
                    streams = [task for engine, task in self._streams.values() if engine in engines]
                if not streams and not self.coordinator.ledger.between_turns(numbers):
                    return
                await (asyncio.wait(streams) if streams else asyncio.sleep(0.01))

        async def sleep(engine: Engine) -> None:
            while True:
                await ended()
                try:
                    return await engine.sleep(weights=self.colocated)
                except EngineError:
                    if not self.colocated:  # the engine keeps its memory, but its devices are idle
                        return
                    if engine not in [busy for busy, _ in self._streams.values()]:
                        raise

        await on_all(engines, sleep)
        self._asleep.update(numbers)

    async def _make_room(self) -> None:
        if self.colocated:
            with self.timeline.span("sync", "engines", self._step):
                await self._rest(range(len(self.engines)))

    @_carry_out.of(messages.Accumulate)
    async def _accumulate(self, order: messages.Accumulate) -> None:
        prepared = await self._taken(order.groups)
        if not order.engines:
            await self._make_room()
        with contextlib.ExitStack() as spans:
            for lane in [f"engine {number}" for number in order.engines] or ["trainer"]:
                spans.enter_context(self.timeline.span("train", lane, order.step))
            await self._in_thread(self.trainer.accumulate, order.step, order.groups, prepared, order.engines)
        self._post(messages.Accumulated(order.step))

    @_carry_out.of(messages.Train)
    async def _train(self, order: messages.Train) -> None:
        prepared = await self._taken(order.groups)
        self._forget_before(self.coordinator.version)
        await self._make_room()
        with self.timeline.span("train", "trainer", order.step):
            trained, version, weights = await self._in_thread(
                lambda: (self.trainer.train(order.step, order.groups, prepared), *self._newest_weights())
            )
        before, self._preempted = self._preempted, self._preemptions()
        metrics = {**trained.metrics, "rollout/preemptions": float(self._preempted - before)}
        self._weights[version] = weights
        self._reports.append(StepReport(order.step, version, trained.groups, metrics, {}))
        self._post(messages.Trained(version, metrics))

    async def _taken(self, groups: Sequence[Group]) -> Mapping[int, PreparedPrompt]:
        taken = [(self._prepared.pop(group.prompt.draw), group) for group in groups]
        for prepared, _ in taken:
            await self._end_conversations(prepared.prompt)
        return {group.prompt.draw: to_train(prepared, group, self._merge_unit) for prepared, group in taken}

    async def _end_conversations(self, prompt: Prompt) -> None:
        """Frees what is kept of a prompt that is no longer generated."""
        self._observed.forget(prompt.draw)
        if self.environments is not None:
            await self.environments.end(prompt.draw)
            await on_all(self.engines, lambda engine: engine.end_session(session_of(prompt)))

    def _forget_before(self, version: int) -> None:
        """Forgets weights that are older than `version`, since each version takes as much memory as the model."""
        self._weights = {v: weights for v, weights in self._weights.items() if v >= version}

    def _newest_weights(self) -> tuple[int, Mapping[str, Any]]:
        return self.trainer.version, self.trainer.weights()

    def _preemptions(self) -> int:
        return sum(engine.stats().preemptions for engine in self.engines)

    @_carry_out.of(messages.SetParallelism)
    async def _set_parallelism(self, order: messages.SetParallelism) -> None:
        if self.set_parallelism is None:
            raise CoordinatorError(f"{order} was ordered, but these engines can't change their number of devices")
        with self.timeline.span("sync", "engines", self.coordinator.step):
            self.engines = tuple(await self.set_parallelism(order.degree))
        self._asleep.clear()
        self._preempted = self._preemptions()
        self._post(messages.ParallelismSet(order.degree, len(self.engines)))

    @_carry_out.of(messages.PublishWeights)
    async def _publish(self, order: messages.PublishWeights) -> None:
        step = self.coordinator.step
        if not self._weights:  # no step was trained since the start
            version, weights = await self._in_thread(self._newest_weights)
            self._weights[version] = weights
        if order.version not in self._weights:
            raise CoordinatorError(
                f"weights of version {order.version} are needed, but the trainer holds version {max(self._weights)}"
            )
        params = self._weights[order.version]
        self._forget_before(order.version)
        numbers = set(order.engines or range(len(self.engines)))
        asleep = numbers & self._asleep
        with self.timeline.span("sync", "trainer", step):
            engines = [self.engines[n] for n in sorted(numbers)]
            await on_all(engines, lambda engine: engine.update_weights(order.version, params))
            await on_all([self.engines[n] for n in sorted(asleep)], lambda engine: engine.wake())
        self._asleep -= numbers
        await self._tell_steps()  # before the next instruction, so that what observers do belongs to this step
        self._post(messages.WeightsPublished(order.version))

    async def _tell_steps(self) -> None:
        for start, end in [span for span in compilations().spans if span[1] > self._compiled]:
            self.timeline.add(Span("compile", "compiler", start, end, self.coordinator.step))
            self._compiled = end
        for report in self._reports:
            done = dataclasses.replace(report, seconds=self.timeline.seconds(report.step))
            self._tell(lambda observer, done=done: observer.on_step(done))
        if self._reports:
            self._reports.clear()
            await asyncio.sleep(0)  # an observer's `stop` takes effect before the next step begins

    @_carry_out.of(messages.Evaluate)
    async def _evaluate(self, order: messages.Evaluate) -> None:
        try:
            with self.timeline.span("eval", "eval", order.step):
                result = await self.evaluate(order.full)
        except EvaluationGivenUp:
            return self._post(messages.Evaluated(order.step, given_up=True))
        self._compiled = time.perf_counter()  # compilations for an evaluation belong to no step
        self._tell(lambda observer: observer.on_evaluation(order.step, order.full, result))
        await asyncio.sleep(0)  # an observer's `stop` takes effect before `Evaluated`
        self._post(messages.Evaluated(order.step))

    @_carry_out.of(messages.SaveCheckpoint)
    async def _save(self, order: messages.SaveCheckpoint) -> None:
        state = self.checkpointer.state()
        with self.timeline.span("checkpoint", "trainer", order.step):
            await self._in_thread(self.checkpointer.save, order.step, state)
        self._tell(lambda observer: observer.on_checkpoint(order.step))
        self._post(messages.CheckpointSaved(order.step))

    @_carry_out.of(messages.Finish)
    async def _finish(self, order: messages.Finish) -> None:
        """Cancels the tasks that still run: the clock, and requests that engines are told to abort."""
        for task in self._running - {asyncio.current_task()}:
            task.cancel()

    # --- ways to work ---------------------------------------------------------------------------

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Runs `work` in the trainer's thread. When cancelled, waits until `work` ends: none outlives the run."""
        job = self._thread.submit(work, *args)
        future = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not job.cancel():
                await asyncio.wait([future])
            raise
