"""Runs the tests of a task against code in another process, and writes the verdict.

A test sees a stand-in for each function or class of the code. A call sends its arguments as plain data, and the test
compares plain data. The verdict is the last line of standard error. Requests to the code's process go to standard
output, and answers come on standard input.
"""

import ast
import builtins
import importlib.util
import inspect
import json
import math
import os
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from . import plain

_QUIET = ("StopIteration", "StopAsyncIteration")  # would silently end a test's loop over `map(candidate, ...)`


class Gone(Exception):
    """The code's process has ended or broken the protocol, and no later test passes."""


class Raised(Exception):
    """The code raised an exception that is not of a built-in type, or of one that tests can't expect (`_exception`)."""


class Conversation:
    """Requests to the code's process and its answers."""

    def __init__(self) -> None:
        self._answers, self._requests = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        self.broken = ""
        self._contents: dict[Any, Any] = {}  # contents of objects that were read since the last call of the code

    def hear(self) -> Any:
        """Returns the next value from the code's process. Raises the code's exception, or `Gone`."""
        if self.broken:
            raise Gone(self.broken)
        try:
            answer = plain.read(self._answers)
            if "value" in answer:
                return plain.decode(answer["value"], lambda number: StandIn(self, number))
            names, message = answer["raised"]
            names, message = [str(name) for name in names], str(message)
        except EOFError:
            self.broken = "the code ended its process"
        except (plain.NotPlain, RecursionError) as error:
            self.broken = f"the code's answer is {error}"
        except (TypeError, ValueError, KeyError):
            self.broken = "the code answered nonsense"
        else:
            raise _exception(names, message)
        raise Gone(self.broken)

    def ask(self, number: int, path: tuple[str, ...], do: str, **more: Any) -> Any:
        if self.broken:
            raise Gone(self.broken)
        if do == "call":
            self._contents.clear()
        try:
            plain.write(self._requests, {"object": number, "path": path, "do": do, **more})
        except BrokenPipeError:
            self.broken = "the code ended its process"
            raise Gone(self.broken) from None
        return self.hear()

    def contents(self, number: int, path: tuple[str, ...]) -> tuple[Any, Any]:
        """Returns the items and the length of an object; None stands for missing items, and for a missing length. Items
        are copied once, so that `len` and a loop agree."""
        if (number, path) not in self._contents:
            items, length = self.ask(number, path, "contents")
            self._contents[number, path] = (None, length) if items is None else (items := list(items), len(items))
        return self._contents[number, path]


def _exception(names: list[str], message: str) -> Exception:
    """Returns an exception of the first type in `names` that tests can expect, or else a `Raised`. These are the
    built-in exceptions, but not `Exception` itself and those in `_QUIET`."""
    for name in names:
        kind = getattr(builtins, name, None)
        if name not in _QUIET and isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception:
            try:
                return kind(message)
            except TypeError:  # UnicodeDecodeError takes five arguments
                continue
    return Raised(f"{names[0] if names else 'an exception'}: {message}")


