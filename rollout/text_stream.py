"""Text that grows with the tokens of a response: returns only text that can no longer change."""

from collections.abc import Callable, Sequence

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoders write it for an incomplete character
WINDOW, KEPT = 32, 16  # tokens in the window: at most, in ordinary text, and after the window has moved
CHARACTER_BYTES = 4  # bytes of a UTF-8 character, at most


class TextStream:
    """Decodes the tokens of a response as they come; `decode` turns ids into text. The first of the `stops` that
    appears ends the text, which does not include it.

    Two kinds of text are held back until more tokens come: bytes that are no complete character yet, and an end that
    may be the beginning of a stop string. Each step decodes only a window of the last tokens again.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self.token_ids: list[int] = []  # up to the token that completed a stop string
        self.stopped = False
        self._pieces: list[str] = []  # the text returned so far
        self._start = 0  # the token with which the window begins
        self._shown = 0  # characters of the window's text that were returned

    @property
    def text(self) -> str:
        """The text returned so far."""
        return "".join(self._pieces)

    def add(self, token_ids: Sequence[int]) -> str:
        """Adds tokens; returns the text that has become certain since the last call."""
        before = len(self._pieces)
        # With stop strings, token by token: tokens sampled behind the one that completes a stop string do not count.
        for ids in [[id] for id in token_ids] if self._stops else [list(token_ids)]:
            if not self.stopped:
                self.token_ids += ids
                self._grow()
        return "".join(self._pieces[before:])

    def finish(self) -> str:
        """Returns the text that was held back: no more tokens will come."""
        if self.stopped:
            return ""
        text = self._decode(self.token_ids[self._start :])
        self._pieces.append(text[self._shown :])
        self._shown = len(text)
        return self._pieces[-1]

    def _grow(self) -> None:
        decoded = self._decode(self.token_ids[self._start :])
        text = decoded.rstrip(INCOMPLETE)
        ends = [at for at in (text.find(stop, self._shown) for stop in self._stops) if at >= 0]
        self.stopped = bool(ends)
        sure = min(ends) if ends else len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._pieces.append(text[self._shown : sure])
        self._shown = max(sure, self._shown)
        if len(self.token_ids) - self._start > WINDOW:
            self._move_window(decoded)

    def _move_window(self, decoded: str) -> None:
        """Moves the window's start, if the text before it was returned and no character spans the cut. Enough text must
        follow to be sure of the character at the cut."""
        cut = len(self.token_ids) - KEPT
        head, tail = self._decode(self.token_ids[self._start : cut]), self._decode(self.token_ids[cut:])
        if head + tail == decoded and len(tail) >= CHARACTER_BYTES and len(head) <= self._shown:
            self._start, self._shown = cut, self._shown - len(head)


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
