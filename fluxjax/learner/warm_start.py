"""Supervised steps before RL, which teach the policy the form of an answer."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from models.processing import Processor, PromptError

from ..algorithms import sft
from ..base.types import PreparedPrompt, Response
from ..batch.composer import Composer, Team, sft_groups
from ..batch.composition import Composition
from ..config import Config, OptimConfig
from ..data.loader import PromptLoader
from ..data.prepare import Preparer
from ..data.sources import Source
from .learner import Learner

Answered: TypeAlias = tuple[PreparedPrompt, Sequence[int] | Response]  # a prompt, and its answer as in `sft_groups`
Play: TypeAlias = Callable[[PreparedPrompt], Awaitable[Answered | str]]  # -> an episode, or why there is none


async def warm_start(
    config: Config,
    learner: Learner,
    composer: Composer,
    sources: Mapping[str, Source],
    processor: Processor,
    count_skip: Callable[[str], None],
    team: Team | None = None,
    play: Play | None = None,
    **preparing: Any,
) -> AsyncIterator[tuple[int, dict[str, float]]]:
    """Trains the learner on `config.warm_start.steps` batches of given answers. Yields (step, metrics) after each step.
    A batch without a usable prompt makes no step. The warm start has its own optimizer and schedule, and its own order
    of draws, so that RL starts with a fresh epoch. Unusable prompts and answers are left out, and `count_skip` gets
    the reasons. `play` answers prompts of environments. `preparing` has further arguments of `Preparer`."""
    settings = config.warm_start
    begin_warm_start(config, learner)
    source = warm_start_source(config, sources, processor, **preparing)
    try:
        for step in range(1, settings.steps + 1):
            drawn, skipped = await source.draw(settings.batch_size)
            for _, reason in skipped:
                count_skip(reason)
            found = await asyncio.gather(*(_answered(config, candidate, processor, play) for candidate in drawn))
            for reason in [reason for reason in found if isinstance(reason, str)]:
                count_skip(f"warm start: {reason}")
            pairs = [pair for pair in found if not isinstance(pair, str)]
            if not pairs:
                continue
            by_draw = {prepared.prompt.draw: prepared for prepared, _ in pairs}
            groups = sft_groups(list(by_draw.values()), [answer for _, answer in pairs])
            [composition] = (team or Team()).composed(composer, [(groups, by_draw)])
            yield step, given_step(learner, composition)
    finally:
        source.close()


async def _answered(
    config: Config, candidate: PreparedPrompt, processor: Processor, play: Play | None
) -> Answered | str:
    """Returns a prompt with its given answer, or the reason why it has none."""
    if candidate.prompt.environment and play is not None:
        return await play(candidate)
    if not candidate.prompt.answer:
        return "no answer"
    ids = answer_ids(processor, candidate.prompt.answer)
    if not ids:
        return "answer not in the vocabulary"
    return (candidate, ids) if len(ids) <= config.rollout.max_new_tokens else "answer too long"


def given_step(learner: Learner, composition: Composition) -> dict[str, float]:
    """Makes a step of the warm start, and returns its metrics. Collective."""
    if composition.coming:
        learner.gradients.compile_ahead(learner.params, composition.coming, scores=False)
    return learner.step(composition.everywhere)


def begin_warm_start(config: Config, learner: Learner) -> None:
    """Begins the warm start of the learner, with its own optimizer and schedule."""
    settings = config.warm_start
    warmup = min(10, settings.steps // 2)
    learner.reset(
        sft.token_loss,
        optim=OptimConfig(lr=settings.lr, warmup_steps=warmup, moments_dtype=config.optim.moments_dtype),
        steps=settings.steps,
        temperature=1.0,
    )


def warm_start_source(
    config: Config, sources: Mapping[str, Source], processor: Processor, **preparing: Any
) -> Preparer:
    """Returns the prompts of the warm start, in an order of their own. `preparing` has arguments of `Preparer`."""
    weights = {name: config.data.sources[name].weight for name in sources}
    loader = PromptLoader(sources, weights, seed=config.seed + 1_000_003)
    return Preparer(processor, loader, config, ahead=config.warm_start.batch_size, **preparing)


def answer_ids(processor: Processor, answer: str) -> list[int]:
    """Returns the token ids of an answer and the end token, or an empty list if the vocabulary lacks some."""
    try:
        return [*processor.encode(answer), processor.eos_ids[0]]
    except PromptError:
        return []
