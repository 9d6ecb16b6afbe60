r"""The comparison of two answers by math-verify, as a worker process calls it. JAX is not imported here.

What math-verify takes for equal and `strict` refuses:
- `12\%` and `12`: here, `12\%` is 0.12;
- `(1,2)` and `\{1,2\}`: it reads the first as an interval, and compares the ends;
- any two equations that nothing solves, as `AB = BA + 1` and `AB = BA`.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any

import math_verify
import sympy

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time-out: the pool has one
_PERCENT = re.compile(r"([0-9.]+)\s?\\?%")


def equal(question: Mapping[str, Any]) -> bool:
    """Says whether the LaTeX `given` equals `reference`. Takes as long as it takes: whoever calls this bounds it."""
    reference, given = str(question["reference"]), str(question["given"])
    if not question["strict"]:
        return bool(_verified(_parsed(reference), _parsed(given)))
    if {_brackets(reference), _brackets(given)} == {"set", "tuple"}:
        return False
    wanted, found = (_parsed(_PERCENT.sub(r"\\frac{\1}{100}", latex)) for latex in (reference, given))
    if not _verified(wanted, found):
        return False
    if isinstance(wanted[0], sympy.Eq) and not _solvable(wanted[0]):
        return isinstance(found[0], sympy.Eq) and _same_sides(wanted[0], found[0])
    return True


def _parsed(latex: str) -> list[Any]:
    return math_verify.parse(f"${latex}$", parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def _verified(reference: list[Any], given: list[Any]) -> bool:
    return math_verify.verify(reference, given, timeout_seconds=None)


def _brackets(latex: str) -> str:
    latex = latex.strip()
    if latex.startswith(r"\{") and latex.endswith(r"\}"):
        return "set"
    return "tuple" if latex[:1] in ("(", "[") and latex[-1:] in (")", "]") and "," in latex else ""


def _same_sides(wanted: sympy.Eq, found: sympy.Eq) -> bool:
    return any(
        _verified([wanted.lhs], [left]) and _verified([wanted.rhs], [right])
        for left, right in ((found.lhs, found.rhs), (found.rhs, found.lhs))
    )


def _solvable(equation: sympy.Eq) -> bool:
    try:
        return bool(sympy.solve(equation, equation.free_symbols))
    except Exception:  # whatever sympy raises where it knows no way: math-verify hasn't compared solutions then, either
        return True


# The first comparison in a process builds tables for most of a second: before any answer's time is counted.
equal({"reference": r"x = \frac{1}{2}", "given": r"2x = 1", "strict": True})
