"""Prompts handed over in memory, as sources."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.errors import DataError
from ..base.types import Prompt
from ..config import DataConfig
from .sources import PromptList, Source


def given(prompts: Sequence[Prompt], config: DataConfig) -> dict[str, Source]:
    """Groups prompts by source. Raises `DataError` for a source that the configuration does not name: it would have no
    reward."""
    by_source: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        if prompt.source not in config.sources:
            known = ", ".join(config.sources)
            raise DataError(f"prompt {prompt.id} is of source {prompt.source!r}; data.sources names {known}")
        by_source.setdefault(prompt.source, []).append(prompt)
    return {name: PromptList(group) for name, group in by_source.items()}
