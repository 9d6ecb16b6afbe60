"""`FluxTrainer` takes a run from its configuration to its summary. `train.py` is its command line."""

from __future__ import annotations

import contextlib
import copy
import json
import pathlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

import models
from models.config import Qwen25VLConfig
from models.decoder import Decoder, parameter_count
from rollout.engine import Engine

from ..algorithms import ALGORITHMS, find_algorithm
from ..base.event_loop import on_all, run_async, stop_on_signals
from ..base.timeline import Span, Timeline
from ..base.types import PreparedPrompt, Prompt
from ..config import Config, RolloutEngine, run_folder
from ..config.cli import remarks
from ..coordinator import SchedulingPolicy
from ..coordinator.factory import make_coordinator
from ..coordinator.messages import Finish
from ..data.loader import open_held_out, open_sources, open_warm_start
from ..data.prepare import Preparer
from ..data.sources import given
from ..hosts.gang import Gang, check_across_processes
from ..hosts.orders import Begin, End, Restore, Save, Start
from ..learner.policy_trainer import PolicyTrainer, check_algorithm
from ..learner.replay import ReplayBuffer, draws_of
from ..learner.run_models import RunModels
from ..report.display import Display
from ..report.metrics import MetricsLog, Summary, TrainingResult
from ..rewards import Scorer
from ..runtime.engine_pool import EnginePool, engine_count
from ..runtime.held_out import EvaluationGivenUp, HeldOut
from ..runtime.ports import PromptSource
from ..runtime.runtime import Runtime
from .artifacts import export, export_adapters, server_checkpoint, write_pictures
from .build import (
    build_critic,
    build_learning,
    check_reference,
    describe_model,
    open_pixels,
    sampling_params,
    training_prompts,
)
from .callbacks import GAP_ALARMS, Callback, Callbacks, Reporter, closing, opening
from .checkpoint import Checkpoints, ResumeError
from .evaluation import HeldOutEvaluator, held_out_prompts
from .gang_snapshots import GangSnapshots
from .pools import make_pool

