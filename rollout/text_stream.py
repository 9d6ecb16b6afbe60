"""Text that grows with the tokens of a response: only what can no longer change is handed out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoders write it for the first bytes of a character


class TextStream:
    """`decode` turns ids into text; the first of the `stops` that appears ends it and is left out.

    Two things are held back until more is known: bytes that are no whole character yet, and an end that may be the
    beginning of a stop string.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self.token_ids: list[int] = []  # up to the token that completed a stop string
        self.text = ""  # handed out so far
        self.stopped = False

    def add(self, token_ids: Sequence[int]) -> str:
        """Takes in new tokens; returns the text that is sure since the last call."""
        before = len(self.text)
        # With stop strings token by token: what was sampled behind the one that completes a stop string does not count.
        for ids in [[id] for id in token_ids] if self._stops else [list(token_ids)]:
            if not self.stopped:
                self.token_ids += ids
                self._grow(self._decode(self.token_ids).rstrip(INCOMPLETE))
        return self.text[before:]

    def finish(self) -> str:
        """Returns what was held back: no more tokens will come."""
        before = len(self.text)
        if not self.stopped:
            self.text = self._decode(self.token_ids)
        return self.text[before:]

    def _grow(self, text: str) -> None:
        ends = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if ends:
            self.text, self.stopped = text[: min(ends)], True
            return
        sure = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self.text = text[: max(sure, len(self.text))]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
