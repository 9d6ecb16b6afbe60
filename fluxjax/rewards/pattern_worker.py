"""A user's pattern and a model's text, as a worker process matches them: some take for ever."""

import re
from collections.abc import Mapping
from typing import Any


def matches(question: Mapping[str, Any]) -> bool:
    """Says whether all of `text` matches `pattern`; a full stop is any character, a newline too."""
    return re.fullmatch(str(question["pattern"]), str(question["text"]), re.DOTALL) is not None


def last_group(question: Mapping[str, Any]) -> str | None:
    """Returns the first group of the last place in `text` that `pattern` matches; None where there is none."""
    found = None
    for match in re.finditer(str(question["pattern"]), str(question["text"])):
        found = match[1]
    return found
