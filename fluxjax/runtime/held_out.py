"""Accuracy on held-out prompts: greedy answers of an engine, scored by each source's reward."""

import asyncio
import collections
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rollout.engine import Engine, GenerateRequest, SamplingParams

from ..base.timeline import activity
from ..base.types import PreparedPrompt, Prompt, Reward

Score = Callable[[Prompt, str], Awaitable[Reward]]


class EvaluationGivenUp(Exception):
    """The run is to stop; whoever resumes it makes the evaluation."""


@dataclasses.dataclass
class HeldOut:
    """The held-out prompts of every source, decoded once and kept: they are asked again and again."""

    prompts: Mapping[str, Sequence[PreparedPrompt]]
    score: Score
    decode: Callable[[Sequence[int]], str]
    sampling: SamplingParams
    stopping: Callable[[], bool] = bool  # whether the run is to stop

    async def accuracy(self, engine: Engine, limit: int | None = None, *, blind: bool = False) -> dict[str, float]:
        """Returns each source's share of exactly right greedy answers, over its first `limit` prompts. Raises
        EvaluationGivenUp if the run is to stop before all are given.

        `blind` blanks every pixel (to the mean colour, which is zero after normalisation): what can be answered
        without looking.
        """
        asked = [(source, p) for source, prompts in self.prompts.items() for p in prompts[:limit]]
        await engine.pause()  # one deterministic batch, as in training
        answers = [asyncio.ensure_future(self._answer(engine, i, p, blind)) for i, (_, p) in enumerate(asked)]
        await asyncio.sleep(0)  # every request is queued before the first is served
        await engine.resume()
        texts = await self._all("evaluating", answers)
        scores = [self.score(p.prompt, text) for (_, p), text in zip(asked, texts, strict=True)]
        rewards = await self._all("scoring", [asyncio.ensure_future(score) for score in scores])
        right: dict[str, list[bool]] = collections.defaultdict(list)
        for (source, _), reward in zip(asked, rewards, strict=True):
            right[source].append(reward.correct)
        return {source: float(np.mean(values)) for source, values in right.items()}

    async def _all(self, what: str, jobs: Sequence[asyncio.Future[Any]]) -> list[Any]:
        gathered = asyncio.gather(*jobs)
        try:
            with activity(lambda: f"{what} {sum(job.done() for job in jobs)}/{len(jobs)}"):
                while not gathered.done():
                    if self.stopping():
                        raise EvaluationGivenUp
                    await asyncio.wait([gathered], timeout=0.2)
            return gathered.result()
        finally:
            gathered.cancel()
            await asyncio.gather(gathered, return_exceptions=True)

    async def _answer(self, engine: Engine, index: int, prepared: PreparedPrompt, blind: bool) -> str:
        inputs = prepared.inputs.laid_out()
        if blind and inputs.vision is not None:
            patches = inputs.vision.patches_PX  # which may be elsewhere
            blank = dataclasses.replace(inputs.vision, patches_PX=np.zeros(patches.shape, patches.dtype))
            inputs = dataclasses.replace(inputs, vision=blank)
        sampling = dataclasses.replace(self.sampling, temperature=0.0)
        tokens: list[int] = []
        # Nothing is drawn; the seed is the order in which a server takes up what came over a network.
        async for chunk in engine.generate(GenerateRequest(f"held-out-{index:06d}", inputs, sampling, seed=index)):
            tokens.extend(chunk.token_ids)
        return self.decode(tokens)

    def chance(self, limit: int | None = None) -> dict[str, float]:
        """Returns, for each source, the accuracy of the best constant answer."""
        result = {}
        for source, prompts in self.prompts.items():
            answers = collections.Counter(p.prompt.answer for p in prompts[:limit])
            result[source] = max(answers.values()) / sum(answers.values()) if answers else 0.0
        return result
