"""`FluxTrainer` takes a run from its configuration to its summary."""

from __future__ import annotations

import contextlib
import copy
import pathlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import models
from models.decoder import Decoder, parameter_count
from rollout.engine import Engine

from ..algorithms import ALGORITHMS, find_algorithm
from ..base.event_loop import on_all, run_async, stop_on_signals
from ..base.timeline import Span, Timeline
from ..base.types import Prompt
from ..batch.composer import Team
from ..config import Config, run_folder
from ..config.bounds import expand_home
from ..config.cli import remarks
from ..coordinator import Coordinator, SchedulingPolicy
from ..coordinator.messages import Finish
from ..data.loader import open_held_out, open_sources, open_warm_start
from ..data.sources import given
from ..hosts.orders import Begin, End, Start
from ..learner.policy_trainer import PolicyTrainer, check_algorithm
from ..report.display import Display
from ..report.metrics import MetricsLog, Summary, TrainingResult
from ..rewards import Scorer
from ..runtime.engine_pool import engines_sleep
from ..runtime.ports import EvaluationGivenUp
from ..runtime.runtime import Runtime
from .build import (
    check_reference,
    describe_model,
    export,
    export_adapters,
    open_play,
    preparing,
    sampling_params,
    server_checkpoint,
    training_prompts,
)
from .callbacks import Callback, Reporter, closing, opening, write_pictures
from .checkpoint import ResumeError
from .flux_api import FluxConfig
from .parts import HeldOut, assemble, held_out_prompts, make_pool, settled
from .run_state import RunState

if TYPE_CHECKING:
    from ..runtime.episodes import Episodes

_DURING = 64  # held-out prompts of a source in evaluations between the first and the last
_STOPPED = "stopped on request; the same command with this run_dir goes on"