class StandIn:
    """Stands for a function, class or object of the code. A stand-in equals only itself, and `bool` raises TypeError,
    so that an answer that is not plain data passes no comparison."""

    def __init__(self, conversation: Conversation, number: int, path: tuple[str, ...] = ()) -> None:
        self.__dict__["_at"] = conversation, number, path

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        conversation, number, path = self._at
        return conversation.ask(number, path, "call", given=plain.encode((arguments, keywords), _number))

    def __getattr__(self, name: str) -> Any:
        conversation, number, path = self._at
        if name.startswith("_"):
            raise AttributeError(name)
        return conversation.ask(number, (*path, name), "get")

    def __bool__(self) -> bool:
        raise TypeError("the code answered with an object, not with plain data")

    def __len__(self) -> int:
        conversation, *target = self._at
        return conversation.contents(*target)[1]  # None, for a missing length, makes `len` raise TypeError

    def __getitem__(self, key: Any) -> Any:
        return self._method("__getitem__", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._method("__setitem__", key, value)

    def __iter__(self) -> Iterator[Any]:
        conversation, *target = self._at
        return iter(conversation.contents(*target)[0])

    def _method(self, name: str, *arguments: Any) -> Any:
        conversation, number, path = self._at
        return StandIn(conversation, number, (*path, name))(*arguments)


def _number(value: Any) -> dict[str, int]:
    if isinstance(value, StandIn) and not value._at[2]:
        return {"object": value._at[1]}
    raise plain.NotPlain(f"of type {type(value).__name__}: only plain data can be given to the code")


def solution(conversation: Conversation, names: Iterable[str]) -> types.ModuleType:
    """Returns the module `solution`, from which tests import the code. `from solution import *` imports `names`."""
    module = types.ModuleType("solution")
    module.__getattr__ = StandIn(conversation, 0).__getattr__  # type: ignore[method-assign]
    module.__all__ = list(names)  # type: ignore[attr-defined]
    return module


def run_tests(path: str) -> None:
    """Runs the tests of the task in the JSON file `path`, writes the verdict, and ends this process."""
    conversation = Conversation()
    verdicts = os.fdopen(os.dup(2), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # the tests' prints must not reach the verdict
        os.dup2(nowhere, standard)
    with open(path) as file:
        task = json.load(file)
    if why := unusable(task["tests"]):
        print(json.dumps({"passed": False, "reason": why, "unusable": True}), file=verdicts, flush=True)
        os._exit(0)
    try:
        conversation.hear()  # raises if the code did not load
        sys.modules["solution"] = solution(conversation, wanted(task["tests"], task["setup"], task["entry_point"]))
        failure = run(task, sys.modules["solution"])
    except BaseException as error:  # tests may raise anything
        failure = described(error)
    if conversation.broken:
        failure = conversation.broken
    print(json.dumps({"passed": not failure, "reason": failure}), file=verdicts, flush=True)
    os._exit(0)


# The forms of tests are `check(candidate)`, functions `test_...`, classes, assertions, and inputs with results.


def wanted(tests: str, setup: str, entry_point: str) -> list[str]:
    """Returns the names, each once, that `setup` and the tests use and that only the code can define. A used
    `entry_point` is always among these names. Names of Python, and names that the tests or `setup` define or import,
    are left out. The code's own `abs` therefore does not replace the tests' `abs`."""
    nodes = [node for source in (complete(setup), tests) for node in ast.walk(ast.parse(source))]
    bound = set(dir(builtins))
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
    used = [node.id for node in nodes if isinstance(node, ast.Name)]
    return [name for name in dict.fromkeys(used) if name == entry_point or name not in bound]


def unusable(tests: str) -> str:
    """Returns why no code can pass these tests (no Python, or an import of a missing package), or an empty text."""
    try:
        body = ast.parse(tests).body
    except SyntaxError as error:
        return f"its tests are no Python: {error}"
    for node in body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
        for root in {name.partition(".")[0] for name in names} - {"solution"}:
            if importlib.util.find_spec(root) is None:
                return f"its tests import {root}, which the interpreter of the sandbox does not have"
    return ""


def complete(setup: str) -> str:
    """Returns `setup` as code that compiles, or an empty text. A function's head at its end gets the body `pass`."""
    for end in ("", "    pass\n", "\n    pass\n"):
        try:
            ast.parse(setup + end)
        except SyntaxError:
            continue
        return setup + end
    return ""


def run(task: dict[str, Any], solution: types.ModuleType) -> str:
    """Returns the failure, or an empty text. Raises the exceptions of tests."""
    if not task["tests"]:
        return _compare(getattr(solution, task["entry_point"]), task["inputs"], task["outputs"])
    if "random" in task["tests"] + task["setup"]:
        import random

        random.seed(0)  # equal responses should get equal scores
    namespace: dict[str, Any] = {"__name__": "tests"}
    exec(compile(complete(task["setup"]), "setup", "exec"), namespace)
    for name in solution.__all__:
        namespace[name] = getattr(solution, name)
    exec(compile(task["tests"], "tests", "exec"), namespace)
    if "check" in namespace and task["entry_point"]:
        namespace["check"](getattr(solution, task["entry_point"]))
        return ""
    found = 0
    for name, value in list(namespace.items()):
        if isinstance(value, types.FunctionType) and name.startswith("test"):
            found += _call(value)
        elif not isinstance(value, type) or value.__module__ != "tests":
            continue
        elif any(base.__module__ == "unittest.case" for base in value.__mro__):
            if failure := _unittest(value):
                return failure
            found += 1
        elif name.startswith("Test"):
            found += _methods(value)
    return "" if found or asserts(task["tests"]) else "the tests have nothing that tests"


def asserts(tests: str) -> bool:
    """Says whether there is an assertion outside of functions and classes."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    statements = [node for node in ast.parse(tests).body if not isinstance(node, definitions)]
    return any(isinstance(node, ast.Assert) for statement in statements for node in ast.walk(statement))


def _call(function: types.FunctionType) -> int:
    """Calls a test once for each combination of its `pytest.mark.parametrize`. Returns the number of calls."""
    combinations: list[dict[str, Any]] = [{}]
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names, rows = mark.args[:2]
            names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
            combinations = [c | dict(_row(names, row)) for c in combinations for row in rows]
    for keywords in combinations:
        _ran(function(**keywords))
    return len(combinations)


def _ran(result: Any) -> None:
    """Raises TypeError if a test's result is a coroutine or a generator, which did not run."""
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise TypeError("a test that is a coroutine or a generator is not supported")


def _row(names: list[str], row: Any) -> Iterable[tuple[str, Any]]:
    if hasattr(row, "marks"):  # a `pytest.param`
        return zip(names, row.values, strict=True)
    return zip(names, row if len(names) > 1 else (row,), strict=True)


def _methods(kind: type) -> int:
    names = [name for name in dir(kind) if name.startswith("test")]
    for name in names:
        instance = kind()
        for before in ("setup_method", "setUp"):
            if hasattr(instance, before):
                getattr(instance, before)()
        _ran(getattr(instance, name)())
    return len(names)


def _unittest(kind: type) -> str:
    import unittest

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(kind).run(result)
    if result.wasSuccessful() and result.testsRun > len(result.skipped):
        return ""
    for test, text in [*result.failures, *result.errors]:
        return f"{test.id()}: {text.strip().splitlines()[-1]}"
    return f"{kind.__name__} has no test that ran"


def _compare(function: Any, inputs: list[list[Any]], outputs: list[Any]) -> str:
    for number, (arguments, expected) in enumerate(zip(inputs, outputs, strict=True)):
        if not same(function(*arguments), expected):
            return f"case {number}: another result than expected"
    return ""


def same(given: Any, expected: Any) -> bool:
    """Compares plain data as in JSON. Tuples equal lists, and numbers are equal within 1e-9 of the larger number."""
    if isinstance(given, list | tuple) and isinstance(expected, list | tuple):
        return len(given) == len(expected) and all(map(same, given, expected))
    if isinstance(given, dict) and isinstance(expected, dict):
        named = {str(key): value for key, value in given.items()}  # JSON's keys are texts
        return named.keys() == expected.keys() and all(same(named[key], expected[key]) for key in expected)
    if isinstance(given, bool) or isinstance(expected, bool):
        return given is expected
    if isinstance(given, int | float) and isinstance(expected, int | float):
        return given == expected or math.isclose(given, expected, rel_tol=1e-9)
    return type(given) is type(expected) and given == expected


def described(error: BaseException) -> str:
    """Returns the failed line of the tests and the error, as one line of text."""
    line, trace = "", error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == "tests":
            line = f"line {trace.tb_lineno} of the tests: "
        trace = trace.tb_next
    text = " ".join(str(error).split())[:300]
    return f"{line}{type(error).__name__}" + (f": {text}" if text else "")
