r"""The reward for mathematical answers: texts, numbers and LaTeX.

Comparisons without algebra are decided at once. Comparisons with algebra go to math-verify in worker processes, since
some take for ever (`9^{9^{9^9}}`) or all memory. The worker is then killed, and the answer counts as wrong.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from ..base.errors import ConfigError
from ..base.scored import Completion, Prompt, Reward
from ..base.worker_pool import WorkerError, WorkerMemory, WorkerPool, WorkerTimeout
from ..config.bounds import not_negative, positive
from .extraction import as_number, explicit_answer, last_number, last_place, near, sendable
from .named import BuiltIn
from .rules import RIGHT, WRONG

_WORD = re.compile(r"(?:[a-z]+ )*[a-z]{4,}(?: [a-z]+)*|yes|no", re.IGNORECASE)  # fewer letters may be a product
# Math-verify misreads endless lists; products of transposes or vectors (it swaps the factors); adjacent numbers (it
# adds the numbers).
_MISREAD = re.compile(r"\\ldots|[A-Z]\)?\^\{T\}|\\vec.*\\times|(?<![0-9_^.])[0-9]+(?:\.[0-9]+)? +[0-9]")
_POINTS = re.compile(r"[A-Z](?: ?[A-Z]){1,2}")


@dataclasses.dataclass(eq=False)
class MathAnswer(BuiltIn):
    r"""Gives 1 if the answer in the text equals the prompt's, else 0. The answer is the text in `<answer>` tags, else
    in `\boxed{}`, else behind "the answer is", else the last number (with `only_marked`, nothing). The answer is
    compared as text, as a number, and at last by math-verify, for which `x^2+2x+1` equals `(x+1)^2`. A unit may be
    missing, but not differ. A list without brackets is a set: its order doesn't count. Needs the extra `math`."""

    name = kind = "math"
    counted = "compared", "timed_out", "gave_up"
    # Numbers, one or both with a decimal point, are equal if they differ by at most this share of the larger number,
    # and by less than one unit of the last written place.
    tolerance: float = not_negative(1e-6)
    lenient: bool = False  # compares as math-verify does: 12 % is also 12, the set {1, 2} also the pair (1, 2)
    only_marked: bool = False
    most_characters: int = positive(1000)  # a longer answer is wrong
    workers: int = positive(4)  # processes, of about 60 MiB each
    seconds: float = positive(2.0)  # the most seconds of a comparison
    memory_gib: float = positive(1.0)  # the most memory of a comparison

    def __post_init__(self) -> None:
        super().__post_init__()
        missing = [name for name in ("math_verify", "antlr4") if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(f"the reward 'math' needs {missing[0]}: install the extra, pip install 'fluxjax[math]'")
        path, name = f"{__package__}.math_worker:equal", "the reward 'math'"
        self._pool = WorkerPool(path, self.workers, seconds=self.seconds, memory_gib=self.memory_gib, name=name)

    async def score(self, completion: Completion) -> Reward:
        """Scores a completion. If the comparison fails, or takes too much time or memory, the answer is wrong. Raises
        the other errors of `WorkerPool.acall`."""
        given = explicit_answer(completion.text)
        if given is None and not self.only_marked:
            given = last_number(completion.text)
        if given is None:
            return Reward(0.0, False, "no answer found")
        if len(given) > self.most_characters:
            return Reward(0.0, False, f"the answer is longer than {self.most_characters} characters")
        reference, given = notation(completion.prompt.answer), notation(sendable(given))
        equal = decided(reference, given, self.tolerance, self.lenient)
        if equal is None:
            question = {"reference": reference.latex, "given": given.latex, "strict": not self.lenient}
            question["tolerance"] = self.tolerance
            self._counts["compared"] += 1
            try:
                equal = await self._pool.acall(question)
            except WorkerTimeout:
                self._counts["timed_out"] += 1
                return Reward(0.0, False, f"comparing the answer took more than {self.seconds:g} s")
            except (WorkerMemory, WorkerError) as error:  # the answer's own fault: it is too large, or nests too deep
                self._counts["gave_up"] += 1
                return Reward(0.0, False, f"comparing the answer: {error}"[:200])
        return RIGHT if equal else WRONG

    def unreadable(self, prompt: Prompt) -> str:
        parts = notation(prompt.answer)
        if as_number(parts.plain) is not None or _WORD.fullmatch(parts.plain) or _MISREAD.search(parts.plain):
            return ""
        try:
            readable = parts.formula and self._pool.call({"reference": sendable(parts.latex)})
        except (WorkerTimeout, WorkerMemory, WorkerError):
            readable = False
        return "" if readable else "is no formula that can be read"

    def close(self) -> None:
        self._pool.close()


def decided(reference: Notation, given: Notation, tolerance: float, lenient: bool) -> bool | None:
    """Says whether answers are equal; None if only algebra can tell."""
    other_unit = reference.unit != given.unit and reference.unit and given.unit  # a missing unit does not differ
    if not given.formula or other_unit or reference.signs != given.signs:
        return False
    wanted, found = reference.plain, given.plain
    if wanted.replace(" ", "") == found.replace(" ", ""):
        return True
    if _WORD.fullmatch(wanted) or (_POINTS.fullmatch(wanted) and _POINTS.fullmatch(found)):
        return wanted.casefold() == found.casefold()  # math-verify reads words as products of letters, in any order
    if reference.words != given.words or _MISREAD.search(wanted) or _MISREAD.search(found):
        return False
    numbers = as_number(wanted), as_number(found)
    if numbers[0] is not None and numbers[1] is not None:
        scales = [Fraction(1)]
        if lenient and ("%" in wanted) != ("%" in found):
            scales.append(Fraction(1, 100) if "%" in wanted else Fraction(100))
        places = last_place(wanted), last_place(found)
        tolerance = tolerance if any(places) else 0.0
        return any(near(numbers[0], numbers[1] * scale, places, tolerance) for scale in scales)
    return None


# --- the parts of an answer's LaTeX ---------------------------------------------------------------

_NAMES = (  # names of units, without a plural's s; slashes separate the names of one unit
    "m/meter/metre cm/centimeter/centimetre mm/millimeter/millimetre km/kilometer/kilometre in/inch/inche ft/foot/feet "
    "yd/yard mi/mile mg/milligram g/gram kg/kilogram lb/pound oz/ounce ton/tonne s/sec/second min/minute h/hr/hour day "
    "week month yr/year ml/milliliter/millilitre l/liter/litre gal/gallon degree/deg c/celsius f/fahrenheit rad/radian "
    "unit dollar/usd cent euro/eur n/newton j/joule w/watt v/volt hz/hertz mph person/people"
)
_UNITS = {name: names.split("/")[0] for names in _NAMES.split() for name in names.split("/")}
# A single plural behind a number names counted things, unless it is a part of the number, as "millions" is.
_COUNTED = r"(?!(?:plu|minu|time|thousand|million|billion|dozen|hundred|halve|third|quarter|alway)s)[a-z]{2,}[^s\W\d]s"
_BASES = re.findall(r"\w+", "two three four five six seven eight nine ten eleven twelve")
_SIGNS = "\u2212\u2013\u2260\u2264\u2265\u221e\u03c0\u00d7\u00b7\u2205\u00b0\u221a\u2026"
_COMMANDS = re.findall(r"\S+", r"- - \neq \leq \geq \infty \pi \times \cdot \emptyset ^\circ \sqrt \ldots")
_TRANSLATED = {ord(sign): f"{command} ".replace("- ", "-") for sign, command in zip(_SIGNS, _COMMANDS, strict=True)}


def _repeating(match: re.Match[str]) -> str:
    """Returns a repeating decimal as a fraction."""
    whole, first, again = match.groups()
    value = Fraction(int(whole + first + again) - int(whole + first), 10 ** len(first) * (10 ** len(again) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


_WORDY = r"text(?:bf|it|rm|normal)?|math(?:rm|bf|it|sf)|operatorname|mbox"
_DECIMAL = r"(?<![0-9])([0-9]{1,20})\."
_REWRITTEN: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [  # (pattern, replacement), in this order
    (r"^(-?)\\\$\s?([0-9.,]+)$", r"\1\2\\text{dollars}"),
    # Removes dollars, sizes of brackets, a space of negative width, and \( \) \[ \] except in the \\[2pt] of a matrix.
    (r"\\?\$|(?<!\\)\\[()\[\]]|\\(?:left|right|[bB]igg?[lr]?|displaystyle)(?![a-zA-Z])|\\!", ""),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-zA-Z])|\s+", " "),
    (r"\{,\}", ","),
    (r"(?<![0-9.])[0-9]{1,3}(?: [0-9]{3})+(?![0-9])", lambda match: match[0].replace(" ", "")),
    (r"\\[dtc]?frac(?![a-zA-Z])(?: ?([0-9]) ?([0-9]))?", lambda m: rf"\frac{{{m[1]}}}{{{m[2]}}}" if m[1] else r"\frac"),
    (r"\\sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\sqrt ?\{ ?-1 ?\}", " i "),
    (rf"\{{\\rm ([^{{}}]*)\}}|\\(?:{_WORDY}) ?\{{([^{{}}]*)\}}", r"\\text{\1\2}"),
    (r"\^ ?\{? ?(?:\\circ|\\degree)(?![a-zA-Z]) ?\}?|\\degree(?![a-zA-Z])", r"^\\circ "),
    (r"\^ ?(?:\{ ?(?:T|\\top) ?\}|T|\\top(?![a-zA-Z]))", "^{T}"),
    (r"\^ ?(?:\{ ?(?:\\prime ?)+\}|\\prime(?![a-zA-Z]))", lambda match: "'" * match[0].count("prime")),
    (r"(?<=[0-9\s])(?:\\text\{ ?percent ?\}|percent\b)", r"\\%"),
    (r"\\varnothing(?![a-zA-Z])|\\\{ ?\\\}", r"\\emptyset "),
    (r"\\[lc]?dots[a-z]?(?![a-zA-Z])|\.\.\.", r"\\ldots "),
    (_DECIMAL + r"([0-9]{0,20}?)([0-9]{1,9})\3{2,9} ?\\ldots ", _repeating),
    (_DECIMAL + r"([0-9]{0,20}) ?\\(?:overline|bar|dot) ?\{? ?([0-9]{1,20}) ?\}?", _repeating),
    (_DECIMAL + r"()\(([0-9]{1,20})\)", _repeating),
    (r"(?<![\w^])([0-9]+(?:\.[0-9]+)?) ?\\(?:times|cdot) ?10 ?\^ ?(?:\{ ?(-?[0-9]{1,3}) ?\}|([0-9]))", r"\1e\2\3"),
    (r"\\equiv(?![a-zA-Z])", "="),
    # A letter alone is no word; behind a number at the end it may be a unit.
    (r"\\text\{ ?([A-Za-z0-9]) ?\}(?!$)|(?<![0-9}] )(?<![0-9}])\\text\{ ?(\w) ?\}|\\text\{([ei])\}", r" \1\2\3"),
]
_DENIAL = re.compile(r"\\(?:neq?|notin|not|lnot|neg)(?![a-zA-Z])|\bnot\b")
_DENIED = {r"\ne": "=", r"\neq": "=", r"\notin": r"\in "}
_MARK = re.compile(r"'|\\prime|\^ ?\{? ?(?:T|\\top)(?![a-zA-Z])|\^\\circ")  # derivatives, transposes, degrees
_BASE = re.compile(
    r"(?<![\w^\\.{])(?:\(([0-9][0-9A-F]*)\)|([0-9][0-9A-F]*)) ?_ ?\{? ?(?:\\text\{ ?)?"
    rf"([2-9]|[12][0-9]|3[0-6]|{'|'.join(_BASES)})(?![0-9a-z]) ?\}}{{0,2}}"
)
_MODULUS = re.compile(
    r" ?(?:\\[pb]?mod|\( ?\\b?mod|\(? ?\\text\{ ?\(? ?mod ?\}?)(?![a-z])[ {]{0,2}([^{}()]{1,40})[)} ]{0,3}$"
)
_UNIT = re.compile(
    r" ?(?:\\text\{[^{}]*\}|\^\\circ ?|(?<=[0-9)}\]])[A-Za-z]{2,}|(?<=[0-9)}\]] )[A-Za-z]{2,})"
    r"(?:[ /A-Za-z]|\\cdot ?|\\text\{[^{}]*\}|\^ ?\{?-?[0-9]\}?)*$"
)
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")  # a function's degrees are no unit of its value
_TEXT = re.compile(r"\\text\{([^{}]*)\}")


class Notation(NamedTuple):
    """The parts of an answer, each in a common notation: its formula, and the parts that math-verify drops."""

    formula: str
    plain: str  # the formula without the commands around words
    unit: str  # unit or modulus; empty: neither
    words: set[str]  # words of the formula behind its last =, without `and` and `or`
    signs: list[str]  # dropped by math-verify: negations, derivatives, transposes, degrees, the bases of numbers

    @property
    def latex(self) -> str:
        """The formula, rewritten because math-verify reads 3e8 as 3 * e * 8, and ABC as a product in any order."""
        latex = re.sub(r"(?<![A-Za-z_])([0-9.]+)[eE]([-+]?[0-9]+)(?![0-9.])", r"\1 \\times 10^{\2}", self.formula)
        return re.sub(r"(?<![A-Za-z\\{])([A-Z]{3,})(?![A-Za-z(])", r"\\text{\1}", latex)


def notation(latex: str) -> Notation:
    """Returns the parts of an answer."""
    text = latex.translate(_TRANSLATED)
    for pattern, new in _REWRITTEN:
        text = re.sub(pattern, new, text)
    text = text.strip().lstrip(":*").rstrip(".,;:* ")
    signs = ["not"] * len(_DENIAL.findall(text))
    text = _DENIAL.sub(lambda match: _DENIED.get(match[0], ""), text)
    signs += [str(_BASES.index(base) + 2) if base in _BASES else base for *_, base in _BASE.findall(text)]
    text = _BASE.sub(r"\1\2", text).strip().removeprefix("=").strip()
    unit = ""
    if match := _MODULUS.search(text):
        text, unit = text[: match.start()], f"mod {match[1].strip()}"
    elif (match := _UNIT.search(text)) and match.start() and not _FUNCTION.search(text) and (unit := _unit(match[0])):
        text = text[: match.start()].rstrip()
    words = re.findall("[a-z]{2,}", " ".join(_TEXT.findall(text.rpartition("=")[2])))  # a name stands before =
    plain = " ".join(_TEXT.sub(r" \1 ", text).split())
    return Notation(text, plain, unit, set(words) - {"and", "or"}, signs + _MARK.findall(text))


def _unit(phrase: str) -> str:
    """Returns a unit in a common notation; empty if the phrase is no unit."""
    text = _TEXT.sub(r" \1 ", phrase.replace(r"^\circ", " degree ").replace(r"\cdot", " ")).casefold()
    text = re.sub(r"\b(?:(sq|square)|cu|cubic)\.? +([a-z]+)", lambda match: f"{match[2]}{2 if match[1] else 3}", text)
    text = re.sub(r"\bper\b", "/", text)
    words = re.findall("[a-z]+", text)
    units = {word: _UNITS.get(word) or _UNITS.get(word.removesuffix("s"), "") for word in words}
    if len(words) == 1 and re.fullmatch(_COUNTED, words[0]):
        units[words[0]] = units[words[0]] or words[0]
    text = re.sub("[a-z]+", lambda match: units[match[0]], text)
    return re.sub(r"[\s^{}]", "", text) if all(units.values()) else ""
