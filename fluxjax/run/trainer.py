"""`FluxTrainer` takes a run from its configuration to its summary. `train.py` is its command line."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

import models
from models.config import Qwen25VLConfig
from models.decoder import Decoder, parameter_count
from rollout.engine import Engine
from sharding.weights import like

from ..algorithms import ALGORITHMS, AlgorithmModule
from ..base.errors import DataError
from ..base.event_loop import on_all, run_async, stop_on_signals
from ..base.timeline import Timeline
from ..base.types import PreparedPrompt, Prompt
from ..batch.composer import Composer
from ..config import Config, RolloutEngine, run_folder
from ..config.cli import remarks
from ..coordinator import SchedulingPolicy
from ..coordinator.factory import make_coordinator
from ..coordinator.messages import Finish
from ..data.loader import PromptLoader, read_row
from ..data.prepare import Preparer
from ..data.sources import given, open_held_out, open_sources, open_warm_start
from ..hosts.gang import Gang, SharedComposer, check_across_processes
from ..hosts.orders import Begin, End, Restore, Save, Start
from ..learner.policy_trainer import PolicyTrainer
from ..learner.warm_start import warm_start
from ..report import pictures
from ..report.display import Display
from ..report.metrics import MetricsLog, Summary, TrainingResult, read
from ..rewards import Scorer
from ..runtime.engine_pool import EnginePool, engine_count
from ..runtime.fleet_pool import FleetPool
from ..runtime.held_out import HeldOut
from ..runtime.runtime import Runtime
from .build import build_learning, describe_model, sampling_params
from .callbacks import Callback, Callbacks, Reporter, closing, opening
from .checkpoint import Checkpoints, ResumeError
from .evaluation import HeldOutEvaluator

log = logging.getLogger(__name__)
_STOPPED = "stopped on request; the same command with this run_dir goes on"


class FluxTrainer:
    """Trains a model by reinforcement learning.

        trainer = FluxTrainer(config)
        result = trainer.fit()

    Everything it builds is open to inspection: `model`, `processor`, `learner` (parameters on the mesh), `engine`,
    `coordinator`, `timeline`, `summary`. Raises `ConfigError` for settings that cannot work and `DataError` for data
    that cannot be read.
    """

    def __init__(
        self,
        config: Config,
        *,
        callbacks: Sequence[Callback] = (),
        display: Display | None = None,
        algorithm: AlgorithmModule | None = None,
        policy: Callable[[], SchedulingPolicy] | None = None,
        read_only: bool = False,
        gang: Gang | None = None,
    ) -> None:
        """Builds everything, starts nothing. `algorithm` and `policy` replace those that `config` names (`examples/`);
        `policy` is called whenever a run begins or is resumed, and returns a new object each time. The run folder does
        not say that it has them: resume it with the same script. `read_only` changes nothing in an existing run
        folder: to look at a run that may still be going on (`load_checkpoint`, `evaluate`). `gang`: the other
        processes that train along, if there are any; `main` finds them."""
        config.validate()
        self.config = config = copy.deepcopy(config)
        self._asked = config.sharding.remat, config.policy.engines  # before the devices here decide
        self.gang = gang or Gang()
        if not self.gang.alone:
            check_across_processes(config)
        self.callbacks = list(callbacks)
        self.display = display or Display(config.steps)
        self.run_dir = pathlib.Path(config.run_dir) if read_only else run_folder.create(config)
        self.timeline = Timeline(keep_steps=config.report.timeline_steps)
        self.summary = Summary(name=config.name, seed=config.seed)
        self._policy = policy
        self._runtime: Runtime | None = None
        self._stopping = False
        self._began = time.monotonic()

        # --- data -------------------------------------------------------------------------------
        with self.summary.stage("data"):
            self.sources = open_sources(config.data)
            self.eval_sources = open_held_out(config.data)

        with self.summary.stage("build"):
            # --- model and learner --------------------------------------------------------------
            sizes, self.processor = describe_model(config, self.sources)
            self.vision = sizes.vision if isinstance(sizes, Qwen25VLConfig) else None
            self.algorithm = algorithm or ALGORITHMS[config.algorithm.name]
            self.gang.tell(Start(str(self.run_dir.absolute())))
            note = None if read_only else self.display.note
            learning = build_learning(
                config,
                sizes,
                self.processor,
                token_loss=self.algorithm.token_loss,
                note=note,
                make_composer=Composer if self.gang.alone else functools.partial(SharedComposer, self.gang),
                links=self.gang.links,
            )
            self._model, self.learner, self.composer = learning.model, learning.learner, learning.composer
            self.reference: dict[str, Any] | None = None  # frozen parameters, where there is a KL term
            self.checkpoints = Checkpoints(
                self.run_dir / "checkpoints", config.checkpoint.keep, read_only=read_only, largest=learning.largest
            )

            # --- fleet --------------------------------------------------------------------------
            config.policy.engines = engine_count(config, jax.local_devices())
            config.validate_scheduling()  # now that their number is known
            self.pool: EnginePool | FleetPool
            # Who looks at a run that goes on leaves its servers alone.
            if config.rollout.engine is RolloutEngine.JAX or read_only:
                self.pool = EnginePool(config, self._model)
            else:
                self.pool = FleetPool(config, self._model, self._server_checkpoint(), self.run_dir / "servers")
            self.engines = self.pool.engines  # one list that changes with their degree
            self.engine: Engine = self.engines[0]  # the one that evaluates
            self.sampling = sampling_params(config, self.processor)
            self.rewards = Scorer(config.data.sources, self.processor.decode)

            # --- coordinator --------------------------------------------------------------------
            self.coordinator = make_coordinator(config, policy)
            self._held: dict[int, PreparedPrompt] = {}  # prompts in the books of a resumed run, by draw
            self._loaded: int | None = None  # the step of the checkpoint that `fit` goes on from
            self._started = False  # whether the warm start is behind
            self._source: Preparer | None = None
            self._held_out: HeldOut | None = None
        self.summary.parameters = parameter_count(self._model)
        self.summary.devices = self.learner.mesh.size

    # --- the public face ------------------------------------------------------------------------

    @property
    def model(self) -> Decoder:
        """The model with the weights that the learner has now."""
        return models.merge(models.split(self._model)[0], self.weights())

    def weights(self) -> dict[str, Any]:
        """The learner's parameters: on its mesh, or, of several processes, brought together in this one's memory."""
        self.gang.stepped(self.learner.idle)
        return self.gang.whole(self.learner.params, self.learner.mesh)

    def fit(
        self,
        prompts: Sequence[Prompt] | None = None,
        num_steps: int | None = None,
        *,
        eval_prompts: Sequence[Prompt] | None = None,
        eval_interval: int | None = None,
        checkpoint_interval: int | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> TrainingResult:
        """Runs to the end, or on from the newest checkpoint of the run folder. What is not given, the configuration
        says. The `source` of own `prompts` must be one that the configuration names: it has their reward."""
        config = self.config  # a copy of the caller's
        config.steps = config.steps if num_steps is None else num_steps
        config.evaluation.every = config.evaluation.every if eval_interval is None else eval_interval
        config.checkpoint.every = config.checkpoint.every if checkpoint_interval is None else checkpoint_interval
        config.validate()
        asked = copy.deepcopy(config)  # the folder may go on, or be evaluated, on other devices
        asked.sharding.remat, asked.policy.engines = self._asked
        run_folder.write(asked, self.run_dir)
        own_callbacks = self.callbacks
        if prompts is not None:
            self.sources = given(prompts, config.data)
            self._close_source()
            self._source = None
        if eval_prompts is not None:
            self.eval_sources = given(eval_prompts, config.data)
            self._held_out = None
        try:
            self.callbacks = [*own_callbacks, *callbacks]
            with stop_on_signals(self.stop):
                return run_async(self._fit(), on_interrupt=self.stop)
        finally:  # the next `fit` goes on from the newest checkpoint
            self._runtime, self._stopping, self._loaded = None, False, None
            self.callbacks = own_callbacks
            self._close_source()  # no process outlives the run

    def evaluate(self, limit: int | None = None, *, blind: bool = False) -> dict[str, float]:
        """Returns the held-out accuracy of each source, with the parameters as they are; `blind` blanks all pixels."""

        async def measure() -> dict[str, float]:
            await self.engine.update_weights(self.learner.version, self.weights())
            return await self.held_out.accuracy(self.engine, limit, blind=blind)

        return run_async(measure())

    def stop(self) -> None:
        """Ends `fit` at the next step boundary, or within a step for which dynamic sampling would draw on, with a
        checkpoint; a warm start is completed first. From any thread or signal handler."""
        self._stopping = True
        if self._runtime is not None:
            self._runtime.request_stop(_STOPPED)

    def save_checkpoint(self) -> None:
        """Saves the state that `fit` or `load_checkpoint` left behind and waits for the disk.

        Raises `ResumeError` if it cannot be written, or before the first `fit`, when there is nothing to save;
        within `fit` checkpoints are saved by `checkpoint.every`.
        """
        if not self._started:
            raise ResumeError("there is nothing to save yet: the run has not started")
        state = {"coordinator": self.coordinator.state_dict(), "source": self.source.state_dict()}
        self._save(self.coordinator.step, state)
        if not self.checkpoints.wait():
            raise ResumeError(f"not saved in {self.checkpoints.folder}: {self.checkpoints.failed[-1]}")

    def load_checkpoint(self, step: int | None = None) -> int:
        """Restores a checkpoint of this run folder, the newest by default, onto this trainer's mesh; `fit` goes on
        from there. Returns its step; raises `ResumeError` if there is none or it fits another model.

        The learner's arrays go before those of the checkpoint come, so that no device holds both (but for those that
        an engine serves)."""
        step = self.checkpoints.newest() if step is None else step
        self.gang.tell(Restore(step))
        wanted = {"learner": self.learner.state()}
        if self.config.algorithm.kl_coefficient:
            wanted["reference"] = self.learner.params
        abstract = like(wanted)
        del wanted
        step, arrays, state = self.checkpoints.restore(abstract, step, self._forget_arrays)
        self.learner.reset(self.algorithm.token_loss, never_sampled=self.sampling.forbidden_ids)
        self.learner.load_state(arrays.pop("learner"))
        self.reference = arrays.get("reference")
        self.coordinator = make_coordinator(self.config, self._policy)
        self.source.load_state_dict(state["source"])
        held = state["coordinator"]["ledger"].get("entries", [])  # none in checkpoints of earlier releases
        self._held = {prepared.prompt.draw: prepared for prepared in self.source.again(entry["draw"] for entry in held)}
        self.coordinator.load_state_dict(
            state["coordinator"], {draw: ready.prompt for draw, ready in self._held.items()}
        )
        self.summary = Summary.from_state_dict(state["summary"])
        self.composer.shapes.load_state(state.get("shapes", self.composer.shapes.state()))
        self.summary.devices = self.learner.mesh.size  # perhaps another mesh now
        self.summary.resumed_from.append(step)
        self._loaded, self._started = step, True
        return step

    def _forget_arrays(self) -> None:
        self.reference = None
        self.learner.forget()

    def close(self) -> None:
        """Ends threads and waits for checkpoints under way. The end of `with trainer:` calls it."""
        self._close_source()
        self.learner.gradients.close()
        self.checkpoints.close()
        self.pool.close()

    def __enter__(self) -> FluxTrainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.gang.tell(End())
        self.close()

    # --- the chapters of fit --------------------------------------------------------------------

    async def _fit(self) -> TrainingResult:
        config, summary = self.config, self.summary
        if self._loaded is not None or self.checkpoints.latest() is not None:
            self.load_checkpoint(self._loaded)  # again, for what `fit` was given: steps, intervals, prompts
        resumed, summary = self._loaded, self.summary
        if resumed is None:
            self.coordinator = make_coordinator(self.config, self._policy)
        else:
            self.checkpoints.forget_after(resumed)
        failed_before = len(self.checkpoints.failed)
        with self.summary.stage("data"):
            _ = self.held_out  # decoded now, not within the first evaluation
        self.metrics = MetricsLog(
            self.run_dir,
            resume_step=resumed,
            evaluated_step=self.coordinator.evaluated_step,
            prometheus_port=config.report.prometheus_port,
            prometheus_host=config.report.prometheus_host,
        )
        self.metrics.export_servers(self.pool.servers)
        self.metrics.export_hosts(self.gang.statuses)
        self.display.show_servers(self.pool.servers)
        self.display.show_hosts(self.gang.statuses)
        callbacks = Callbacks(self.callbacks, self)
        callbacks.tell(Callback.on_fit_start)
        with self.display, contextlib.closing(self.metrics):
            for line in (opening(summary, self.sources, self.run_dir, resumed), *remarks(config)):
                self.display.note(line)
            self.pool.start(self.display.note)
            if resumed is None:
                await self._warm_start()
            await self.pool.set_parallelism(config.parallelism.degree)  # where the coordinator begins
            await self._serve(self.weights())
            finish = await self._reinforce(callbacks)
            summary.steps, summary.complete = finish.step, finish.complete
            if finish.complete:
                await self._last_measurements()
            with self.summary.stage("checkpoint"):
                self.checkpoints.wait()
            summary.checkpoints_failed += len(self.checkpoints.failed) - failed_before
            with self.summary.stage("report"):
                self._write_report()
            self._count_total()
            result = TrainingResult(summary, self.run_dir)
            summary.write(self.run_dir)
            self.display.note(closing(summary, finish.reason))
            self.display.note(f"see {self.run_dir}/learning.png, timeline.png, summary.json and model/")
        callbacks.tell(Callback.on_fit_end, result)
        return result

    async def _serve(self, weights: dict[str, Any]) -> None:
        await on_all(self.engines, lambda engine: engine.update_weights(self.learner.version, weights))

    async def _warm_start(self) -> None:
        config = self.config
        total = config.warm_start.steps
        if total:
            self.display.phase("warm start", total)
            self.gang.tell(Begin("warm_start"))
            with self.summary.stage("warm_start"):
                steps = warm_start(
                    config,
                    self.learner,
                    self.composer,
                    open_warm_start(config.data),
                    self.processor,
                    self.summary.count_skip,
                )
                async for step, metrics in steps:
                    self.gang.stepped(self.learner.idle)
                    self.metrics.log("warm_start", step, metrics)
                    self.display.step(step, metrics, {})
        self.gang.tell(Begin("rl"))
        self.learner.reset(self.algorithm.token_loss, never_sampled=self.sampling.forbidden_ids)
        if config.sharding.compile_ahead:  # RL's programs are others: none is there yet to serve in another's place
            self.composer.shapes.begin_anew()
        if config.algorithm.kl_coefficient:
            self.reference = self.learner.params
        if total:  # a run that is killed before its first periodic checkpoint need not repeat the warm start
            self._save(0, {"coordinator": self.coordinator.state_dict(), "source": self.source.state_dict()})
        self._started = True

    async def _reinforce(self, callbacks: Callbacks) -> Finish:
        config = self.config
        self.display.phase("RL", config.steps, done=self.coordinator.step)
        trainer = PolicyTrainer(
            config,
            self.learner,
            self.composer,
            self.reference,
            self.engines,
            self.algorithm,
            weights=self.weights,
        )
        reporter = Reporter(
            config.report,
            run_dir=self.run_dir,
            summary=self.summary,
            metrics=self.metrics,
            display=self.display,
            decode=self.processor.decode,
            callbacks=callbacks,
            servers=self.pool.servers,
            gang=self.gang,
            timeline=self.timeline,
        )
        self._runtime = Runtime(
            self.coordinator,
            engines=self.engines,
            prepared=self._held,
            source=self.source,
            scorer=self.rewards,
            trainer=trainer,
            evaluator=HeldOutEvaluator(config, self.held_out, self.engine, self.summary),
            checkpointer=self,
            sampling=self.sampling,
            seed=config.seed,
            observers=[reporter],
            timeline=self.timeline,
            tick=0.1 if config.speculative_sync.enabled else 0.0,
            pool=self.pool,
            colocated=config.rollout.engine is not RolloutEngine.JAX and config.servers.colocated,
        )
        if self._stopping:
            self._runtime.request_stop(_STOPPED)
        return await self._runtime.run()

    async def _last_measurements(self) -> None:
        with self.summary.stage("eval"):
            limit = self.config.evaluation.samples
            self.summary.chance = self.held_out.chance(limit)
            if self.vision is not None:
                self.summary.blind = await self.held_out.accuracy(self.engine, limit, blind=True)

    def _write_report(self) -> None:
        folder = self.run_dir / "model"
        models.save(self.model, folder)
        self.processor.save(folder)
        controls = {"blind": self.summary.blind, "chance": self.summary.chance}
        pictures.learning_curve(read(self.metrics.file), controls, self.run_dir / "learning.png")
        spans = self.timeline.spans()
        last = max((span.end for span in spans if span.name == "sync"), default=0.0)
        stages = [span for span in spans if span.name != "eval" and span.start < last]  # evaluations dwarf the steps
        if stages:  # a run that was complete before keeps its picture
            pictures.timeline(self.pool.lanes(stages), self.run_dir / "timeline.png")

    # --- parts ----------------------------------------------------------------------------------

    def _server_checkpoint(self) -> pathlib.Path:
        """A folder that rollout servers can start from. Their weights come later, so any will do."""
        if self.config.model.path:
            return pathlib.Path(self.config.model.path)
        folder = self.run_dir / "servers" / "model"
        models.save(self.model, folder)
        self.processor.save(folder)
        return folder

    def save(self, step: int, state: dict[str, Any]) -> None:
        """For the runtime: starts a checkpoint; see `runtime.ports.Checkpointer`."""
        with self.summary.stage("checkpoint"):
            self._save(step, state)

    def _save(self, step: int, state: dict[str, Any]) -> None:
        self._count_total()
        arrays = self._arrays()
        if self.checkpoints.may_save(step, arrays):
            self.gang.tell(Save(step))
            shapes = self.composer.shapes.state()
            self.checkpoints.write(step, arrays, state | {"summary": self.summary.state_dict(), "shapes": shapes})

    def _count_total(self) -> None:
        now = time.monotonic()
        self.summary.add_seconds("total", now - self._began)
        self._began = now

    def _arrays(self) -> dict[str, Any]:
        arrays = {"learner": self.learner.state()}
        return arrays if self.reference is None else arrays | {"reference": self.reference}

    @property
    def source(self) -> Preparer:
        """The training prompts in the order of their draws, decoded ahead of time."""
        if self._source is None:
            weights = {name: self.config.data.sources[name].weight for name in self.sources}
            self._source = Preparer(self.processor, PromptLoader(self.sources, weights, self.config.seed), self.config)
        return self._source

    def _close_source(self) -> None:
        if self._source is not None:
            self._source.close()

    @property
    def held_out(self) -> HeldOut:
        """The held-out prompts, decoded once and kept."""
        if self._held_out is None:
            prompts = {}
            for name, source in self.eval_sources.items():
                count = min(self.config.evaluation.samples, len(source))
                prepared, skipped = self.source.prepare_all(read_row(source, name, row) for row in range(count))
                for _, reason in skipped:
                    self.summary.count_skip(f"held out: {reason}")
                if not prepared:
                    reason = skipped[0][1]
                    raise DataError(f"data.sources.{name}: none of {count} held-out prompts can be used: {reason}")
                prompts[name] = prepared
            self._held_out = HeldOut(prompts, self.rewards.score_text, self.processor.decode, self.sampling)
        return self._held_out
