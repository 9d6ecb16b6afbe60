"""The shapes of tests: `check(candidate)`, functions `test_...`, classes, plain assertions, inputs with results."""

import ast
import builtins
import importlib.util
import inspect
import math
import types
from collections.abc import Iterable
from typing import Any


def wanted(tests: str, setup: str, entry_point: str) -> list[str]:
    """Returns the names that tests use and nothing but the code can define, in their order; `entry_point` is one.

    A name that the tests or `setup` define or import themselves, or that Python has, is none of these: code that
    defines `abs` or `math` does not replace that of the tests.
    """
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
    """Says why no code could pass these tests here: they are no Python, or import what is not installed. Empty if some
    may."""
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
    """Returns code that compiles: where it ends at the head of a function, which the response goes on with, a body of
    `pass` stands there."""
    for end in ("", "    pass\n", "\n    pass\n"):
        try:
            ast.parse(setup + end)
        except SyntaxError:
            continue
        return setup + end
    return ""


def run(task: dict[str, Any], solution: types.ModuleType) -> str:
    """Returns what failed, an empty text if nothing did. What a test raises comes through."""
    if not task["tests"]:
        return _compare(getattr(solution, task["entry_point"]), task["inputs"], task["outputs"])
    if "random" in task["tests"] + task["setup"]:
        import random

        random.seed(0)  # a response's score is the same each time
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
    """Calls a test, once for each combination that `pytest.mark.parametrize` gives it. Returns how often."""
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
    """Raises TypeError for a test that was called, but has not run."""
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
    """Compares plain data as JSON writes it: tuples are lists, and floats are equal within 1e-9 of the larger."""
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
    """Returns one line: the line of the tests that failed, and what was raised."""
    line, trace = "", error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == "tests":
            line = f"line {trace.tb_lineno} of the tests: "
        trace = trace.tb_next
    text = " ".join(str(error).split())[:300]
    return f"{line}{type(error).__name__}" + (f": {text}" if text else "")
