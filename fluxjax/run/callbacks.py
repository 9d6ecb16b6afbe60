"""Hooks into a run, for custom logging, early stopping and the like."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from models.decoder import Decoder
from models.processing import Processor
from rollout.jax_engine import JaxEngine

from ..base.timeline import Timeline
from ..base.types import Group
from ..config import Config
from ..coordinator.machine import Coordinator
from ..learner.learner import Learner
from ..report.summary import Summary, TrainingResult


@runtime_checkable
class Run(Protocol):
    """The parts of a `FluxTrainer` that callbacks may rely on."""

    config: Config
    run_dir: pathlib.Path
    processor: Processor
    learner: Learner
    engine: JaxEngine
    coordinator: Coordinator
    timeline: Timeline
    summary: Summary

    @property
    def model(self) -> Decoder: ...
    def stop(self) -> None: ...
    def evaluate(self, limit: int | None = None, *, blind: bool = False) -> dict[str, float]: ...


class Callback:
    """Override the methods that you need. They run on the event loop of the run, between two steps: keep them short.
    `on_checkpoint` is called when a checkpoint begins to be written. `trainer` is the `FluxTrainer`.

    An exception in a callback ends the run; `trainer.stop()` ends it cleanly, with a checkpoint.
    """

    def on_fit_start(self, trainer: Run) -> None: ...
    def on_step(self, trainer: Run, step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> None: ...
    def on_evaluation(self, trainer: Run, step: int, accuracy: Mapping[str, float]) -> None: ...
    def on_checkpoint(self, trainer: Run, step: int) -> None: ...
    def on_fit_end(self, trainer: Run, result: TrainingResult) -> None: ...


class Callbacks:
    """The callbacks of one `fit` of `trainer`."""

    def __init__(self, callbacks: Sequence[Callback], trainer: Run) -> None:
        self._callbacks, self._trainer = tuple(callbacks), trainer

    def tell(self, hook: Callable[..., None], *event: object) -> None:
        """Calls `hook`, a method of `Callback`, of each of them, an earlier one first."""
        for callback in self._callbacks:
            getattr(callback, hook.__name__)(self._trainer, *event)
