"""Inspects some records of a configuration's sources, as a run would prepare and score them."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

import numpy as np

from ..base.types import PreparedPrompt, Prompt
from ..config import Config
from ..data.loader import SkippedPrompt, open_sources, read_row
from ..data.prepare import PromptLimits, Result, prepare_prompt
from ..rewards.scorer import Scorer
from ..run.build import describe_model
from . import Finding

FORMS = ("{}", "\\boxed{{{}}}", "<answer>{}</answer>", "<think></think><answer>\\boxed{{{}}}</answer>")  # of an answer


async def inspected(config: Config, samples: int) -> AsyncIterator[tuple[Result, str]]:
    """Yields `samples` records of each source, evenly spread: the prompt as engines get it, or why a run would skip
    the record; and the trouble with the record or its rewards (empty: none). Raises `ConfigError` and `DataError`."""
    sources, limits = open_sources(config), PromptLimits.of(config)
    _, processor = describe_model(config, sources)
    training = {name: dataclasses.replace(source, eval_reward="") for name, source in config.data.sources.items()}
    scorer = Scorer(training, lambda ids: "", config.rewards)
    try:
        for name, source in sources.items():
            for row in np.unique(np.linspace(0, len(source) - 1, samples).astype(int)).tolist():
                record = read_row(source, name, row)
                result = prepare_prompt(processor, record, limits, config.data.chat_template)
                if isinstance(result, SkippedPrompt):
                    yield result, f"{result.reason}: {result.detail}"
                else:
                    yield result, await _trouble(scorer, result.prompt)
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
    found: dict[str, list[tuple[Result, str]]] = {}
    async for result, trouble in inspected(config, samples):
        found.setdefault(result.prompt.source, []).append((result, trouble))
    for name, results in found.items():
        source = config.data.sources[name]
        troubles = [f"row {result.prompt.row} ({result.prompt.id}): {why}" for result, why in results if why]
        tokens = [len(result.inputs) for result, _ in results if isinstance(result, PreparedPrompt)]
        detail = f"{len(results)} records of {source.path or 'embedded'}, up to {max(tokens, default=0)} tokens: "
        detail += f"{len(troubles)} can't be used, or not be graded by {source.reward_names}"
        more = [f"and {len(troubles) - 3} more"] if len(troubles) > 3 else []
        fix = "mend these records, or choose a reward that grades them (docs/rewards.md)"
        many = len(troubles) > config.rewards.max_unreadable * len(results)
        yield Finding(f"data {name}", "; ".join([detail, *troubles[:3], *more]), fix if many else "")
