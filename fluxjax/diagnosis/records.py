"""Inspects some records of a configuration's sources, as a run would prepare and score them."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

import numpy as np

from ..base.types import PreparedPrompt, Prompt
from ..config import Config
from ..data.loader import open_sources, read_row
from ..rewards.scorer import Scorer
from ..run.build import describe_model, training_prompts
from . import Finding

FORMS = ("{}", "\\boxed{{{}}}", "<answer>{}</answer>", "<think></think><answer>\\boxed{{{}}}</answer>")  # of an answer


async def inspected(
    config: Config, samples: int
) -> AsyncIterator[tuple[str, list[PreparedPrompt], list[tuple[Prompt, str]]]]:
    """Reads `samples` records of each source, evenly spread. Yields (name of the source, prompts as engines get them,
    records that a run would skip or whose rewards are in trouble, with the reason). Raises ConfigError, DataError."""
    sources = open_sources(config)
    _, processor = describe_model(config, sources)
    training = {name: dataclasses.replace(source, eval_reward="") for name, source in config.data.sources.items()}
    scorer, preparer = Scorer(training, processor.decode, config.rewards), training_prompts(config, sources, processor)
    try:
        for name, source in sources.items():
            rows = np.unique(np.linspace(0, len(source) - 1, samples).astype(int)).tolist()
            prompts, troubles = preparer.prepare_all(read_row(source, name, row) for row in rows)
            scored = [(prepared.prompt, await _trouble(scorer, prepared.prompt)) for prepared in prompts]
            yield name, prompts, [*troubles, *((prompt, why) for prompt, why in scored if why)]
    finally:
        scorer.close()


async def _trouble(scorer: Scorer, prompt: Prompt) -> str:
    """The trouble with a prompt's rewards of its reference answer, in the usual forms, and of an empty answer."""
    empty, *given = [await scorer.score_text(prompt, form.format(prompt.answer)) for form in ("", *FORMS)]
    if reasons := [reward.reason for reward in (empty, *given) if reward.reason]:
        return reasons[0]
    if empty.correct:
        return "an empty answer is correct"
    return "" if any(reward.correct for reward in given) else f"the reference {prompt.answer[:40]!r} is not correct"


async def data_and_rewards(config: Config, samples: int) -> AsyncIterator[Finding]:
    """Yields a finding for each source. Raises what `inspected` raises."""
    async for name, prompts, troubles in inspected(config, samples):
        source = config.data.sources[name]
        lines = [f"row {prompt.row} ({prompt.id}): {why}" for prompt, why in troubles]
        detail = f"{len(prompts)} prompts of {source.path or 'embedded'}, up to "
        detail += f"{max((len(prompt.inputs) for prompt in prompts), default=0)} tokens, rewards {source.reward_names}"
        fix = "mend these records, or choose a reward that grades them (docs/rewards.md)"
        many = len(troubles) > config.rewards.max_unreadable * len(prompts)
        yield Finding(f"data {name}", "; ".join([detail, *lines]), fix if many else "")
