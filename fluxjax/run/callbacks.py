"""Hooks into a run, for custom logging, early stopping and the like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..base.types import Group
from ..report.summary import TrainingResult


class Callback:
    """Override what you need. All methods run on the event loop of the run, between two steps: keep them short.
    `on_checkpoint` says that one is being written. `trainer` is the `FluxTrainer`.

    An exception in a callback ends the run; call `trainer.stop()` to end it cleanly with a checkpoint.
    """

    def on_fit_start(self, trainer: Any) -> None: ...

    def on_step(self, trainer: Any, step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> None: ...

    def on_evaluation(self, trainer: Any, step: int, accuracy: Mapping[str, float]) -> None: ...

    def on_checkpoint(self, trainer: Any, step: int) -> None: ...

    def on_fit_end(self, trainer: Any, result: TrainingResult) -> None: ...


class Callbacks(Callback):
    """Several callbacks as one, for one `fit`; an earlier one is called first."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)

    def on_fit_start(self, trainer: Any) -> None:
        for callback in self._callbacks:
            callback.on_fit_start(trainer)

    def on_step(self, trainer: Any, step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> None:
        for callback in self._callbacks:
            callback.on_step(trainer, step, groups, metrics)

    def on_evaluation(self, trainer: Any, step: int, accuracy: Mapping[str, float]) -> None:
        for callback in self._callbacks:
            callback.on_evaluation(trainer, step, accuracy)

    def on_checkpoint(self, trainer: Any, step: int) -> None:
        for callback in self._callbacks:
            callback.on_checkpoint(trainer, step)

    def on_fit_end(self, trainer: Any, result: TrainingResult) -> None:
        for callback in self._callbacks:
            callback.on_fit_end(trainer, result)
