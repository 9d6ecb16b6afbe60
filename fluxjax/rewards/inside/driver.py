"""Runs the tests of a task against code that is in another process, and says what came out.

A test sees a stand-in for each function or class of the code. A call sends its arguments as plain data, and what the
test compares is plain data. The verdict is the last line of standard error; standard input and output are the
conversation.
"""

import builtins
import json
import os
import sys
import time
import types
from collections.abc import Iterable, Iterator
from typing import Any

from . import cases, plain

_QUIET = ("StopIteration", "StopAsyncIteration")  # would end a test's loop over `map(candidate, ...)` before its time


class Gone(Exception):
    """The code's process has ended or talks nonsense. Once it has, no test passes."""


class Raised(Exception):
    """The code raised an exception that is not one of Python's own."""


class Conversation:
    """Requests to the code's process and its answers."""

    def __init__(self) -> None:
        self._answers, self._requests = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        self.broken = ""
        self._contents: dict[Any, Any] = {}  # of objects, since the code was last called

    def hear(self) -> Any:
        """Returns the value that comes next. Raises what the code raised, or `Gone`."""
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
            self.broken = f"the code answered what is {error}"
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
        """Returns the items of an object and its length, None for what it has not. They are copied once: it can't say
        one thing to `len` and another to a loop."""
        if (number, path) not in self._contents:
            items, length = self.ask(number, path, "contents")
            self._contents[number, path] = (None, length) if items is None else (items := list(items), len(items))
        return self._contents[number, path]


def _exception(names: list[str], message: str) -> Exception:
    """Returns an exception of the first of these types that is Python's own, so that tests can expect it."""
    for name in names:
        kind = getattr(builtins, name, None)
        if name not in _QUIET and isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception:
            try:
                return kind(message)
            except TypeError:  # UnicodeDecodeError takes five arguments
                continue
    return Raised(f"{names[0] if names else 'an exception'}: {message}")


class StandIn:
    """Stands for a function, class or object of the code: it can be called, and asked for attributes and items.

    It equals nothing but itself, and is neither true nor false: an answer that is no plain data passes no comparison.
    """

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
        return conversation.contents(*target)[1]  # a TypeError where there is none

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
    """Returns the module that tests import the code from, as `solution`; `from solution import *` gives `names`."""
    module = types.ModuleType("solution")
    module.__getattr__ = StandIn(conversation, 0).__getattr__  # type: ignore[method-assign]
    module.__all__ = list(names)  # type: ignore[attr-defined]
    return module


def run_tests(path: str) -> None:
    """Runs the task in the JSON file `path`."""
    conversation = Conversation()
    verdicts = os.fdopen(os.dup(2), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # what tests print is no verdict
        os.dup2(nowhere, standard)
    with open(path) as file:
        task = json.load(file)
    if unusable := cases.unusable(task["tests"]):
        print(json.dumps({"passed": False, "reason": unusable, "unusable": True}), file=verdicts, flush=True)
        os._exit(0)
    began = time.perf_counter()
    try:
        conversation.hear()  # whether it has loaded
        sys.modules["solution"] = solution(
            conversation, cases.wanted(task["tests"], task["setup"], task["entry_point"])
        )
        failure = cases.run(task, sys.modules["solution"])
    except BaseException as error:  # tests may end as they like
        failure = cases.described(error)
    if conversation.broken:
        failure = conversation.broken
    seconds = time.perf_counter() - began
    print(json.dumps({"passed": not failure, "reason": failure, "seconds": seconds}), file=verdicts, flush=True)
    os._exit(0)
