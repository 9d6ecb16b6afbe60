"""Verdicts: how a judge is told to write one, and the number that is read from its answer."""

from __future__ import annotations

import json
import re
from typing import Any

from ...base.errors import ConfigError
from ...base.worker_pool import WorkerError, WorkerPool, WorkerTimeout
from ..extraction import sendable

_TAIL = 4000  # characters of an answer that are searched, from its end
_MOST_BRACES = 100  # beginnings of JSON objects that are tried, from the end
_NUMBER = r"[-+]?[0-9]{1,9}(?:\.[0-9]{1,9})?"
_LINE = "VERDICT {nonce}: NUMBER"
_OBJECT = '{"nonce": "{nonce}", "verdict": NUMBER}'
_PATTERN_SECONDS = 1.0  # that a user's pattern may take


class VerdictReader:
    """Reads the last verdict of an answer: a line, or a JSON object, both with the question's nonce; or what the first
    group of a pattern matches. Thoughts before `</think>` are none."""

    def __init__(self, as_json: bool = False, pattern: str = "") -> None:
        """Raises ConfigError for a pattern that can't be used."""
        self._json, self._pattern = as_json, pattern
        self._pool: WorkerPool | None = None
        if pattern:
            if as_json:
                raise ConfigError("judge.json and judge.pattern are both set; a verdict has one form")
            check_pattern(pattern)
            # Some patterns take for ever for some texts, and the text is written by a model.
            path = "fluxjax.rewards.pattern_worker:last_group"
            self._pool = WorkerPool(path, 1, seconds=_PATTERN_SECONDS, memory_gib=0.25, name="judge.pattern")

    @property
    def form(self) -> str:
        """The form in which the judge is to write its verdict, with the field `{nonce}`."""
        return _OBJECT if self._json else _LINE

    async def read(self, text: str, nonce: str) -> float | None:
        """Returns the number of the last verdict; None where there is none. Raises WorkerDied."""
        text = text.rpartition("</think>")[2][-_TAIL:]
        if self._pool is not None:
            question = {"pattern": self._pattern.replace("{nonce}", nonce), "text": sendable(text)}
            try:
                return _number(await self._pool.acall(question))
            except (WorkerTimeout, WorkerError):
                return None
        return last_object(text, nonce) if self._json else last_line(text, nonce)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def check_pattern(pattern: str) -> None:
    """Raises ConfigError for what is no regular expression with a group."""
    try:
        groups = re.compile(pattern.replace("{nonce}", "0")).groups
    except re.error as error:
        raise ConfigError(f"judge.pattern is {pattern!r}, which is no regular expression: {error}") from error
    if not groups:
        raise ConfigError(f"judge.pattern is {pattern!r}; it must have a group (...), which matches the number")


def last_line(text: str, nonce: str) -> float | None:
    """Returns the number of the last `VERDICT nonce: NUMBER`, whatever marks of emphasis it is written with."""
    found = re.findall(
        rf"VERDICT[\s*`_\[(]{{0,4}}{nonce}(?![0-9A-Za-z])[\s*`_\])]{{0,4}}[:=]?[\s*`_\[(\"']{{0,4}}({_NUMBER})", text
    )
    return _number(found[-1]) if found else None


def last_object(text: str, nonce: str) -> float | None:
    """Returns the `verdict` of the last JSON object that has the nonce."""
    decoder, place = json.JSONDecoder(), len(text)
    for _ in range(_MOST_BRACES):
        if (place := text.rfind("{", 0, place)) < 0:
            break
        try:
            found, _ = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            continue
        if found.get("nonce") == nonce:
            return _number(found.get("verdict"))
    return None


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and re.fullmatch(_NUMBER, value.strip()):
        return float(value)
    return float(value) if isinstance(value, int | float) and abs(value) < 1e9 else None
