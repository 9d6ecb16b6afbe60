"""Prepares drawn prompts in all processes. Process 0 announces prompts with media while engines answer the prompts.
Each other process builds the model inputs of these prompts at once, so that the next step begins earlier."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from models.inputs import ModelInput, PromptInput

from ..base.types import PreparedPrompt, Prompt
from ..batch.composer import Team
from ..data.prepare import Preparer
from ..data.shadows import rows_of
from .orders import Coming, PlaceOf, told_media

Drawn = tuple[list[PreparedPrompt], list[tuple[Prompt, str]]]


class ToldPrompts:
    """The prompts of `source`, in process 0, which announces prompts with pixels in a media store to the others."""

    def __init__(self, source: Preparer, gang: Team, place_of: PlaceOf) -> None:
        self._source, self._gang, self._place_of = source, gang, place_of

    async def draw(self, count: int) -> Drawn:
        prepared, skipped = await self._source.draw(count)
        told = [(ready.prompt.draw, told_media(ready.inputs, self._place_of)) for ready in prepared]
        if media := [[draw, tickets] for draw, tickets in told if tickets is not None]:
            self._gang.tell(Coming(media))
        return prepared, skipped


class ComingPrompts:
    """Model inputs of prompts that process 0 has announced. The newest `most` are kept, each to be taken once."""

    def __init__(self, source: Preparer, most: int) -> None:
        self._source, self._most = source, most
        self._inputs: collections.OrderedDict[int, ModelInput] = collections.OrderedDict()  # by draw

    def hear(self, order: Coming) -> None:
        """Lays out the prompts of the order. Raises the errors of `Preparer.laid_out`."""
        self._inputs |= self._source.laid_out({draw: [ticket for ticket, _ in told] for draw, told in order.media})
        while len(self._inputs) > self._most:
            self._inputs.popitem(last=False)

    def laid_out(self, tickets: Mapping[int, Sequence[str]]) -> dict[int, ModelInput]:
        """Returns the result of `Preparer.laid_out`, and forgets these prompts."""
        known = {draw: self._inputs.pop(draw) for draw in tickets if draw in self._inputs}
        fit = {draw: inputs for draw, inputs in known.items() if tickets_of(inputs) == list(tickets[draw])}
        return fit | self._source.laid_out({draw: words for draw, words in tickets.items() if draw not in fit})

    def forget(self) -> None:
        """Forgets all prompts, because the order of draws begins anew."""
        self._inputs.clear()


def tickets_of(inputs: PromptInput) -> list[str]:
    return [rows.ticket for rows in rows_of(inputs)]
