"""Dispatches messages by their type: one method for each, and a class without all of them can't be imported.

class Cluster:
    _carry_out = Handlers(Instruction)

    @_carry_out.of(Train)
    def _train(self, order: Train) -> None: ...

self._carry_out[type(instruction)](self, instruction)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .messages import Message

S = TypeVar("S")
M = TypeVar("M", bound=Message)
R = TypeVar("R")


class Handlers(dict[type[Message], Callable[[Any, Any], Any]]):
    """The methods of a class that handle the messages of `family` (`Event` or `Instruction`), by the message's type.

    Raises `TypeError` for a type that is handled twice, and when the class is made for one that is not handled (Python
    3.11 shows it as the cause of a `RuntimeError`).
    """

    def __init__(self, family: type[Message]) -> None:
        self._family = family

    def of(self, *kinds: type[M]) -> Callable[[Callable[[S, M], R]], Callable[[S, M], R]]:
        """Makes the decorated method the handler of these types."""

        def register(method: Callable[[S, M], R]) -> Callable[[S, M], R]:
            if twice := [kind.__name__ for kind in kinds if kind in self]:
                raise TypeError(f"{method.__qualname__} handles {', '.join(twice)}, as another method does")
            self.update(dict.fromkeys(kinds, method))
            return method

        return register

    def __set_name__(self, owner: type, name: str) -> None:
        """Python calls this when the class is complete, with all its methods."""
        if missing := [kind.__name__ for kind in self._family.__subclasses__() if kind not in self]:
            raise TypeError(f"{owner.__name__}.{name} has no handler of {', '.join(missing)}")