if TYPE_CHECKING:
    from ..runtime.fleet_pool import FleetPool

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
        algorithm: object = None,
        policy: Callable[[], SchedulingPolicy] | None = None,
        rewards: Mapping[str, Any] | None = None,
        read_only: bool = False,
        gang: Gang | None = None,
    ) -> None:
        """Builds everything, starts nothing. `algorithm` (the same as `config.algorithm.impl`), `policy` and `rewards`
        replace those that `config` names (`examples/`): `policy` is called whenever a run begins or is resumed, and
        returns a new object each time; `rewards` has functions or objects by source, or, where a source has several,
        dictionaries of such by name. The run folder has the algorithm's name at most: resume it with the same script.
        `read_only` changes nothing in an existing run folder: to look at a run that may still be going on
        (`load_checkpoint`, `evaluate`). `gang`: the other processes that train along, if there are any; `main` finds
        them."""
        self.config = config = copy.deepcopy(config)
        if algorithm is not None:
            config.algorithm.impl = algorithm
        config.validate()
        self._asked = config.sharding.remat, config.rollout.engines  # before the devices here decide
        self.gang = gang or Gang()
        # Who only looks at a run computes no loss, and may not have what it was trained with.
        self.algorithm = ALGORITHMS["grpo"] if read_only else find_algorithm(config.algorithm)
        if not read_only:
            check_algorithm(config, self.algorithm)
            check_reference(config)
        if not self.gang.alone:
            check_across_processes(config)
        self.callbacks = list(callbacks)
        self.display = display or Display(config.steps)
        self._read_only = read_only
        self.run_dir, self._lock = (pathlib.Path(config.run_dir), None) if read_only else run_folder.create(config)
        if read_only:
            config.data.preprocessors = 0  # they would write logs
        self.timeline = Timeline()
        self.summary = Summary(name=config.name, seed=config.seed)
        self._policy, self._stopping, self._began = policy, False, time.monotonic()
        self._runtime: Runtime | None = None
        try:
            self._build(config, rewards)
        except BaseException:
            self._unlock()
            raise

    def _build(self, config: Config, rewards: Mapping[str, Any] | None) -> None:
        policy, read_only = self._policy, self._read_only

        # --- data -------------------------------------------------------------------------------
        with self.display, self.summary.stage("data"):
            self.sources = open_sources(config)
            self.eval_sources = open_held_out(config)

        with self.display, self.summary.stage("build"):
            # --- model and learner --------------------------------------------------------------
            sizes, self.processor = describe_model(config, self.sources)
            self.vision = sizes.vision if isinstance(sizes, Qwen25VLConfig) else None
            token = secrets.token_hex(16)  # of the engines of all processes
            self.gang.tell(Start(str(self.run_dir.absolute()), token, json.dumps(run_folder.to_json(config))))
            self.pixels = open_pixels(config, self.processor, self.gang, self.run_dir, token, self._fetched)
            learning = build_learning(
                config,
                sizes,
                self.processor,
                token_loss=self.algorithm.token_loss,
                note=None if read_only else self.display.note,
                links=self.gang.links,
                materializer=self.pixels.materializer,
            )
            self._model, self.learner, self.composer = learning.model, learning.learner, learning.composer
            self.gang.equip(config, self.pixels.place_of, self.pixels.expect)
            self.checkpoints = Checkpoints(
                self.run_dir / "checkpoints", config.checkpoint.keep, read_only=read_only, largest=learning.largest
            )
            # Who only looks at a run does not know its algorithm, but must read what it saved.
            judged = self.checkpoints.holds("critic") if read_only else self.algorithm.critic
            critic = build_critic(config, learning, self.gang.links, self.pixels.materializer) if judged else None
            never_sampled = self.processor.media_token_ids
            self.models = RunModels(config, self.algorithm, self.learner, critic, never_sampled)
            self.snapshots = GangSnapshots(config.checkpoint, self.run_dir, self.gang)

            # --- fleet --------------------------------------------------------------------------
            config.rollout.engines = engine_count(config, jax.local_devices(), self.gang.processes)
            config.validate_scheduling()  # now that their number is known
            self.pool: EnginePool | FleetPool
            if read_only:  # who looks at a run that goes on leaves its servers alone
                self.pool = EnginePool(config, self._model, fetch=self.pixels.fetch)
            else:
                self.pool = make_pool(
                    config,
                    self._model,
                    self.processor,
                    self.gang,
                    token=token,
                    checkpoint=lambda: server_checkpoint(config, self.run_dir, self.model, self.processor),
                    logs=self.run_dir / "servers",
                    fetch=self.pixels.fetch,
                )
            self.engines = self.pool.engines  # one list that changes with their degree
            self.engine: Engine = self.engines[0]  # the one that evaluates
            self.sampling = sampling_params(config, self.processor)
            self.rewards = Scorer(
                config.data.sources,
                self.processor.decode,
                config.rewards,
                given=rewards,
                progress=lambda: self.coordinator.progress,
                note=lambda source, text: self.summary.count_failed_reward(source, text),
                give_up=lambda reason: self._runtime and self._runtime.request_stop(reason, failed=True),
            )

            if not read_only:
                for held_out, sources in ((False, self.sources), (True, self.eval_sources)):
                    texts = {name: source.texts() for name, source in sources.items()}
                    self.rewards.check_answers(texts, held_out)

            # --- coordinator --------------------------------------------------------------------
            self.coordinator = make_coordinator(config, policy)
            self.replay = ReplayBuffer.of(config.replay)
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
        """The model's parameters as they are now: on the learner's mesh, or, of several processes, brought together."""
        self.gang.stepped(self.learner.idle)
        return self.gang.whole(self.learner.weights, self.learner.mesh)

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
        self._lock = self._lock or run_folder.lock(self.run_dir)
        config = self.config  # a copy of the caller's
        config.steps = config.steps if num_steps is None else num_steps
        config.evaluation.every = config.evaluation.every if eval_interval is None else eval_interval
        config.checkpoint.every = config.checkpoint.every if checkpoint_interval is None else checkpoint_interval
        config.validate()
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
            self._runtime, self._loaded = None, None
            self._stopping = self.display.stopping = False
            self.callbacks = own_callbacks
            self._close_source()  # no process outlives the run
            self._unlock()

    def evaluate(self, limit: int | None = None, *, blind: bool = False) -> dict[str, float]:
        """Returns the held-out accuracy of each source, with the parameters as they are; `blind` blanks all pixels."""

        async def measure() -> dict[str, float]:
            await self.engine.update_weights(self.learner.version, self.weights())
            return await self.held_out.accuracy(self.engine, limit, blind=blind)

        return run_async(measure())

    def stop(self) -> None:
        """Ends `fit` at the next step boundary, or within a step for which dynamic sampling would draw on, with a
        checkpoint; a warm start is completed first, an evaluation given up. From any thread or signal handler."""
        self._stopping = self.display.stopping = True
        if self._runtime is not None:
            self._runtime.request_stop(_STOPPED)

    def save_checkpoint(self) -> None:
        """Saves the state that `fit` or `load_checkpoint` left behind and waits for the disk.

        Raises `ResumeError` if it cannot be written, or before the first `fit`, when there is nothing to save;
        within `fit` checkpoints are saved by `checkpoint.every`.
        """
        if not self._started:
            raise ResumeError("there is nothing to save yet: the run has not started")
        self._save(self.coordinator.step, self._run_state())
        if not self.checkpoints.wait():
            raise ResumeError(f"not saved in {self.checkpoints.folder}: {self.checkpoints.failed[-1]}")

    def load_checkpoint(self, step: int | None = None) -> int:
        """Restores a checkpoint of this run folder, the newest by default, onto this trainer's mesh; `fit` goes on
        from there. Returns its step; raises `ResumeError` if there is none or it fits another model.

        The learner's arrays go before those of the checkpoint come, so that no device holds both (but for those that
        an engine serves)."""
        step = self.checkpoints.newest() if step is None else self.checkpoints.checked(step)
        self.gang.tell(Restore(step))
        return self._load(step, self.checkpoints.restore)

    def _load(self, step: int, restore: Callable[..., tuple[int, Any, dict[str, Any]]]) -> int:
        step, arrays, state = restore(self.models.abstract(), step, self.models.forget)
        self.models.load(arrays)
        self.coordinator = make_coordinator(self.config, self._policy)
        self.source.load_state_dict(state["source"])
        if not self._read_only:
            self.source.loader.check(state["source"].get("contents", {}))  # none in checkpoints of earlier releases
        held = state["coordinator"]["ledger"].get("entries", [])  # none in checkpoints of earlier releases
        self._held = {prepared.prompt.draw: prepared for prepared in self.source.again(entry["draw"] for entry in held)}
        self.coordinator.load_state_dict(
            state["coordinator"], {draw: ready.prompt for draw, ready in self._held.items()}
        )
        self.replay = ReplayBuffer.of(self.config.replay)
        if self.replay is not None:
            kept = state.get("replay", {})
            self.replay.load_state_dict(kept, {p.prompt.draw: p for p in self.source.again(draws_of(kept))})
        self.rewards.load_state_dict(state.get("rewards", {}))  # none in checkpoints of earlier releases
        self.summary = Summary.from_state_dict(state["summary"])
        self.composer.shapes.load_state(state.get("shapes", self.composer.shapes.state()))
        self.summary.devices = self.learner.mesh.size  # perhaps another mesh now
        self.summary.resumed_from.append(step)
        self._loaded, self._started = step, True
        return step

    def close(self) -> None:
        """Ends threads and waits for checkpoints under way. The end of `with trainer:` calls it."""
        self._close_source()
        self.rewards.close()
        self.models.close()
        self.checkpoints.close()
        self.pool.close()
        self.pixels.close()
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
        config = self.config
        self._resume()  # what is refused, is refused here: nothing is written before
        changes = self._keep_settings()
        resumed, summary = self._loaded, self.summary
        if resumed is None:
            self.coordinator = make_coordinator(self.config, self._policy)
            self.replay = ReplayBuffer.of(self.config.replay)
        else:
            self.checkpoints.forget_after(resumed)
        failed_before = len(self.checkpoints.failed)
        with self.summary.stage("data"):
            _ = self.held_out  # decoded now, not within the first evaluation
        shown = self.pool.servers, self.gang.statuses, self.pixels.preprocessors
        resume = None if resumed is None else {"rl": resumed, "eval": self.coordinator.evaluated_step}
        self.metrics = MetricsLog(self.run_dir, config.report, *shown, resume=resume)
        self.display.show(*shown)
        callbacks = Callbacks(self.callbacks, self)
        callbacks.tell(Callback.on_fit_start)
        with self.display, contextlib.closing(self.metrics):
            for line in (opening(summary, self.sources, self.run_dir, resumed), *changes, *remarks(config)):
                self.display.note(line)
            self.pool.start(self.display.note)
            self.pixels.begin()
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
                self.snapshots.remove()
            summary.checkpoints_failed += len(self.checkpoints.failed) - failed_before
            with self.summary.stage("report"):
                export(self.model, self.processor, self.run_dir / "model")
                export_adapters(self.config, self._model, self.learner, self.run_dir / "adapter", self.gang)
                write_pictures(self.run_dir, self.metrics.file, summary, self.timeline, self.pool, self.pixels)
            self._count_total()
            result = TrainingResult(summary, self.run_dir)
            summary.write(self.run_dir)
            self.display.note(closing(summary, finish.reason))
            self.display.note(f"see {self.run_dir}/learning.png, timeline.png, summary.json and model/")
        callbacks.tell(Callback.on_fit_end, result)
        return result

    def _resume(self) -> None:
        """Loads the state from which the run goes on, if it resumes one. Loads it again even if it is loaded already,
        for the steps, intervals and prompts that `fit` was given."""
        checkpoint = self._loaded
        if checkpoint is None:
            snapshot = self.snapshots.newest(self.models.abstract())
            checkpoint = self.checkpoints.undamaged(above=snapshot)
            if checkpoint is None and snapshot >= 0:
                self._load(snapshot, self.snapshots.restore)
                return
        if checkpoint is not None:
            self.load_checkpoint(checkpoint)
        self.snapshots.begin()

    def _keep_settings(self) -> list[str]:
        """Writes the settings to the run folder; if the run is resumed, returns those that change, as lines."""
        asked = copy.deepcopy(self.config)  # the folder may go on, or be evaluated, on other devices
        asked.sharding.remat, asked.rollout.engines = self._asked
        changes = run_folder.changes(asked, self.run_dir) if self._loaded is not None else []
        run_folder.write(asked, self.run_dir)
        return [f"changed by this resume: {change}" for change in changes]

    async def _serve(self, weights: dict[str, Any]) -> None:
        await on_all(self.engines, lambda engine: engine.update_weights(self.learner.version, weights))

    async def _warm_start(self) -> None:
        config = self.config
        total = config.warm_start.steps
        if total:
            from ..learner.warm_start import warm_start

            self.display.phase("warm start", total)
            self.gang.tell(Begin("warm_start"))
            with self.summary.stage("warm_start"):
                steps = warm_start(
                    config,
                    self.learner,
                    self.composer,
                    open_warm_start(config),
                    self.processor,
                    self.summary.count_skip,
                    self.pixels.proxy,
                    self.gang,
                )
                async for step, metrics in steps:
                    self.gang.stepped(self.learner.idle)
                    self.metrics.log("warm_start", step, metrics)
                    self.display.step(step, metrics, {})
        self.gang.tell(Begin("rl"))
        self.models.begin()
        if config.sharding.compile_ahead:  # RL's programs are others: none is there yet to serve in another's place
            self.composer.shapes.begin_anew()
        if total:  # a run that is killed before its first periodic checkpoint need not repeat the warm start
            self._save(0, self._run_state())
        self._started = True

    async def _reinforce(self, callbacks: Callbacks) -> Finish:
        config = self.config
        self.display.phase("RL", config.steps, done=self.coordinator.step)
        trainer = PolicyTrainer(
            config,
            self.models,
            self.composer,
            self.engines,
            weights=self.weights,
            replay=self.replay,
            team=self.gang,
        )
        self.pixels.begin_steps()
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
            pixels=self.pixels.metrics,
            rewards=self.rewards.metrics,
            gap_limit=GAP_ALARMS[config.model.compute_dtype],
        )
        self._runtime = Runtime(
            self.coordinator,
            engines=self.engines,
            prepared=self._held,
            source=self._told_prompts(),
            scorer=self.rewards,
            trainer=trainer,
            evaluator=HeldOutEvaluator(config, self.held_out, self.engine, self.summary),
            checkpointer=self,
            sampling=self.sampling,
            seed=config.seed,
            observers=[reporter],
            timeline=self.timeline,
            tick=0.1 if config.speculative_sync else 0.0,
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
                with contextlib.suppress(EvaluationGivenUp):
                    self.summary.blind = await self.held_out.accuracy(self.engine, limit, blind=True)

    # --- parts ----------------------------------------------------------------------------------

    def _told_prompts(self) -> PromptSource:
        """Returns the training prompts; if there are other processes, these hear of them."""
        if self.gang.alone:
            return self.source
        from ..hosts.coming import ToldPrompts

        return ToldPrompts(self.source, self.gang, self.pixels.place_of)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Starts a checkpoint, for the runtime; see `runtime.ports.Checkpointer`."""
        with self.summary.stage("checkpoint"):
            self._save(step, state)

    def snapshot(self, step: int, state: dict[str, Any]) -> None:
        """Saves like `save`, but in the memory of the hosts."""
        with self.summary.stage("checkpoint"):
            self.snapshots.write(step, self.models.arrays(), self._whole_state(state))

    def _save(self, step: int, state: dict[str, Any]) -> None:
        arrays = self.models.arrays()
        if self.checkpoints.may_save(step, arrays):
            self.gang.tell(Save(step))
            self.checkpoints.write(step, arrays, self._whole_state(state))

    def _run_state(self) -> dict[str, Any]:
        """Returns the state of the run as the runtime takes it."""
        return {
            "coordinator": self.coordinator.state_dict(),
            "source": self.source.state_dict(),
            "rewards": self.rewards.state_dict(),
        }

    def _whole_state(self, state: dict[str, Any]) -> dict[str, Any]:
        self._count_total()
        parts = {"summary": self.summary.state_dict()}
        if self.replay is not None:
            parts["replay"] = self.replay.state_dict()
        return state | parts | {"shapes": self.composer.shapes.state()}

    def _count_total(self) -> None:
        now = time.monotonic()
        self.summary.add_seconds("total", now - self._began)
        self._began = now

    @property
    def source(self) -> Preparer:
        """The training prompts in the order of their draws, decoded ahead of time."""
        if self._source is None:
            self._source = training_prompts(self.config, self.sources, self.processor, self.pixels.proxy)
        return self._source

    def _fetched(self, start: float, end: float, bytes: int) -> None:
        if self._runtime is not None:  # a warm start has no stages
            self.timeline.add(Span("materialize", "materializer", start, end, self.coordinator.step + 1))

    def _close_source(self) -> None:
        if self._source is not None:
            self._source.close()

    @property
    def held_out(self) -> HeldOut:
        """The held-out prompts, looked at once and kept."""
        if self._held_out is None:
            count = self.config.evaluation.samples
            prompts = held_out_prompts(self.eval_sources, count, self.source, self.summary.count_skip)
            score, decode = self.rewards.score_text, self.processor.decode
            self._held_out = HeldOut(prompts, score, decode, self.sampling, stopping=lambda: self._stopping)
        return self._held_out
