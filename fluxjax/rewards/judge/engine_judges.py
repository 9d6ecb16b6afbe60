"""Judges inside the run's process."""

from __future__ import annotations

import contextlib
import itertools

from models.processing import Processor
from rollout.engine import Engine, FinishReason, GenerateRequest, SamplingParams
from rollout.streamed_judge import StreamedJudge

from ..named import Failing, RewardFailure
from .http_judges import question_ids
from .questions import Answer, Question


class EngineModel:
    """Asks an engine of its own, which its maker closes. `Judge(EngineModel(engine, processor))` is a reward."""

    def __init__(self, engine: Engine, processor: Processor) -> None:
        self._engine, self._processor = engine, processor
        self._numbers = itertools.count()

    async def ask(self, question: Question) -> Answer:
        """Asks the engine. Raises RewardFailure if the engine aborts, `EngineError` if it fails."""
        processor = self._processor
        sampling = SamplingParams(
            max_new_tokens=question.max_tokens, temperature=question.temperature, stop_ids=processor.eos_ids
        )
        prompt = processor.prepare_ids(question_ids(processor, question))
        request = GenerateRequest(f"judge-{next(self._numbers)}", prompt, sampling, seed=question.seed)
        ids: list[int] = []
        finish = None
        async with contextlib.AsyncExitStack() as left:
            stream = self._engine.generate(request)
            if close := getattr(stream, "aclose", None):  # a cancelled call ends its request
                left.push_async_callback(close)
            async for chunk in stream:
                ids += chunk.token_ids
                finish = chunk.finish
        if finish not in (FinishReason.STOP, FinishReason.LENGTH):
            raise RewardFailure(Failing.RAISED, "the judge's engine aborted its answer")
        return Answer(processor.decode(ids), finish is FinishReason.STOP)


class StreamedJudgeModel:
    """Asks a judge whose layers travel from host memory (`rollout.streamed_judge`), because the judge shares a device
    with the run's engines. The judge answers greedily, so its reward should have `retries=0`."""

    def __init__(self, judge: StreamedJudge, processor: Processor) -> None:
        self._judge, self._processor = judge, processor

    async def ask(self, question: Question) -> Answer:
        """Asks the judge. Raises `EngineError` if the judge refuses the question."""
        ids, ends = question_ids(self._processor, question), tuple(self._processor.eos_ids)
        (answer,) = await self._judge.generate([ids], question.max_tokens, ends)
        return Answer(self._processor.decode(answer), answer[-1] in ends)
