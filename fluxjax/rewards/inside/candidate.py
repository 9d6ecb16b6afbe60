"""Runs the code of a response as a program, or answers calls of the code's functions in lines of plain data.

This process gets neither the tests nor the expected values. Only the program's output, or the calls' values, count.
"""

import ast
import builtins
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any, BinaryIO

from . import plain


def run_program(path: str) -> None:
    """Runs the file as a main program, on the input and output of this process."""
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # `site`, which defines these, may be off
    with open(path) as file:
        source = file.read()
    module = sys.modules["__main__"]
    module.__dict__.clear()
    module.__dict__.update(__name__="__main__", __builtins__=builtins, __file__=path)
    sys.argv = [path]
    sys.path.pop(0)
    exec(compile(source, path, "exec"), module.__dict__)


def answer_calls(path: str) -> None:
    """Answers requests on standard input until the input ends. Text that the code prints is dropped."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    with open(path) as file:
        response: dict[str, str] = json.load(file)
    os.chdir("/tmp")
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    module = sys.modules["solution"] = types.ModuleType("solution")  # pickle finds the code by this name
    plain.write(answers, _outcome(lambda: _load(module, **response)))
    _answer(requests, answers, Objects(module))
    os._exit(0)  # does not wait for threads of the code


def _load(module: types.ModuleType, code: str, setup: str, entry_point: str) -> None:
    """Runs `code` after `setup`, or as the rest of `setup` if `code` continues the function `entry_point`."""
    pieces = [setup, code] if _stands_alone(code, entry_point) else [setup + code]
    for piece in pieces:
        exec(compile(piece, "solution.py", "exec"), module.__dict__)


def _stands_alone(code: str, entry_point: str) -> bool:
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return False
    names = [getattr(node, "name", "") for node in tree.body]
    return not entry_point or entry_point in names or bool(tree.body and not isinstance(tree.body[0], ast.Return))


class Objects:
    """The objects that tests name by number: 0 is the code's module, all others are results that are not plain data."""

    def __init__(self, module: types.ModuleType) -> None:
        self._objects: list[Any] = [module]

    def keep(self, value: Any) -> dict[str, int]:
        self._objects.append(value)
        return {"object": len(self._objects) - 1}

    def do(self, request: dict[str, Any]) -> Any:
        """Returns the encoded result of one request: the value of a name or a call, or the contents of an object."""
        target = self._objects[request["object"]]
        for name in request["path"]:
            target = getattr(target, name)
        match request["do"]:
            case "call":
                arguments, keywords = plain.decode(request["given"], self._objects.__getitem__)
                return plain.encode(target(*arguments, **keywords), self.keep)
            case "get":
                return self.keep(target) if callable(target) else plain.encode(target, self.keep)
            case "contents":  # (items or None, the length that the object claims or None)
                items = iter(target) if hasattr(target, "__iter__") else None
                return plain.encode((items, len(target) if hasattr(target, "__len__") else None), self.keep)
        raise plain.NotPlain("an unknown request")


def _answer(requests: BinaryIO, answers: BinaryIO, objects: Objects) -> None:
    while True:
        try:
            request = plain.read(requests)
        except EOFError:
            return
        outcome = _outcome(lambda request=request: objects.do(request))
        try:
            plain.write(answers, outcome)
        except plain.NotPlain as error:
            plain.write(answers, {"raised": [["NotPlain"], str(error)]})


def _outcome(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": work()}
    except BaseException as error:
        try:
            message = str(error)[:500]
        except BaseException:  # `__str__` of the code's class may raise
            message = ""
        return {"raised": [[kind.__name__ for kind in type(error).__mro__], message]}
