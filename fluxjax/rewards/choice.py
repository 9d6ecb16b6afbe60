"""A reward for multiple choice: a letter, or the text of an option, and never two of them."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from ..base.scored import Completion, Prompt, Reward
from .extraction import TAIL, explicit_answer
from .rules import normalise

LETTERS = "ABCDEFGHIJ"
_LONGEST = 1000  # characters of what may be an answer; a longer one is none
_OPTION_LINE = re.compile(r"^[ \t]{0,9}\(?([A-J])[).:]", re.MULTILINE)
_OPTION_INLINE = re.compile(r"(?<!\S)\(?([A-J])\)")
_BEGINS = re.compile(r"[\s*(\[]{0,4}([A-Ja-j])(?:[)\]*.:]{1,4}|$)\s{0,9}")
# A letter by itself. "A" and "I" are words, too, unless in brackets or before what tells of an answer.
_LETTER = re.compile(r"\(([A-J])\)|(?<![\w'\u2019])([B-HJ]|[AI](?!\s+(?!is\b|or\b|and\b)[a-z]))(?![\w'\u2019])")


@dataclasses.dataclass(frozen=True)
class Choice:
    """Gives 1 if the text chooses the option that the prompt's answer names: by letter, or by the option's text.

    Options are read from the prompt: `A. cat`, `(A) cat`, `A) cat`. The choice is what the text marks as its answer,
    else its last line that is not empty: `B`, `(B)`, `B. cat`, `the cat`. One that names two options is none.
    """

    kind: ClassVar[str] = "rule"

    async def score(self, completion: Completion) -> Reward:
        options = options_of(completion.prompt.text)
        wanted = chosen(completion.prompt.answer, options)
        if why := self.unreadable(completion.prompt):
            raise ValueError(f"the answer {completion.prompt.answer!r} of prompt {completion.prompt.id} {why}")
        text = explicit_answer(completion.text)
        if text is None:
            text = completion.text[-TAIL:].rstrip().rpartition("\n")[2]
        found = chosen(text, options)
        if len(found) > 1:
            return Reward(0.0, False, f"ambiguous: {' and '.join(sorted(found))}")
        if not found:
            return Reward(0.0, False, "no choice found")
        right = found == wanted
        return Reward(float(right), right)

    def unreadable(self, prompt: Prompt) -> str:
        """Says why the prompt's answer can't be graded; empty if it can."""
        wanted = chosen(prompt.answer, options_of(prompt.text))
        return "" if len(wanted) == 1 else "is neither a letter nor the text of an option"


def options_of(question: str) -> dict[str, str]:
    """Returns the options of a question by letter; none unless there are A and B. They stand at the beginning of lines,
    or, where none do, in brackets within one."""
    question = question[-TAIL:]
    for pattern in (_OPTION_LINE, _OPTION_INLINE):
        options = _options(question, list(pattern.finditer(question)))
        if len(options) > 1:
            return options
    return {}


def _options(question: str, marks: Sequence[re.Match[str]]) -> dict[str, str]:
    """The text between marks in alphabetical order, up to the end of its line; what stands before an A is none."""
    options: dict[str, str] = {}
    for index, mark in enumerate(marks):
        if mark[1] == "A":
            options = {}
        if mark[1] == LETTERS[len(options) : len(options) + 1]:
            end = marks[index + 1].start() if index + 1 < len(marks) else len(question)
            options[mark[1]] = normalise(question[mark.end() : end].strip().partition("\n")[0])
    return options


def chosen(text: str, options: Mapping[str, str]) -> set[str]:
    """Returns the letters that the text chooses: one, if it is clear; where no options are known, perhaps any."""
    if len(text) > _LONGEST:
        return set()
    plain = normalise(text)
    if same := {letter for letter, option in options.items() if option == plain}:
        return same
    known = set(options) or set(LETTERS)
    if (match := _BEGINS.match(text)) and match[1].upper() in known:
        rest = text[match.end() :]
        further = _letters(rest, known) | _named(normalise(rest), options)
        return {match[1].upper()} | further
    return _letters(text, known) | _named(plain, options)


def _letters(text: str, known: set[str]) -> set[str]:
    return {match[1] or match[2] for match in _LETTER.finditer(text)} & known


def _named(plain: str, options: Mapping[str, str]) -> set[str]:
    """The letters of options whose text stands in `plain` as whole words, but not within that of another of them."""
    held = {
        letter: option
        for letter, option in options.items()
        if option and re.search(rf"(?<!\w){re.escape(option)}(?!\w)", plain)
    }
    return {
        letter
        for letter, option in held.items()
        if not any(option != longer and option in longer for longer in held.values())
    }
