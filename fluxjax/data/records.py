"""Makes a prompt of the fields of a record, whatever file the record stands in."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from ..base.types import Media, MediaKind, Prompt
from .fields import order_by_marks, place_marks

log = logging.getLogger("fluxjax.data")


def answer_text(value: object) -> str | None:
    """Returns an answer as text, or None where the value is neither text nor a number."""
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return None


def make_prompt(id: str, source: str, text: str, answer: str, media: Mapping[MediaKind, Sequence[Media]]) -> Prompt:
    """Makes a prompt whose media stand in the order of the marks. Raises `ValueError` when marks and media disagree."""
    kinds = [kind for kind in MediaKind for _ in media.get(kind, ())]
    text = place_marks(text, kinds)
    queues = {kind: iter(items) for kind, items in media.items()}
    return Prompt(id, source, text, answer, tuple(next(queues[kind]) for kind in order_by_marks(text)))
