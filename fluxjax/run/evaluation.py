"""Evaluates a run when its runtime asks for it."""

from collections.abc import Mapping

from rollout.engine import Engine

from ..config import Config
from ..report.metrics import Summary
from ..runtime.held_out import HeldOut


class HeldOutEvaluator:
    """Measures the held-out accuracy of the weights that the engine serves; fewer prompts during the run than at its
    start and end."""

    def __init__(self, config: Config, held_out: HeldOut, engine: Engine, summary: Summary) -> None:
        self._settings = config.evaluation
        self._summary = summary
        self._held_out = held_out
        self._engine = engine

    async def evaluate(self, step: int, full: bool) -> Mapping[str, float]:
        limit = self._settings.samples if full else self._settings.samples_during
        with self._summary.stage("eval"):
            return await self._held_out.accuracy(self._engine, limit)
