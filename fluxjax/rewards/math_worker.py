r"""The comparison of two answers by math-verify, as a worker process calls it. JAX is not imported here.

Math-verify accepts these pairs as equal; `strict` refuses them:
- `12\%` and `12`: here, `12\%` is 0.12;
- `(1,2)` and `\{1,2\}`: math-verify reads the first as an interval, and compares the ends;
- any two equations for which sympy lists no solution, such as `AB = BA + 1` and `AB = BA`.

Numbers are compared here, because math-verify accepts numbers that are equal to six decimals, as small ones always are.
"""

import contextlib
import logging
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, cast

import math_verify
import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import grader

from .extraction import last_place, near

logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns of a missing time-out; the pool bounds calls
_PERCENT = re.compile(r"([0-9.]+)\s?\\?%")
# `notation` has removed units. Only LaTeX is extracted: else plain expressions would be searched for in unreadable
# LaTeX.
_LATEX = [
    math_verify.LatexExtractionConfig(
        normalization_config=NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")
    )
]
_tolerance = 0.0  # relative tolerance of the present comparison
_library_equal = grader.sympy_numeric_eq


def equal(question: Mapping[str, Any]) -> bool:
    """Says whether the LaTeX `given` equals `reference`; without `given`, whether `reference` can be read."""
    global _tolerance
    if "given" not in question:
        return not isinstance(_parsed(str(question["reference"]))[0], str)
    _tolerance = float(question.get("tolerance", 1e-6))
    reference, given = str(question["reference"]), str(question["given"])
    if not question["strict"]:
        return _verified(_parsed(reference), _parsed(given))
    kinds = {_brackets(reference), _brackets(given)}
    if kinds == {"set", "tuple"}:
        return False
    if kinds == {"list", "tuple"}:
        reference, given = (f"({latex})" if _brackets(latex) == "list" else latex for latex in (reference, given))
    wanted, found = (_parsed(_PERCENT.sub(r"\\frac{\1}{100}", latex)) for latex in (reference, given))
    if not _verified(wanted, found):
        return False
    if isinstance(wanted[0], sympy.Eq) and not _solvable(wanted[0]):
        sides = [found[0].args, found[0].args[::-1]] if isinstance(found[0], sympy.Eq) else []
        return any(all(_verified([a], [b]) for a, b in zip(wanted[0].args, pair, strict=True)) for pair in sides)
    return True


def _parsed(latex: str) -> list[Any]:
    parsed = math_verify.parse(f"${latex}$", _LATEX, parsing_timeout=cast(int, None))[:1]  # a text if unreadable
    with contextlib.suppress(TypeError, AttributeError):  # interval bounds with i have no order: i stays a letter
        return [tree.xreplace({x: sympy.I for x in tree.free_symbols if x.name == "i"}) for tree in parsed]
    return parsed


def _verified(reference: list[Any], given: list[Any]) -> bool:
    return math_verify.verify(reference, given, allow_set_relation_comp=True, timeout_seconds=None)


def _numbers_equal(wanted: Any, found: Any, float_rounding: int, numeric_precision: int) -> bool:
    """Compares as `grader.sympy_numeric_eq` does, but with a relative tolerance. Sums are compared term by term."""
    expressions = isinstance(wanted, sympy.Expr) and isinstance(found, sympy.Expr)
    if not expressions or wanted.has(sympy.UnevaluatedExpr) or found.has(sympy.UnevaluatedExpr):
        return _library_equal(wanted, found, float_rounding, numeric_precision)
    if not wanted.has(sympy.Float) and not found.has(sympy.Float):
        difference = sympy.N(wanted - found)
        return difference == 0 or bool(difference.is_number and abs(difference) < 1e-50 * abs(sympy.N(wanted)))
    places = [last_place(repr(float(number))) if number.is_Float else Fraction(0) for number in (wanted, found)]
    terms = [sympy.expand(sympy.N(expression)).as_coefficients_dict() for expression in (wanted, found)]
    return terms[0].keys() == terms[1].keys() and all(
        near(Fraction(str(terms[0][term])), Fraction(str(terms[1][term])), places, _tolerance) for term in terms[0]
    )


grader.sympy_numeric_eq = _numbers_equal  # also called for numbers within sets, intervals and matrices


def _brackets(latex: str) -> str:
    latex = latex.strip()
    if latex.startswith(r"\{") and latex.endswith(r"\}"):
        return "set"
    if latex[:1] in ("(", "[") and latex[-1:] in (")", "]") and "," in latex:
        return "tuple"
    return "list" if "," in latex and not set(latex) & set("([{=<>") else ""


def _solvable(equation: sympy.Eq) -> bool:
    try:
        return bool(sympy.solve(equation, equation.free_symbols))
    except Exception:  # sympy found no method: then math-verify hasn't compared solutions, either
        return True


# The first comparison of a process builds tables for most of a second. This call builds them before answers are timed.
equal({"reference": r"x = \frac{1}{2}", "given": r"2x = 1", "strict": True})
