"""`FluxTrainer`: a run from its configuration to its summary. `train.py` is the command line around it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import pathlib
import signal
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import models
from models.config import Qwen25VLConfig
from models.decoder import parameter_count
from rollout.engine import SamplingParams
from rollout.jax_engine import JaxEngine

from . import run_folder
from .algorithms import ALGORITHMS
from .build import build_model
from .callbacks import Callback
from .checkpoint import CheckpointError, Checkpoints, like
from .config import Config
from .coordinator import Coordinator, Settings, Synchronous
from .coordinator.messages import Finish
from .data import Source, open_held_out, open_sources
from .data.errors import DataError
from .data.loader import PromptLoader
from .data.prepare import Preparer
from .held_out import HeldOut
from .learner import GAP, Learner
from .report import pictures
from .report.display import Display
from .report.metrics import MetricsLog, read
from .report.samples import dump_samples
from .report.summary import Summary
from .rewards import Scorer
from .runtime import Observer, Runtime, StepReport
from .stages import HeldOutEvaluator, PolicyTrainer
from .timeline import Timeline
from .types import Prompt
from .warm_start import warm_start

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """What `fit` returns: the summary that is also in `run_dir/summary.json`, and where things lie."""

    summary: Summary
    run_dir: pathlib.Path

    @property
    def model_dir(self) -> pathlib.Path:
        """The trained model as a Hugging Face folder, with its tokenizer and preprocessor settings."""
        return self.run_dir / "model"


class FluxTrainer:
    """Trains a model by reinforcement learning.

        trainer = FluxTrainer(config)
        result = trainer.fit()

    Everything it builds is open to inspection: `model`, `processor`, `learner` (parameters on the mesh), `engine`,
    `coordinator`, `timeline`, `summary`. Raises `ConfigError` for settings that cannot work and `DataError` for data
    that cannot be read.
    """

    def __init__(self, config: Config, *, callbacks: Sequence[Callback] = (), display: Display | None = None) -> None:
        config.validate()
        self.config = config
        self.callbacks = list(callbacks)
        self.display = display or Display(config.steps)
        self.run_dir = run_folder.create(config)
        self.timeline = Timeline(keep_steps=config.report.timeline_steps)
        self.summary = Summary(name=config.name, seed=config.seed)
        self._runtime: Runtime | None = None

        # --- data -------------------------------------------------------------------------------
        with self._stage("data"):
            self.sources = open_sources(config.data)
            self.eval_sources = open_held_out(config.data)

        with self._stage("build"):
            # --- model --------------------------------------------------------------------------
            texts = (text for source in self.sources.values() for text in source.texts())
            self.model, self.processor = build_model(config, texts)
            self.vision = self.model.config.vision if isinstance(self.model.config, Qwen25VLConfig) else None

            # --- mesh and learner ---------------------------------------------------------------
            self.algorithm = ALGORITHMS[config.algorithm.name]
            self.learner = Learner(config, self.model, self.algorithm.token_loss)
            self.reference: dict[str, Any] | None = None  # frozen parameters, where there is a KL term
            self.checkpoints = Checkpoints(self.run_dir / "checkpoints", config.checkpoint.keep)

            # --- fleet --------------------------------------------------------------------------
            rollout = config.rollout
            self.engine = JaxEngine(
                self.model,
                slots=rollout.slots,
                max_sequence_tokens=rollout.max_sequence_tokens,
                compute_dtype=config.model.compute_dtype.value,
            )
            self.sampling = SamplingParams(
                max_new_tokens=rollout.max_new_tokens,
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                stop_ids=self.processor.eos_ids,
                forbidden_ids=self.processor.media_token_ids,
            )
            self.rewards = Scorer(config.data.sources, self.processor.decode)

            # --- coordinator --------------------------------------------------------------------
            self.coordinator = self._new_coordinator()
        self.summary.parameters = parameter_count(self.model)
        self.summary.devices = self.learner.mesh.size

    def _new_coordinator(self) -> Coordinator:
        config = self.config
        settings = Settings(
            steps=config.steps,
            prompts_per_step=config.rollout.prompts_per_step,
            group_size=config.rollout.group_size,
            evaluate_every=config.evaluation.every,
            checkpoint_every=config.checkpoint.every,
        )
        return Coordinator(settings, Synchronous())

    # --- the public face ------------------------------------------------------------------------

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
        config = self.config
        config.steps = num_steps or config.steps
        config.evaluation.every = config.evaluation.every if eval_interval is None else eval_interval
        config.checkpoint.every = config.checkpoint.every if checkpoint_interval is None else checkpoint_interval
        self.callbacks += callbacks
        if prompts is not None:
            self.sources = _by_source(prompts, config)
        if eval_prompts is not None:
            self.eval_sources = _by_source(eval_prompts, config)
        return run_async(self._fit())

    def evaluate(self, limit: int | None = None, *, blind: bool = False) -> dict[str, float]:
        """Held-out accuracy a source of the parameters as they are; `blind` blanks all pixels."""

        async def measure() -> dict[str, float]:
            await self.engine.update_weights(self.learner.version, self.learner.params)
            return await self.held_out.accuracy(self.engine, limit, blind=blind)

        return run_async(measure())

    def stop(self) -> None:
        """Ends `fit` at the next step boundary, with a checkpoint. From any thread or signal handler."""
        if self._runtime is not None:
            self._runtime.request_stop("stopped on request; the same command with this run_dir goes on")

    def save_checkpoint(self) -> None:
        """Saves the state of a finished or not yet started `fit` now and waits for the disk.

        Raises `CheckpointError` if it cannot be written; within `fit` checkpoints are saved by `checkpoint.every`.
        """
        state = {"coordinator": self.coordinator.state_dict(), "source": self.source.state_dict()}
        self._save(self.coordinator.step, state)
        if not self.checkpoints.wait():
            raise CheckpointError(f"not saved in {self.checkpoints.folder}: {self.checkpoints.failed[-1]}")

    def load_checkpoint(self, step: int | None = None) -> int:
        """Restores a checkpoint of this run folder, the newest by default, onto this trainer's mesh; `fit` goes on
        from there. Returns its step; raises `CheckpointError` if there is none or it fits another model."""
        self.learner.reset(self.algorithm.token_loss)
        if self.config.algorithm.kl_coefficient:
            self.reference = self.learner.params
        step, arrays, state = self.checkpoints.restore(like(self._arrays()), step)
        self.learner.load_state(arrays["learner"])
        self.reference = arrays.get("reference")
        self.coordinator = self._new_coordinator()
        self.coordinator.load_state_dict(state["coordinator"])
        self.source.load_state_dict(state["source"])
        self.summary = Summary.from_state_dict(state["summary"])
        self.summary.resumed_from.append(step)
        return step

    # --- the chapters of fit --------------------------------------------------------------------

    async def _fit(self) -> TrainingResult:
        config, summary = self.config, self.summary
        began = time.monotonic()
        with self._stage("data"):
            self.source = self._new_source()
            self.held_out = self._new_held_out()
        resumed = self.load_checkpoint() if self.checkpoints.latest() is not None else None
        summary = self.summary
        self.metrics = MetricsLog(self.run_dir, resume_step=resumed, prometheus_port=config.report.prometheus_port)
        self._call(lambda callback: callback.on_fit_start(self))
        with self.display, contextlib.closing(self.metrics):
            self.display.note(self._opening(resumed))
            if resumed is None:
                await self._warm_start()
            await self.engine.update_weights(self.learner.version, self.learner.params)
            finish = await self._reinforce()
            summary.steps, summary.complete = finish.step, finish.complete
            if finish.complete:
                await self._last_measurements()
            with self._stage("checkpoint"):
                self.checkpoints.wait()
            summary.checkpoints_failed = len(self.checkpoints.failed)
            with self._stage("report"):
                self._write_report()
            summary.add_seconds("total", time.monotonic() - began)
            result = TrainingResult(summary, self.run_dir)
            summary.write(self.run_dir)
            self.display.note(self._closing(finish))
        self._call(lambda callback: callback.on_fit_end(self, result))
        await self._close()
        return result

    async def _warm_start(self) -> None:
        config = self.config
        total = config.warm_start.steps
        if total:
            self.display.phase("warm start", total)
            with self._stage("warm_start"):
                steps = warm_start(config, self.learner, self.sources, self.processor, self.vision)
                async for step, metrics in steps:
                    self.metrics.log("warm_start", step, metrics)
                    self.display.step(step, metrics, {})
            self.learner.reset(self.algorithm.token_loss)
        if config.algorithm.kl_coefficient:
            self.reference = self.learner.params
        # A run that is killed before its first periodic checkpoint need not repeat the warm start.
        self._save(0, {"coordinator": self.coordinator.state_dict(), "source": self.source.state_dict()})

    async def _reinforce(self) -> Finish:
        config = self.config
        self.display.phase("RL", config.steps, done=self.coordinator.step)
        trainer = PolicyTrainer(config, self.learner, self.vision, self.reference)
        self._runtime = Runtime(
            self.coordinator,
            engines=[self.engine],
            source=self.source,
            scorer=self.rewards,
            trainer=trainer,
            evaluator=HeldOutEvaluator(config, self.held_out, self.engine),
            checkpointer=self,
            sampling=self.sampling,
            seed=config.seed,
            observers=[_Reporter(self, trainer)],
            timeline=self.timeline,
        )
        with _stop_on_signals(self.stop):
            return await self._runtime.run()

    async def _last_measurements(self) -> None:
        with self._stage("eval"):
            limit = self.config.evaluation.samples
            self.summary.chance = self.held_out.chance(limit)
            if self.vision is not None:
                self.summary.blind = await self.held_out.accuracy(self.engine, limit, blind=True)

    def _write_report(self) -> None:
        folder = self.run_dir / "model"
        models.save(models.merge(models.split(self.model)[0], self.learner.params), folder)
        self.processor.save(folder)
        controls = {"blind": self.summary.blind, "chance": self.summary.chance}
        pictures.learning_curve(read(self.metrics.file), controls, self.run_dir / "learning.png")
        pictures.timeline(self.timeline.spans(), self.run_dir / "timeline.png")

    async def _close(self) -> None:
        self.source.close()
        self.checkpoints.close()

    # --- parts ----------------------------------------------------------------------------------

    def save(self, step: int, state: dict[str, Any]) -> None:
        """For the runtime: starts a checkpoint; see `runtime.Checkpointer`."""
        self._save(step, state)
        self._call(lambda callback: callback.on_checkpoint(self, step))

    def _save(self, step: int, state: dict[str, Any]) -> None:
        self.checkpoints.save(step, self._arrays(), state | {"summary": self.summary.state_dict()})

    def _arrays(self) -> dict[str, Any]:
        arrays = {"learner": self.learner.state()}
        return arrays if self.reference is None else arrays | {"reference": self.reference}

    def _new_source(self) -> Preparer:
        weights = {name: self.config.data.sources[name].weight for name in self.sources}
        return Preparer(self.processor, PromptLoader(self.sources, weights, self.config.seed), self.config)

    def _new_held_out(self) -> HeldOut:
        prompts = {}
        for name, source in self.eval_sources.items():
            count = min(self.config.evaluation.samples, len(source))
            prepared, skipped = self.source.prepare_all(source[index] for index in range(count))
            if not prepared:
                raise DataError(f"data.sources.{name}: none of {count} held-out prompts can be used: {skipped[0][1]}")
            prompts[name] = prepared
        return HeldOut(prompts, self.rewards.judge, self.processor.decode, self.sampling)

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.summary.add_seconds(name, time.monotonic() - started)

    def _call(self, hook: Any) -> None:
        for callback in self.callbacks:
            hook(callback)

    def _opening(self, resumed: int | None) -> str:
        summary = self.summary
        begin = "starting" if resumed is None else f"resuming after step {resumed}"
        sources = ", ".join(f"{name} ({len(source):,})" for name, source in self.sources.items())
        devices = f"{summary.devices} device{'s' if summary.devices > 1 else ''}"
        return f"{begin}: {summary.parameters:,} parameters on {devices}, sources {sources}, run folder {self.run_dir}"

    def _closing(self, finish: Finish) -> str:
        summary = self.summary
        lines = [f"{finish.reason} after {summary.steps} steps, {summary.seconds['total']:.0f} s"]
        for source, accuracy in summary.accuracy.items():
            parts = [f"{source}: held out {accuracy['start']:.1%} -> {accuracy.get('end', float('nan')):.1%}"]
            parts += [f"blind {summary.blind[source]:.1%}"] if source in summary.blind else []
            parts += [f"chance {summary.chance[source]:.1%}"] if source in summary.chance else []
            lines.append(", ".join(parts))
        lines.append(f"largest log-prob gap between engine and trainer {summary.logprob_gap_max:.1e}")
        if summary.samples_skipped:
            lines.append(f"skipped prompts: {summary.samples_skipped}")
        lines.append(f"see {self.run_dir}/learning.png, timeline.png, summary.json")
        return "\n".join(lines)


class _Reporter(Observer):
    """Writes down what the runtime reports."""

    def __init__(self, owner: FluxTrainer, trainer: PolicyTrainer) -> None:
        self._owner = owner
        self._trainer = trainer

    def on_step(self, report: StepReport) -> None:
        owner, settings = self._owner, self._owner.config.report
        summary, step = owner.summary, report.step
        responses = [sample.response for group in report.groups for sample in group.samples]
        tokens = sum(len(response.token_ids) for response in responses)
        seconds = dict(report.seconds)
        metrics = dict(report.metrics) | {f"seconds/{name}": value for name, value in seconds.items()}
        metrics["tokens_per_second"] = tokens / max(sum(seconds.values()), 1e-9)
        for stage, value in seconds.items():
            summary.add_seconds(stage, value)
        summary.samples_trained += len(responses)
        summary.tokens_trained += tokens
        gap = metrics.get(GAP, 0.0)
        summary.logprob_gap_max = max(summary.logprob_gap_max, gap)
        if gap > settings.logprob_gap_alarm:
            summary.logprob_gap_alarms += 1
            owner.display.note(
                f"ALARM: step {step}: log-probs of engine and trainer differ by {gap:.1e} in the mean, more than "
                f"report.logprob_gap_alarm = {settings.logprob_gap_alarm:.1e}: the engine serves another policy"
            )
        owner.metrics.log("rl", step, metrics)
        if settings.dump_samples_every and step % settings.dump_samples_every == 0:
            groups = self._trainer.last_groups
            dump_samples(owner.run_dir / "samples", step, groups, owner.processor.decode, settings.dump_samples)
        owner.display.step(step, metrics, seconds)
        owner._call(lambda callback: callback.on_step(owner, step, report.groups, metrics))

    def on_evaluation(self, step: int, full: bool, result: Mapping[str, float]) -> None:
        owner = self._owner
        owner.metrics.log("eval", step, {f"accuracy/{source}": value for source, value in result.items()})
        owner.display.evaluated(result)
        if full:
            when = "start" if step == 0 else "end"
            for source, value in result.items():
                owner.summary.accuracy.setdefault(source, {})[when] = value
            owner.display.note(
                f"held out at the {when} of RL: "
                + ", ".join(f"{source} {value:.1%}" for source, value in result.items())
            )
        owner._call(lambda callback: callback.on_evaluation(owner, step, result))

    def on_skip(self, prompt: Prompt, reason: str) -> None:
        skipped = self._owner.summary.samples_skipped
        skipped[reason] = skipped.get(reason, 0) + 1


def _by_source(prompts: Sequence[Prompt], config: Config) -> dict[str, Source]:
    by_source: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        if prompt.source not in config.data.sources:
            known = ", ".join(config.data.sources)
            raise DataError(f"prompt {prompt.id} is of source {prompt.source!r}; data.sources names {known}")
        by_source.setdefault(prompt.source, []).append(prompt)
    return {name: _Given(own) for name, own in by_source.items()}


class _Given:
    """Prompts handed over in memory, as a source."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]

    def texts(self) -> Iterator[str]:
        for prompt in self._prompts:
            yield from (prompt.text, prompt.answer)


@contextlib.contextmanager
def _stop_on_signals(stop: Any) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the run cleanly at the next step; a second one does what it always does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {}

    def handle(number: int, frame: Any) -> None:
        signal.signal(number, previous[number])
        log.warning("stopping after this step; once more to stop at once")
        stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, also from within a running loop (a notebook), where it takes a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="fit") as thread:
        return thread.submit(asyncio.run, work).result()


def main(config: Config) -> int:
    """The body of `python -m fluxjax.train`: 0 when complete or stopped on request, 2 for bad settings or data."""
    try:
        FluxTrainer(config).fit()
    except (ValueError, DataError, CheckpointError) as error:
        log.error("%s", error)
        return 2
    return 0
