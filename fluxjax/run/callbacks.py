"""Hooks into a run, for custom logging, early stopping and the like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..base.types import Group

if TYPE_CHECKING:
    from ..report.summary import TrainingResult
    from .trainer import FluxTrainer


class Callback:
    """Override what you need. All methods run on the event loop of the run, between two steps: keep them short.
    `on_checkpoint` says that one is being written.

    An exception in a callback ends the run; call `trainer.stop()` to end it cleanly with a checkpoint.
    """

    def on_fit_start(self, trainer: FluxTrainer) -> None: ...

    def on_step(
        self, trainer: FluxTrainer, step: int, groups: Sequence[Group], metrics: Mapping[str, float]
    ) -> None: ...

    def on_evaluation(self, trainer: FluxTrainer, step: int, accuracy: Mapping[str, float]) -> None: ...

    def on_checkpoint(self, trainer: FluxTrainer, step: int) -> None: ...

    def on_fit_end(self, trainer: FluxTrainer, result: TrainingResult) -> None: ...
