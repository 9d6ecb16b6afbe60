"""Supervised steps before RL, which teach the policy the form of an answer."""

from collections.abc import AsyncIterator, Callable, Mapping

from models.processing import Processor, PromptError

from ..algorithms import sft
from ..batch.composer import Composer, Team, sft_groups
from ..batch.composition import Composition
from ..config import Config, OptimConfig
from ..data.loader import PromptLoader
from ..data.prepare import Preparer
from ..data.shadows import ProxyMedia
from ..data.sources import Source
from .learner import Learner


async def warm_start(
    config: Config,
    learner: Learner,
    composer: Composer,
    sources: Mapping[str, Source],
    processor: Processor,
    count_skip: Callable[[str], None],
    proxy: ProxyMedia | None = None,
    team: Team | None = None,
) -> AsyncIterator[tuple[int, dict[str, float]]]:
    """Trains the learner on `config.warm_start.steps` batches of given answers. Yields (step, metrics) after each step.
    A batch without a usable prompt makes no step. The warm start has its own optimizer and schedule, and its own order
    of draws, so that RL starts with a fresh epoch. Unusable prompts and answers are left out, and `count_skip` gets
    the reasons. `proxy` is that of `Preparer`."""
    settings = config.warm_start
    begin_warm_start(config, learner)
    source = warm_start_source(config, sources, processor, proxy)
    try:
        for step in range(1, settings.steps + 1):
            drawn, skipped = await source.draw(settings.batch_size)
            for _, reason in skipped:
                count_skip(reason)
            prepared, answers = [], []
            for candidate in drawn:
                answer = answer_ids(processor, candidate.prompt.answer)
                if answer and len(answer) <= config.rollout.max_new_tokens:
                    prepared.append(candidate)
                    answers.append(answer)
                else:
                    count_skip("warm start: answer too long" if answer else "warm start: answer not in the vocabulary")
            if not prepared:
                continue
            by_draw = {candidate.prompt.draw: candidate for candidate in prepared}
            [composition] = (team or Team()).composed(composer, [(sft_groups(prepared, answers), by_draw)])
            yield step, given_step(learner, composition)
    finally:
        source.close()


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
    config: Config, sources: Mapping[str, Source], processor: Processor, proxy: ProxyMedia | None = None
) -> Preparer:
    """Returns the prompts of the warm start, in their own order of draws. `proxy` is that of `Preparer`."""
    weights = {name: config.data.sources[name].weight for name in sources}
    loader = PromptLoader(sources, weights, seed=config.seed + 1_000_003)
    return Preparer(processor, loader, config, ahead=config.warm_start.batch_size, proxy=proxy)


def answer_ids(processor: Processor, answer: str) -> list[int]:
    """Returns the token ids of an answer and the end token, or an empty list if the vocabulary lacks a part of the
    answer."""
    try:
        return [*processor.encode(answer), processor.eos_ids[0]]
    except PromptError:
        return []
