"""Looks at some records of a configuration's sources as a run would prepare and score them."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence

import numpy as np

from models.processing import Processor

from ..base.types import PreparedPrompt, Prompt
from ..config import Config
from ..data.loader import SkippedPrompt, open_sources, read_row
from ..data.prepare import PromptLimits, prepare_prompt
from ..data.sources import Source
from ..rewards.scorer import Scorer
from ..run.build import describe_model
from .findings import Finding, differs, ok

FORMS = ("{}", "\\boxed{{{}}}", "<answer>{}</answer>", "<think></think><answer>\\boxed{{{}}}</answer>")  # of an answer


@dataclasses.dataclass
class SourceReport:
    """Some records of a source: prompts as engines get them, records that a run would skip, and complaints about
    rewards, each with the record's row."""

    name: str
    records: int  # of the source
    prompts: list[PreparedPrompt] = dataclasses.field(default_factory=list)
    skipped: list[SkippedPrompt] = dataclasses.field(default_factory=list)
    failed: list[str] = dataclasses.field(default_factory=list)  # rewards that raised, or give points for nothing
    ungraded: list[str] = dataclasses.field(default_factory=list)  # reference answers that no reward calls correct


async def inspected(
    config: Config, processor: Processor, name: str, source: Source, scorer: Scorer, samples: int
) -> SourceReport:
    """Reads `samples` records, evenly spread, and scores their reference answers and empty answers."""
    report, limits = SourceReport(name, len(source)), PromptLimits.of(config)
    for row in np.unique(np.linspace(0, len(source) - 1, samples).astype(int)).tolist():
        prompt = prepare_prompt(processor, read_row(source, name, row), limits, config.data.chat_template)
        if isinstance(prompt, SkippedPrompt):
            report.skipped.append(prompt)
            continue
        report.prompts.append(prompt)
        await _scored(report, scorer, prompt.prompt)
    return report


async def _scored(report: SourceReport, scorer: Scorer, prompt: Prompt) -> None:
    where = f"row {prompt.row} ({prompt.id})"
    rewards = [await scorer.score_text(prompt, form.format(prompt.answer)) for form in FORMS]
    empty = await scorer.score_text(prompt, "")
    if reason := next((reward.reason for reward in (*rewards, empty) if reward.reason), ""):
        report.failed.append(f"{where}: {reason}")
    elif empty.correct:
        report.failed.append(f"{where}: an empty answer is correct")
    elif not any(reward.correct for reward in rewards):
        report.ungraded.append(f"{where}: {prompt.answer[:40]!r}")


async def data_and_rewards(config: Config, samples: int) -> AsyncIterator[Finding]:
    """Yields two findings a source: its records, and its rewards. Raises `ConfigError` and what opening data raises."""
    sources = open_sources(config)
    _, processor = describe_model(config, sources)
    plain = {name: dataclasses.replace(source, eval_reward="") for name, source in config.data.sources.items()}
    scorer = Scorer(plain, lambda ids: "", config.rewards)
    try:
        for name, source in sources.items():
            report = await inspected(config, processor, name, source, scorer, samples)
            path = config.data.sources[name].path or "embedded"
            for finding in _findings(report, path, config):
                yield finding
    finally:
        scorer.close()


def _findings(report: SourceReport, path: str, config: Config) -> list[Finding]:
    name, tokens = f"data {report.name}", [len(prompt.inputs) for prompt in report.prompts]
    looked, skipped = f"{len(tokens) + len(report.skipped)} of {report.records} records of {path}", report.skipped
    found = [ok(name, f"{looked}, {min(tokens, default=0)} to {max(tokens, default=0)} tokens")]
    if bad := [f"row {skip.prompt.row} ({skip.prompt.id}): {skip.reason}: {skip.detail}" for skip in skipped]:
        detail = f"{len(bad)} of {looked} can't be used: {_some(bad)}"
        found = [differs(name, detail, "mend or remove these records")]
    name, reward = f"reward of {report.name}", config.data.sources[report.name].reward_names
    if report.failed:
        detail = f"{reward} failed on {len(report.failed)} of {len(tokens)} records of {path}: {_some(report.failed)}"
        return [*found, differs(name, detail, "mend the reward (docs/rewards.md), or these records")]
    if len(report.ungraded) > config.rewards.max_unreadable * len(tokens):
        fix = "choose a reward that can grade these answers (docs/rewards.md); a format reward calls none correct"
        detail = f"{reward} calls {len(report.ungraded)} of {len(tokens)} reference answers of {path} incorrect"
        return [*found, differs(name, f"{detail}: {_some(report.ungraded)}", fix)]
    return [*found, ok(name, f"{reward}: {len(tokens) - len(report.ungraded)} of {len(tokens)} references are correct")]


def _some(lines: Sequence[str]) -> str:
    return "; ".join(lines[:3]) + f"; and {len(lines) - 3} more" * (len(lines) > 3)
