"""Evaluates a run when its runtime asks for it."""

from collections.abc import Callable, Mapping

from rollout.engine import Engine

from ..base.errors import DataError
from ..base.types import PreparedPrompt
from ..config import Config
from ..data.loader import read_row
from ..data.prepare import Preparer
from ..data.sources import Source
from ..report.metrics import Summary
from ..runtime.held_out import HeldOut

_DURING = 64  # held-out prompts of a source in evaluations between the first and the last


class HeldOutEvaluator:
    """Measures the held-out accuracy of the weights that the engine serves; fewer prompts during the run than at its
    start and end."""

    def __init__(self, config: Config, held_out: HeldOut, engine: Engine, summary: Summary) -> None:
        self._settings = config.evaluation
        self._summary = summary
        self._held_out = held_out
        self._engine = engine

    async def evaluate(self, step: int, full: bool) -> Mapping[str, float]:
        limit = self._settings.samples if full else min(self._settings.samples, _DURING)
        with self._summary.stage("eval"):
            return await self._held_out.accuracy(self._engine, limit)


def held_out_prompts(
    sources: Mapping[str, Source], count: int, preparer: Preparer, count_skip: Callable[[str], None]
) -> dict[str, list[PreparedPrompt]]:
    """Returns the first `count` usable prompts of each source. Raises DataError for a source that has none."""
    prompts = {}
    for name, source in sources.items():
        rows = range(min(count, len(source)))
        prepared, skipped = preparer.prepare_all(read_row(source, name, row) for row in rows)
        for _, reason in skipped:
            count_skip(f"held out: {reason}")
        if not prepared:
            reason = skipped[0][1]
            raise DataError(f"data.sources.{name}: none of {len(rows)} held-out prompts can be used: {reason}")
        prompts[name] = prepared
    return prompts