class FluxTrainer:
    """Trains a model by reinforcement learning.

        trainer = FluxTrainer(config)
        result = trainer.fit()

    Public attributes are `config` (a copy that refuses changes), `model`, `processor`, `learner` (parameters on the
    mesh), `engine`, `coordinator`, `timeline` and `summary`. Raises `ConfigError` for settings that cannot work and
    `DataError` for data that cannot be read.
    """

    def __init__(
        self,
        config: Config,
        *,
        callbacks: Sequence[Callback] = (),
        display: Display | None = None,
        algorithm: object = None,
        policy: Callable[[], SchedulingPolicy] | None = None,
        rewards: Mapping[str, Any] | None = None,
        read_only: bool = False,
        gang: Team | None = None,
    ) -> None:
        """Builds the parts of the run, without training. `algorithm` (as `config.algorithm.name`), `policy` and
        `rewards` replace the settings of `config` (`examples/`). `policy` returns a new object whenever a run begins or
        is resumed. `rewards` has, for each source, a function, an object, or a dictionary of several by name. The run
        folder does not save these objects, so that a resumed run needs the same script. A `read_only` trainer changes
        nothing in an existing run folder, so that `load_checkpoint` and `evaluate` may be used while the run goes on.
        `gang` has the processes that train together, if there are several."""
        began = time.monotonic()
        if rewards is None and isinstance(config, FluxConfig) and config.reward is not None:
            rewards = dict.fromkeys(config.data.sources, config.reward.impl)
        # --- config -----------------------------------------------------------------------------
        config = copy.deepcopy(config)
        if algorithm is not None:
            config.algorithm.name = algorithm
        expand_home(config)
        config.validate()
        self.gang = gang = gang or Team()
        # A read-only trainer computes no loss, and may lack the run's own algorithm.
        self.algorithm = ALGORITHMS["grpo"] if read_only else find_algorithm(config.algorithm)
        if not read_only:
            check_algorithm(config, self.algorithm)
            check_reference(config)
        if not gang.alone:
            from ..hosts.gang import check_across_processes

            check_across_processes(config)
        summary = Summary(name=config.name, seed=config.seed)
        self.callbacks, self.display, self.timeline = list(callbacks), display or Display(config.steps), Timeline()
        self._runtime: Runtime | None = None
        self._stopping, self._own_policy = False, policy is not None
        self.run_dir, self._lock = (pathlib.Path(config.run_dir), None) if read_only else run_folder.create(config)
        if read_only:
            config.data.preprocessors = 0  # preprocessors would write logs
        run_dir, self._asked = self.run_dir, config
        with contextlib.ExitStack() as failed:
            failed.callback(self._unlock)

            # --- data ---------------------------------------------------------------------------
            with self.display, summary.stage("data"):
                self.sources, self.eval_sources = open_sources(config), open_held_out(config)

            with self.display, summary.stage("build"):
                # --- mesh, model and learner ----------------------------------------------------
                sizes, self.processor = describe_model(config, self.sources)
                token = secrets.token_hex(16)  # gives access to the engines of all processes
                gang.tell(Start(str(run_dir.absolute()), token, run_folder.to_json(config)))
                note = None if read_only else self.display.note
                self.config = config = settled(config, sizes, self.processor, gang, note, self._own_policy)
                self.parts = parts = assemble(
                    config, sizes, self.processor, self.algorithm, gang, run_dir, token, self._fetched, read_only
                )
                self.models, self.learner = parts.models, parts.learner
                self.pixels, self.vision = parts.pixels, parts.vision

                # --- engines --------------------------------------------------------------------
                checkpoint = lambda: server_checkpoint(config, run_dir, self.model, self.processor)  # noqa: E731
                self.pool = make_pool(parts, gang, token, checkpoint, run_dir / "servers", read_only)
                self.engines = self.pool.engines  # this list is changed in place by `set_parallelism`
                self.sampling = sampling_params(config, self.processor)

                # --- rewards --------------------------------------------------------------------
                self.rewards = Scorer(
                    config.data.sources,
                    self.processor.decode,
                    config.rewards,
                    given=rewards,
                    progress=lambda: self.coordinator.progress,
                    note=lambda source, text: self.summary.count_failure("rewards_failed", source, text),
                    give_up=lambda reason: self._runtime and self._runtime.request_stop(reason, failed=True),
                )
                if not read_only:
                    for held_out, sources in ((False, self.sources), (True, self.eval_sources)):
                        texts = {name: source.texts() for name, source in sources.items()}
                        self.rewards.check_answers(texts, held_out)

                # --- coordinator, and all that is saved with it ---------------------------------
                folder = None if read_only else run_dir / "observations"
                note = lambda name, text: self.summary.count_failure("environments_failed", name, text)  # noqa: E731
                self.play = open_play(config, self.processor, self.pixels.proxy, folder, note)
                prompts = training_prompts(config, self.sources, self.processor, **self._preparing)
                self.state = RunState(
                    parts, gang, prompts, self.rewards, summary, policy, self.play, began=began, read_only=read_only
                )
                self._held_out: HeldOut | None = None
            summary.parameters, summary.devices = parameter_count(parts.model), self.learner.mesh.size
            failed.pop_all()

    # --- the public face ------------------------------------------------------------------------

    @property
    def coordinator(self) -> Coordinator:
        return self.state.coordinator

    @property
    def summary(self) -> Summary:
        return self.state.summary

    @property
    def engine(self) -> Engine:
        """The engine that evaluates."""
        return self.engines[0]

    @property
    def model(self) -> Decoder:
        """The model with the learner's present weights."""
        return models.merge(models.split(self.parts.model)[0], self.weights())

    def weights(self) -> dict[str, Any]:
        """Returns the parameters, on the learner's mesh or, with several processes, in the memory of process 0."""
        self.gang.stepped(self.learner.idle)
        return self.gang.whole(self.learner.weights, self.learner.mesh)

    @property
    def _preparing(self) -> dict[str, Any]:
        """Arguments of `Preparer`."""
        return preparing(self.pixels, self.play)

    def _playing(self) -> contextlib.AbstractAsyncContextManager[Episodes | None]:
        return contextlib.nullcontext() if self.play is None else self.play.begun()

    @property
    def held_out(self) -> HeldOut:
        """The held-out prompts, which are prepared at the first use."""
        if self._held_out is None:
            count = self.config.evaluation.samples
            prompts = held_out_prompts(self.eval_sources, count, self.state.prompts, self.summary.count_skip)
            score, decode = self.rewards.score_text, self.processor.decode
            self._held_out = HeldOut(prompts, score, decode, self.sampling, stopping=lambda: self._stopping)
        return self._held_out

    def fit(
        self,
        prompts: Sequence[Prompt | str] | None = None,
        num_steps: int | None = None,
        *,
        eval_prompts: Sequence[Prompt | str] | None = None,
        eval_interval: int | None = None,
        checkpoint_interval: int | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> TrainingResult:
        """Runs to the end, from the checkpoint that `load_checkpoint` loaded, or else from the newest checkpoint of the
        run folder, or else from the start. Arguments replace settings of the configuration. The `source` of each prompt
        must be a source of the configuration, whose reward scores the prompt; texts are of its only source."""
        self._lock = self._lock or run_folder.lock(self.run_dir)
        asked = copy.deepcopy(self._asked)
        asked.steps = asked.steps if num_steps is None else num_steps
        asked.evaluation.every = asked.evaluation.every if eval_interval is None else eval_interval
        asked.checkpoint.every = asked.checkpoint.every if checkpoint_interval is None else checkpoint_interval
        asked.validate()
        self._asked = self.state.asked = asked
        if prompts is not None:
            self.sources = given(prompts, self.config.data)
            self.state.prompts.close()
            self.state.prompts = training_prompts(self.config, self.sources, self.processor, **self._preparing)
        if eval_prompts is not None:
            self.eval_sources, self._held_out = given(eval_prompts, self.config.data), None
        try:
            self._told = [*self.callbacks, *callbacks]
            with stop_on_signals(self.stop):
                return run_async(self._fit())
        finally:  # the next `fit` goes on from the newest checkpoint
            self._runtime, self.state.loaded = None, None
            self._stopping = self.display.stopping = False
            self.state.prompts.close()  # ends threads that read ahead
            self._unlock()

    def evaluate(self, limit: int | None = None, *, blind: bool = False) -> dict[str, float]:
        """Returns the held-out accuracy of each source under the present parameters. `blind` blanks all pixels."""

        async def measure() -> dict[str, float]:
            await self.engine.update_weights(self.learner.version, self.weights())
            await self.engine.wake()  # a run that failed may have left the engine asleep
            async with self._playing() as environments:
                return await self.held_out.accuracy(self.engine, limit, blind=blind, environments=environments)

        return run_async(measure())

    def stop(self) -> None:
        """Ends `fit` with a checkpoint after this step, or within it if dynamic sampling would draw more. A warm start
        is completed first; an evaluation is given up. Any thread or signal handler may call it."""
        self._stopping = self.display.stopping = True
        if self._runtime is not None:
            self._runtime.request_stop(_STOPPED)

    def save_checkpoint(self, path: str | pathlib.Path | None = None) -> None:
        """Saves the state after `fit` or `load_checkpoint`, and waits for the disk. With `path`, the checkpoint is
        copied there, too. Raises `ResumeError` if the state cannot be written, and before the first call of `fit` or
        `load_checkpoint`."""
        self.state.save_now()
        checkpoints = self.parts.checkpoints
        if not checkpoints.wait():
            raise ResumeError(f"the checkpoint could not be written to {checkpoints.folder}: {checkpoints.failed[-1]}")
        if path is not None:
            checkpoints.copy_to(pathlib.Path(path))

    def load_checkpoint(self, step: int | str | pathlib.Path | None = None) -> int:
        """Restores a checkpoint, by default the newest undamaged checkpoint of this run folder, onto this trainer's
        mesh. A path is that of a checkpoint which `save_checkpoint` copied; it becomes a checkpoint of this run folder,
        whose later checkpoints are dropped. `fit` then goes on from the checkpoint. Returns the step. Raises
        `ResumeError` if there is no checkpoint, or if it fits another model. The learner's arrays are freed before the
        checkpoint's arrays are read, except for arrays that an engine serves."""
        if isinstance(step, str | pathlib.Path):
            step = self.parts.checkpoints.copy_from(pathlib.Path(step))
        return self.state.load(step)

    def close(self) -> None:
        """Ends all threads, and waits for checkpoints under way."""
        self.state.prompts.close()
        if self.play is not None:
            self.play.close()
        self.rewards.close()
        self.pool.close()
        self.parts.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
        self._lock = None

    def __enter__(self) -> FluxTrainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if kind is None:
            self.gang.tell(End())

    # --- the chapters of fit --------------------------------------------------------------------

    async def _fit(self) -> TrainingResult:
        self._open()
        with self.display, contextlib.closing(self.metrics):
            self.pool.start(self.display.note)
            self.pixels.begin()
            async with self._playing() as self._environments:
                if self.state.loaded is None:
                    await self._warm_start()
                finish = await self._reinforce()
                if finish.complete:
                    await self._last_measurements()
            result = self._write_results(finish)
        self.tell(Callback.on_fit_end, result)
        return result

    def _open(self) -> None:
        state, checkpoints = self.state, self.parts.checkpoints
        resumed = state.resume()  # raises its errors before anything is written
        changes = [] if resumed is None else run_folder.changes(self._asked, self.run_dir)
        run_folder.write(self._asked, self.run_dir)
        if resumed is None:
            state.begin()
        else:
            checkpoints.forget_after(resumed)
        checkpoints.failed.clear()  # failures of an earlier `fit` are counted already
        with self.summary.stage("data"):
            _ = self.held_out  # prepared now, because the first evaluation should not wait
        shown = self.pool.servers, self.gang.statuses, self.pixels.preprocessors
        resume = None if resumed is None else {"rl": resumed, "eval": self.coordinator.evaluated_step}
        self.metrics = MetricsLog(self.run_dir, self.config.report, *shown, resume=resume)
        self.display.show(*shown)
        self.tell(Callback.on_fit_start)
        self.display.note(opening(self.summary, self.sources, self.run_dir, resumed))
        lines = remarks(self.config, self.summary.devices)
        for line in (*(f"changed by this resume: {change}" for change in changes), *lines):
            self.display.note(line)

    def tell(self, hook: Callable[..., None], *event: object) -> None:
        """Calls `hook`, a method of `Callback`, on every callback, in the order in which they were given."""
        for callback in self._told:
            getattr(callback, hook.__name__)(self, *event)

    async def _warm_start(self) -> None:
        config, composer = self.config, self.parts.composer
        total = config.warm_start.steps
        if total:
            from ..learner.warm_start import warm_start

            self.display.phase("warm start", total)
            self.gang.tell(Begin("warm_start"))
            with self.summary.stage("warm_start"):
                sources, skipped = open_warm_start(config), self.summary.count_skip
                play, parts = self.play and self.play.demonstrated, (self.learner, composer, sources, self.processor)
                steps = warm_start(config, *parts, skipped, self.gang, play, **self._preparing)
                async for step, metrics in steps:
                    self.gang.stepped(self.learner.idle)
                    self.metrics.log("warm_start", step, metrics)
                    self.display.step(step, metrics, {})
        self.gang.tell(Begin("rl", self.state.asked.steps))
        self.models.begin(self.state.asked.steps)
        if config.sharding.compile_ahead:  # no training program of RL has been compiled yet
            composer.shapes.begin_anew()
        self.state.started = True
        if total:  # a run that is killed before its next checkpoint need not repeat the warm start
            self.state.save_now()

    async def _reinforce(self) -> Finish:
        config, state = self.config, self.state
        await self.pool.set_parallelism(config.parallelism.degree)  # the coordinator's first degree
        weights = self.weights()
        await on_all(self.engines, lambda engine: engine.update_weights(self.learner.version, weights))
        self.display.phase("RL", state.asked.steps, done=self.coordinator.step)
        source = state.prompts
        if not self.gang.alone:
            from ..hosts.coming import ToldPrompts

            source = ToldPrompts(source, self.gang, self.pixels.place_of)
        composer = self.parts.composer
        trainer = PolicyTrainer(
            config, self.models, composer, self.engines, weights=self.weights, replay=state.replay, team=self.gang
        )
        self.pixels.begin_steps()
        self._runtime = Runtime(
            self.coordinator,
            engines=self.engines,
            prepared=state.prepared,
            draw=source.draw,
            score=self.rewards.score,
            trainer=trainer,
            evaluate=self._evaluated,
            checkpointer=state,
            sampling=self.sampling,
            seed=config.seed,
            observers=[Reporter(self)],
            timeline=self.timeline,
            tick=0.1 if config.speculative_sync else 0.0,
            set_parallelism=self.pool.set_parallelism,
            environments=self._environments,
            colocated=engines_sleep(config, self.gang.alone, self._own_policy),
        )
        if self._stopping:
            self._runtime.request_stop(_STOPPED)
        return await self._runtime.run()

    async def _evaluated(self, full: bool) -> dict[str, float]:
        """Returns the held-out accuracy of the engine's weights. Not `full`: at most `_DURING` prompts of a source."""
        samples = self.config.evaluation.samples
        with self.summary.stage("eval"):
            limit = samples if full else min(samples, _DURING)
            return await self.held_out.accuracy(self.engine, limit, environments=self._environments)

    async def _last_measurements(self) -> None:
        with self.summary.stage("eval"):
            limit = self.config.evaluation.samples
            self.summary.chance = self.held_out.chance(limit)
            if self.vision is not None:
                with contextlib.suppress(EvaluationGivenUp):
                    self.summary.blind = await self.held_out.accuracy(
                        self.engine, limit, blind=True, environments=self._environments
                    )

    def _write_results(self, finish: Finish) -> TrainingResult:
        config, summary, checkpoints = self.config, self.summary, self.parts.checkpoints
        summary.steps, summary.complete = finish.step, finish.complete
        with summary.stage("checkpoint"):
            checkpoints.wait()
        summary.checkpoints_failed += len(checkpoints.failed)
        with summary.stage("report"):
            export(self.model, self.processor, self.run_dir / "model")
            export_adapters(config, self.parts.model, self.learner, self.run_dir / "adapter", self.gang)
            write_pictures(self)
        self.state.count_total()
        summary.write(self.run_dir)
        self.display.note(closing(summary, finish.reason))
        self.display.note(f"see {self.run_dir}/learning.png, timeline.png, summary.json and model/")
        return TrainingResult(summary, self.run_dir)

    def _fetched(self, start: float, end: float, bytes: int) -> None:
        if self._runtime is not None:  # the timeline does not show the warm start
            self.timeline.add(Span("materialize", "materializer", start, end, self.coordinator.step + 1))
