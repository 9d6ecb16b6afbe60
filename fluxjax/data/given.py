"""Prompts handed over in memory, as sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..base.errors import DataError
from ..base.types import Prompt
from ..config import DataConfig
from .sources import Source


class GivenSource:
    """See `fluxjax.data.sources.Source`."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]

    def texts(self) -> Iterator[str]:
        for prompt in self._prompts:
            yield from (prompt.text, prompt.answer)


def given(prompts: Sequence[Prompt], config: DataConfig) -> dict[str, Source]:
    """The prompts by source. Raises `DataError` for a source that the configuration does not name: it has no reward."""
    by_source: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        if prompt.source not in config.sources:
            known = ", ".join(config.sources)
            raise DataError(f"prompt {prompt.id} is of source {prompt.source!r}; data.sources names {known}")
        by_source.setdefault(prompt.source, []).append(prompt)
    return {name: GivenSource(own) for name, own in by_source.items()}
