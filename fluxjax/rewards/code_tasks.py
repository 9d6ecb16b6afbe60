"""Coding tasks as prompts carry them, and the code in a response.

The answer of a prompt is a JSON object of one of these shapes:

- `{"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}`: a program reads each input and must print its output;
- `{"entry_point": "add", "inputs": [[1, 2], ...], "outputs": [3, ...]}`: a function is called with each of the
  inputs;
- `{"entry_point": "add", "tests": "def check(candidate): ..."}`: HumanEval's; `setup`, if there is one, is code that
  stands before the response's, such as HumanEval's prompt, which the response may also continue;
- `{"tests": "from solution import add\\ndef test_add(): ..."}`: KodCode's: functions `test_...`, classes `Test...`,
  unittest's classes. Plain assertions do as well (MBPP), also as a list.
"""

import dataclasses
import json
import re
from typing import Any

from ..base.errors import DataError
from ..base.scored import Prompt

LONGEST_CODE = 100_000  # characters
_FENCE = re.compile(  # quantifiers that give nothing back: a text of one endless line takes no quadratic time
    r"^([ \t]*+(?:(?:[-*+]|\d{1,9}[.)])[ \t]++)?+)(`{3,}+|~{3,}+)[ \t]*+([\w+-]*+)[^\n]*+\n(.*?)(?:^[ \t]*+\2|\Z)",
    re.MULTILINE | re.DOTALL,
)
_STATEMENT = re.compile(  # that begins a line; nothing is parsed here: Python's parser can be made to crash
    r"^[ \t]*+(?:(?:async|class|def|for|if|try|while|with)\b[^\n]*:|import[ \t]|from[ \t]+[\w.]++[ \t]+import\b"
    r"|return\b|[\w.]++\(|[\w.,\[\]* \t]++[-+/%&|^@]?=(?!=))",
    re.MULTILINE,
)
_LANGUAGES = ("python", "py", "python3", "py3")
_TEXTS = ("tests", "setup", "entry_point")


@dataclasses.dataclass(frozen=True)
class CodeTask:
    """The tests that a response's code must pass: `tests`, or pairs of `inputs` and `outputs`."""

    tests: str = ""
    setup: str = ""
    entry_point: str = ""
    inputs: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()

    @property
    def program(self) -> bool:
        """Says whether the code is a program with input and output, rather than functions."""
        return not self.tests and not self.entry_point

    @property
    def cases(self) -> int:
        """The number of its cases: each input of a program is one, or all tests of functions together."""
        return len(self.inputs) if self.program else 1


def read_task(prompt: Prompt) -> CodeTask:
    """Returns the task in a prompt's answer. Raises `DataError`, which names prompt and field."""
    try:
        return _task(json.loads(prompt.answer))
    except ValueError as error:
        raise DataError(
            f"prompt {prompt.id} of source {prompt.source}: answer is no coding task: {error}; it must be a JSON "
            f"object with tests, or with inputs and outputs"
        ) from error


def _task(answer: Any) -> CodeTask:
    if not isinstance(answer, dict):
        raise ValueError(f"it is of type {type(answer).__name__}")
    fields = {name: value for name, value in answer.items() if name in CodeTask.__dataclass_fields__}
    if isinstance(fields.get("tests"), list):
        fields["tests"] = "\n".join(map(str, fields["tests"]))
    for name in _TEXTS:
        if not isinstance(fields.get(name, ""), str):
            raise ValueError(f"{name} is of type {type(fields[name]).__name__}, not a text")
    for name in ("inputs", "outputs"):
        fields[name] = tuple(fields.get(name) or ())
    task = CodeTask(**fields)
    if task.tests.strip():
        return task
    if not task.inputs or len(task.inputs) != len(task.outputs):
        raise ValueError(f"it has no tests, {len(task.inputs)} inputs and {len(task.outputs)} outputs")
    if task.program and not all(isinstance(text, str) for text in (*task.inputs, *task.outputs)):
        raise ValueError("inputs and outputs of a program (a task without entry_point) must be texts")
    if not task.program and not all(isinstance(arguments, list) for arguments in task.inputs):
        raise ValueError("each of the inputs of a function must be a list of its arguments")
    return task


def find_code(text: str, entry_point: str = "") -> str:
    """Returns the code of a response, without the indentation of its fence; all of the response where it has no fence.
    Empty if there is none, or more than anybody would write."""
    found = [(language.lower(), _dedented(body, len(before))) for before, _, language, body in _FENCE.findall(text)]
    defines = re.compile(rf"^[ \t]*(?:async[ \t]+def|def|class)[ \t]+{re.escape(entry_point)}\b", re.MULTILINE)
    blocks = [block for block in found if block[0] in ("", *_LANGUAGES)]

    def rank(block: tuple[str, str]) -> tuple[bool, ...]:
        """A block counts if it defines what is asked for; else if it is called Python; else if it has a statement."""
        language, body = block
        return bool(entry_point and defines.search(body)), language in _LANGUAGES, bool(_STATEMENT.search(body))

    code = max(reversed(blocks), key=rank)[1] if blocks else "" if found else text
    return code if code.strip() and len(code) <= LONGEST_CODE else ""


def _dedented(body: str, columns: int) -> str:
    """Takes the indentation of a fence off the lines within it (CommonMark 0.31, 4.5), if the first one has it."""
    first = re.search(r"^[ \t]*+(?=\S)", body, re.MULTILINE)
    columns = min(columns, len(first[0]) if first else 0)
    return re.sub(rf"^[ \t]{{1,{columns}}}", "", body, flags=re.MULTILINE) if columns else body
