"""Supervised steps before RL: the policy learns the form of an answer, and a first idea of its content."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from models.config import VisionConfig
from models.processing import Processor

from .algorithms import sft
from .batching import compose, sft_groups
from .config import Config, OptimConfig
from .data import Source
from .data.loader import PromptLoader
from .data.prepare import Preparer
from .learner import Learner


async def warm_start(
    config: Config,
    learner: Learner,
    sources: Mapping[str, Source],
    processor: Processor,
    vision: VisionConfig | None,
) -> AsyncIterator[tuple[int, dict[str, float]]]:
    """Trains the learner on `config.warm_start.steps` batches of given answers; yields (step, metrics) after each.

    The data order is its own: RL starts with a fresh epoch. The optimizer and its schedule are its own as well;
    `learner.reset` begins RL. Prompts that cannot be used are left out of their batch.
    """
    settings = config.warm_start
    weights = {name: config.data.sources[name].weight for name in sources}
    learner.reset(
        sft.token_loss,
        optim=OptimConfig(lr=settings.lr, warmup_steps=min(10, settings.steps // 2)),
        steps=settings.steps,
        temperature=1.0,
    )
    source = Preparer(processor, PromptLoader(sources, weights, seed=config.seed + 1_000_003), config)
    try:
        for step in range(1, settings.steps + 1):
            prepared, _ = await source.draw(settings.batch_size)
            if not prepared:
                continue
            answers = [answer_ids(processor, p.prompt.answer) for p in prepared]
            by_draw = {p.prompt.draw: p for p in prepared}
            batch = compose(sft_groups(prepared, answers), by_draw, config, learner.mesh.size, vision=vision)
            yield step, learner.step(batch.batches)
    finally:
        source.close()


def answer_ids(processor: Processor, answer: str) -> Sequence[int]:
    """The tokens of an answer as the policy should give it, with the end token."""
    return [*processor.encode(answer), processor.eos_ids[0]]
