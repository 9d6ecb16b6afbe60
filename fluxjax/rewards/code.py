"""Rewards code by tests that the code cannot reach.

The code of a response runs in a sandbox. The tests run in a second sandbox, and call the code by sending plain data
(`inside/driver.py`). The code sees neither the expected values nor the verdict's channel. Ending its process, printing
a verdict, or returning an object that equals everything is worth 0.

The answer of a prompt is a JSON object of one of these shapes:

- `{"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}`: a program reads each input and must print its output.
- `{"entry_point": "add", "inputs": [[1, 2], ...], "outputs": [3, ...]}`: a function is called with each of the
  inputs.
- `{"entry_point": "add", "tests": "def check(candidate): ..."}`, as in HumanEval. An optional `setup` is code that
  stands before the response's code, such as HumanEval's prompt; the response may also continue `setup`.
- `{"tests": "from solution import add\\ndef test_add(): ..."}`, as in KodCode: functions `test_...`, classes `Test...`,
  classes of unittest; or plain assertions, also as a list (MBPP).
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import math
import re
import signal
from collections.abc import Mapping
from typing import Any, TypeVar

from ..base.errors import ConfigError, DataError
from ..base.scored import Completion, Prompt, Reward
from ..config.bounds import check_fields, positive
from . import inside
from .named import BuiltIn
from .sandbox import Outcome, Sandbox, SandboxJob, SandboxLimits, find_sandbox

_INSIDE = "import sys; sys.path.insert(0, '.'); from inside.{0} import {1}; {1}('{2}')"
_REASONS = {"memory": "used too much memory", "output": "printed too much", "files": "made too many files"}


@dataclasses.dataclass
class TimeLimits:
    """Gives a test case `min(max(minimum, factor * anchor), maximum)` seconds (Flexes, section 4.3, "Code Sandbox
    Execution"), or `maximum` seconds without an anchor. The anchor of a case is the longest time that a correct
    response has taken for it in this run. Without `adaptive`, every case has the maximum. Anchors are a part of a run's
    state, so that a resumed run gives the same times."""

    minimum: float = 2.0  # seconds
    factor: float = 2.0  # allows for cores that do other work, too
    maximum: float = 30.0  # seconds
    adaptive: bool = True
    anchors: dict[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.minimum <= self.maximum < float("inf"):
            raise ConfigError(f"time limits: 0 < minimum <= maximum is needed, got {self.minimum} and {self.maximum}")
        if not 1 <= self.factor < float("inf"):
            raise ConfigError(
                f"time limits: factor is {self.factor}; it must be at least 1, to cut off no right answer"
            )

    def seconds(self, case: str) -> float:
        if not self.adaptive or case not in self.anchors:
            return self.maximum
        return min(max(self.minimum, self.factor * self.anchors[case]), self.maximum)

    def learn(self, case: str, seconds: float) -> None:
        """Notes the time of a case in a response that passed all cases."""
        self.anchors[case] = max(self.anchors.get(case, 0.0), seconds)


_OBJECT = {"object": True}
L = TypeVar("L", TimeLimits, SandboxLimits)


def _made(kind: type[L], given: L | Mapping[str, Any], name: str) -> L:
    """Returns the object whose fields a configuration has given, or the object that was given. Raises `ConfigError`."""
    if not isinstance(given, Mapping):
        return given
    fields = [field.name for field in dataclasses.fields(kind) if field.name != "anchors"]
    if unknown := sorted(set(given) - set(fields)):
        raise ConfigError(f"reward code: {name} has no {', '.join(unknown)}; it has {', '.join(fields)}")
    try:
        limits = kind(**given)
    except TypeError as error:
        raise ConfigError(f"reward code: {name} is {dict(given)}: {error}") from None
    check_fields(limits, f"reward code: {name}.")
    return limits


@dataclasses.dataclass(eq=False)
class CodeReward(BuiltIn):
    """Gives 1 if a response's code passes all tests of its task, else 0. Raises `ConfigError` if it can't work."""

    name = kind = "code"
    counted = "runs", "timed_out", "killed"

    # bubblewrap, subprocess (which protects nothing), or an object of the protocol `Sandbox`
    sandbox: str | Sandbox = dataclasses.field(default="bubblewrap", metadata=_OBJECT)
    _: dataclasses.KW_ONLY
    python: str = ""  # the interpreter of tests and code; empty: this process's interpreter
    packages: bool = False  # tests and code may import site packages; the interpreter then starts more slowly
    slots: int = positive(8)  # responses that are tested at a time
    # Limits of a job, objects or dictionaries of their fields. `time_limits` replaces the seconds and the processor
    # time of `limits`. The size of a program's expected output is added to `limits.output`.
    limits: SandboxLimits = dataclasses.field(default_factory=SandboxLimits, metadata=_OBJECT)
    time_limits: TimeLimits = dataclasses.field(default_factory=TimeLimits, metadata=_OBJECT)
    seconds: float = positive(45.0)  # seconds for all inputs of a program; must be below the bound of kind `code`
    partial: bool = False  # the value of a program is the share of its inputs that have the right output

    def __post_init__(self) -> None:
        super().__post_init__()
        self.limits = _made(SandboxLimits, self.limits, "limits")
        self.time_limits = _made(TimeLimits, self.time_limits, "time_limits")
        if isinstance(self.sandbox, str):
            self._sandbox = find_sandbox(self.sandbox, self.python or None, self.slots)
        else:
            self._sandbox = self.sandbox
        self._python = (self._sandbox.python, "-I", "-B", *(() if self.packages else ("-S",)), "-c")
        files = importlib.resources.files(inside).iterdir()
        self._inside = {f"inside/{file.name}": file.read_bytes() for file in files if file.name.endswith(".py")}

    async def score(self, completion: Completion) -> Reward:
        """Returns the reward. Raises `DataError` for an answer that is no task, or can't run here; `SandboxError`."""
        task = read_task(completion.prompt)
        code = find_code(completion.text, task.entry_point)
        if not code:
            return Reward(0.0, False, "no code")
        name = f"{completion.prompt.source}/{completion.prompt.id}"
        results = await (self._program(name, task, code) if task.program else self._functions(name, task, code))
        failures = [result.failure for result in results if result.failure]
        correct = not failures
        if correct:
            for result in results:
                self.time_limits.learn(result.case, result.seconds)
        cases = len(task.inputs) if task.program else 1
        share = 1 - (len(failures) + cases - len(results)) / cases
        return Reward(
            value=share if self.partial else float(correct),
            correct=correct,
            reason=failures[0] if failures else "",
            parts={"cases": share},
            seconds=sum(result.seconds for result in results),  # without the wait for a slot
        )

    def state_dict(self) -> dict[str, Any]:
        return {"anchors": dict(self.time_limits.anchors)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.time_limits.anchors = {str(case): float(seconds) for case, seconds in state["anchors"].items()}

    def _within(self, case: str, left: float = math.inf, expected: str = "") -> SandboxLimits:
        seconds, output = min(self.time_limits.seconds(case), left), len(expected.encode(errors="replace"))
        return dataclasses.replace(self.limits, seconds=seconds, cpu=seconds, output=self.limits.output + output)

    async def _program(self, name: str, task: CodeTask, code: str) -> list[_Result]:
        """Runs a program for each input until an input fails; with `partial`, for all inputs that time allows."""
        results: list[_Result] = []
        for number, (given, expected) in enumerate(zip(task.inputs, task.outputs, strict=True)):
            case, left = f"{name}#{number}", self.seconds - sum(result.seconds for result in results)
            if left <= 0:
                results.append(_Result(case, 0.0, f"input {number}: all inputs took more than {self.seconds:g} s"))
                break
            limits = self._within(case, left, expected)
            job = self._job("candidate", "run_program", "solution.py", code, limits, given.encode(errors="replace"))
            outcome = await self._sandbox.run(job)
            self._count(outcome)
            failure = ended(outcome, limits)
            if not failure and _lines(outcome.stdout.decode(errors="replace")) != _lines(expected):
                failure = "another output than expected"
            results.append(_Result(case, outcome.seconds, failure and f"input {number}: {failure}"))
            if failure and not self.partial:
                break
        return results

    async def _functions(self, name: str, task: CodeTask, code: str) -> list[_Result]:
        limits = self._within(name)
        response = {"code": code, "setup": task.setup, "entry_point": task.entry_point}
        outcome, partner = await self._sandbox.converse(
            self._job("driver", "run_tests", "task.json", json.dumps(dataclasses.asdict(task)), limits),
            self._job("candidate", "answer_calls", "response.json", json.dumps(response), limits),
        )
        self._count(outcome, partner)
        return [_Result(name, outcome.seconds, _verdict(outcome, partner, limits))]

    def _count(self, *outcomes: Outcome) -> None:
        self._counts["runs"] += 1
        self._counts["timed_out"] += any(map(_timed_out, outcomes))
        self._counts["killed"] += any(outcome.reason in _REASONS for outcome in outcomes)

    def _job(
        self, module: str, function: str, name: str, content: str, limits: SandboxLimits, stdin: bytes = b""
    ) -> SandboxJob:
        """Returns a job that calls a function of `inside/` with a file."""
        files = {**self._inside, name: content.encode(errors="replace")}
        return SandboxJob((*self._python, _INSIDE.format(module, function, name)), files, stdin, limits)


@dataclasses.dataclass(frozen=True)
class _Result:
    case: str
    seconds: float
    failure: str  # empty: passed


def _lines(text: str) -> list[str]:
    """Returns the lines of a text, without white space at their ends and without empty lines at the text's end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _timed_out(outcome: Outcome) -> bool:
    return outcome.reason == "time" or outcome.signal == signal.SIGXCPU


def ended(outcome: Outcome, limits: SandboxLimits) -> str:
    """Says why a job failed; an empty text if it ended well."""
    if _timed_out(outcome):
        return f"timed out after {limits.seconds:g} s"
    if outcome.reason in _REASONS:
        return _REASONS[outcome.reason]
    if outcome.exit:
        last = outcome.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return " ".join((f"exit status {outcome.exit}", *last))[:300]
    return ""


def _verdict(outcome: Outcome, partner: Outcome, limits: SandboxLimits) -> str:
    """Returns the failure that the tests report, and the failure of the code's process if there is one. Returns an
    empty text if all tests passed. Raises `DataError` for unusable tests."""
    if failure := ended(outcome, limits):
        return failure
    try:
        verdict = json.loads(outcome.stderr.splitlines()[-1])
        passed, reason, unusable = verdict["passed"] is True, str(verdict["reason"]), verdict.get("unusable")
    except (ValueError, LookupError, TypeError):
        return "the tests ended without a verdict"
    if unusable:
        raise DataError(f"a coding task can't be used: {reason}")
    if passed:
        return ""
    its_end = "" if partner.reason == "partner" else ended(partner, limits)
    return f"{reason} ({its_end})" if its_end else reason or "failed"


# --- tasks and code ---------------------------------------------------------------------------------

LONGEST_CODE = 100_000  # characters
_FENCE = re.compile(  # possessive quantifiers: a text of one endless line takes no quadratic time
    r"^([ \t]*+(?:(?:[-*+]|\d{1,9}[.)])[ \t]++)?+)(`{3,}+|~{3,}+)[ \t]*+([\w+-]*+)[^\n]*+\n(.*?)(?:^[ \t]*+\2|\Z)",
    re.MULTILINE | re.DOTALL,
)
_STATEMENT = re.compile(  # a statement at the start of a line; not parsed, because text can crash Python's parser
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
        raise ValueError(f"it has {len(task.inputs)} inputs, {len(task.outputs)} outputs and no tests")
    if task.program and not all(isinstance(text, str) for text in (*task.inputs, *task.outputs)):
        raise ValueError("inputs and outputs of a program (a task without entry_point) must be texts")
    if not task.program and not all(isinstance(arguments, list) for arguments in task.inputs):
        raise ValueError("each of the inputs of a function must be a list of its arguments")
    return task


def find_code(text: str, entry_point: str = "") -> str:
    """Returns the code of a response, without the indentation of its fence; all of the response if it has no fence.
    Returns an empty text if all fences are of other languages, or if the code is longer than `LONGEST_CODE`."""
    found = [(language.lower(), _dedented(body, len(before))) for before, _, language, body in _FENCE.findall(text)]
    defines = re.compile(rf"^[ \t]*(?:async[ \t]+def|def|class)[ \t]+{re.escape(entry_point)}\b", re.MULTILINE)
    blocks = [block for block in found if block[0] in ("", *_LANGUAGES)]

    def rank(block: tuple[str, str]) -> tuple[bool, ...]:
        """Ranks blocks that define `entry_point` first, then blocks marked as Python, then blocks with a statement."""
        language, body = block
        return bool(entry_point and defines.search(body)), language in _LANGUAGES, bool(_STATEMENT.search(body))

    code = max(reversed(blocks), key=rank)[1] if blocks else "" if found else text
    return code if code.strip() and len(code) <= LONGEST_CODE else ""


def _dedented(body: str, columns: int) -> str:
    """Removes the fence's `columns` of indentation (CommonMark 0.31, 4.5), but no more than the first text has."""
    first = re.search(r"^[ \t]*+(?=\S)", body, re.MULTILINE)
    columns = min(columns, len(first[0]) if first else 0)
    return re.sub(rf"^[ \t]{{1,{columns}}}", "", body, flags=re.MULTILINE) if columns else body
