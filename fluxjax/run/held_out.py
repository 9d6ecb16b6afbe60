"""Held-out prompts: their preparation, and the accuracy of a model's greedy answers."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from models.inputs import ModelInput, PromptInput
from rollout.engine import Engine, SamplingParams

from ..base.errors import DataError
from ..base.timeline import activity
from ..base.types import PreparedPrompt, Prompt, Response, Reward
from ..coordinator.messages import ABORTED, STOPPED, Turn
from ..data.loader import read_row
from ..data.prepare import Preparer
from ..data.sources import Source
from ..runtime.conversations import longer, session_of, turn_request
from ..runtime.ports import Environments, EvaluationGivenUp


@dataclasses.dataclass
class HeldOut:
    """The held-out prompts of every source, prepared once for all evaluations. An engine answers the prompts greedily,
    and each source's reward scores the answers. As many episodes as environments may live are played in step, so that
    the turns of all of them form a deterministic batch."""

    prompts: Mapping[str, Sequence[PreparedPrompt]]
    score: Callable[[Prompt, str, tuple[float, ...]], Awaitable[Reward]]  # prompt, answer, rewards of its environment
    decode: Callable[[Sequence[int]], str]
    sampling: SamplingParams
    stopping: Callable[[], bool] = bool  # says whether the run should stop

    async def accuracy(
        self, engine: Engine, limit: int | None = None, *, blind: bool = False, environments: Environments | None = None
    ) -> dict[str, float]:
        """Returns, for each source, the share of right greedy answers to the first `limit` prompts. Raises
        EvaluationGivenUp if the run should stop before all answers are scored. `blind` gives every pixel the mean
        colour (zero after normalisation), to measure the accuracy without sight. Episodes whose environment fails are
        left out; without a single other one, the accuracy of their source is 0."""
        asked = [(source, p) for source, prompts in self.prompts.items() for p in prompts[:limit]]
        answers = await self._answers(engine, [p for _, p in asked], blind, environments)
        answered = [(source, p.prompt, a) for (source, p), a in zip(asked, answers, strict=True) if a is not None]
        scores = [self.score(prompt, self.decode(a.last_turn), a.rewards) for _, prompt, a in answered]
        rewards = await self._all("scoring", [asyncio.ensure_future(score) for score in scores])
        right: dict[str, list[bool]] = {source: [] for source, _ in asked}
        for (source, _, _), reward in zip(answered, rewards, strict=True):
            right[source].append(reward.correct)
        return {source: float(np.mean(values or [0.0])) for source, values in right.items()}

    async def _answers(
        self, engine: Engine, asked: Sequence[PreparedPrompt], blind: bool, environments: Environments | None
    ) -> list[Response | None]:
        """Returns the answer to each prompt; None for an episode whose environment failed."""
        prepared = dict(enumerate(asked))
        answers: dict[int, Response | None] = {}
        waiting = [i for i, p in prepared.items() if p.prompt.environment]
        going = {i: _begin(i, p.prompt) for i, p in prepared.items() if not p.prompt.environment}
        while going or waiting:
            if environments is not None:  # an episode keeps its environment until it ends
                free = max(0, environments.at_once - len(going))
                going |= {i: _begin(i, prepared[i].prompt) for i in waiting[:free]}
                waiting = waiting[free:]
            await engine.pause()  # all requests form one deterministic batch, as in training
            unit = 1 if environments is None else environments.merge_unit
            turns = [self._turn(engine, i, prepared[i], said, unit, blind) for i, said in going.items()]
            jobs = [asyncio.ensure_future(turn) for turn in turns]
            await asyncio.sleep(0)  # all requests are queued before the first is served
            await engine.resume()
            said = dict(zip(going, await self._all("evaluating", jobs), strict=True))
            acting = {i: r for i, r in said.items() if prepared[i].prompt.environment and r.finish == STOPPED}
            acts = [asyncio.ensure_future(_act(environments, prepared[i], r)) for i, r in acting.items()]
            heard = dict(zip(acting, await self._all("playing", acts), strict=True)) if acting else {}
            going = {i: answer.response for i, answer in heard.items() if answer is not None and not answer.done}
            for i in said.keys() - going.keys():
                answers[i] = said[i] if i not in heard else None if heard[i] is None else heard[i].response
                if environments is not None and prepared[i].prompt.environment:
                    await environments.end(prepared[i].prompt.draw)
                    await engine.end_session(session_of(prepared[i].prompt))
            prepared |= {i: dataclasses.replace(prepared[i], responses={0: heard[i].inputs}) for i in going}
        return [answers[i] for i in range(len(asked))]

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

    async def _turn(
        self, engine: Engine, index: int, prepared: PreparedPrompt, response: Response, unit: int, blind: bool
    ) -> Response:
        # Greedy answers need no random numbers. Servers order requests by seed, because a network does not keep their
        # order.
        request = turn_request(Turn(prepared.prompt, response, 0), prepared, self.sampling, index, unit)
        if blind:
            request = dataclasses.replace(request, prompt=_blanked(request.prompt))
        return longer(response, [chunk async for chunk in engine.generate(request)])

    def chance(self, limit: int | None = None) -> dict[str, float]:
        """Returns, for each source without an environment, the accuracy of the best constant answer."""
        result = {}
        for source, prompts in self.prompts.items():
            answers = collections.Counter(p.prompt.answer for p in prompts[:limit] if not p.prompt.environment)
            if answers:
                result[source] = max(answers.values()) / sum(answers.values())
        return result


def _begin(index: int, prompt: Prompt) -> Response:
    return Response(f"held-out-{index:06d}/0", prompt.draw, 0, (), (), (), ABORTED, 0.0)


async def _act(environments: Environments | None, prepared: PreparedPrompt, response: Response) -> Any:
    from ..environments import EnvironmentFailure

    assert environments is not None
    try:
        return await environments.act(prepared, response)
    except EnvironmentFailure:  # counted and noted where it arose
        return None


def _blanked(prompt: PromptInput) -> ModelInput:
    inputs = prompt.laid_out()
    patches = inputs.patches_PX  # an array or a shadow: both have a shape
    return inputs if patches is None else inputs.with_patches(np.zeros(patches.shape, patches.dtype))


def held_out_prompts(
    sources: Mapping[str, Source], count: int, preparer: Preparer, count_skip: Callable[[str], None]
) -> dict[str, list[PreparedPrompt]]:
    """Returns the usable prompts among the first `count` rows of each source. Raises DataError if a source has none."""
    prompts, first = {}, -1
    for name, source in sources.items():
        rows = range(min(count, len(source)))
        # By draws, which differ from those of the run, environments are told apart and seeded.
        prepared, skipped = preparer.prepare_all(read_row(source, name, row, draw=first - row) for row in rows)
        first -= len(rows)
        for _, reason in skipped:
            count_skip(f"held out: {reason}")
        if not prepared:
            reason = skipped[0][1]
            raise DataError(f"data.sources.{name}: none of {len(rows)} held-out prompts can be used: {reason}")
        prompts[name] = prepared
    return prompts
