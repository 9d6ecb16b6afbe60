r"""Rewards for mathematical answers: exact, numeric and LaTeX, compared by math-verify in processes that can be killed.

What needs no algebra is decided at once. The rest goes to worker processes, since it may take for ever
(`9^{9^{9^9}}`) or all memory: a process that does is killed, and its answer is wrong, while others go on.
"""

import collections
import dataclasses
import importlib.util
import re
from fractions import Fraction
from typing import ClassVar

from ..base.errors import ConfigError
from ..base.scored import Completion, Prompt, Reward
from ..base.worker_pool import WorkerError, WorkerMemory, WorkerPool, WorkerTimeout
from ..config.bounds import not_negative, positive
from .extraction import as_number, explicit_answer, last_number, last_place, near, sendable
from .math_notation import Notation, notation
from .parameters import check_parameters

_WRONG, _RIGHT = Reward(0.0, False), Reward(1.0, True)
_WORD = re.compile(r"(?:[a-z]+ )*[a-z]{4,}(?: [a-z]+)*|yes|no", re.IGNORECASE)  # fewer letters may be a product
# Lists that go on, products of transposes and of vectors, which it takes in any order, numbers side by side (it adds).
_MISREAD = re.compile(r"\\ldots|[A-Z]\)?\^\{T\}|\\vec.*\\times|(?<![0-9_^.])[0-9]+(?:\.[0-9]+)? +[0-9]")
_POINTS = re.compile(r"[A-Z](?: ?[A-Z]){1,2}")


@dataclasses.dataclass(eq=False)
class MathAnswer:
    r"""Gives 1 if the answer in the text equals the prompt's, else 0.

    The answer is what `<answer>` tags, `\boxed{}` or "the answer is" mark, the last of them; else the last number
    (`only_marked`: else there is none). It is compared as text, as a number, and at last by math-verify, which takes
    `x^2+2x+1` and `(x+1)^2` for equal. A unit may be missing, but is no other. Order doesn't count in a list without
    brackets, which is a set. Needs the extra `math`.
    """

    kind: ClassVar[str] = "math"

    # Two numbers with a decimal point are equal if they differ by at most this much of the larger one, and by less than
    # one in the last place that is written.
    tolerance: float = not_negative(1e-6)
    lenient: bool = False  # as math-verify is: 12 % is also 12, the set {1, 2} also the pair (1, 2)
    only_marked: bool = False
    most_characters: int = positive(1000)  # of an answer; a longer one is wrong
    workers: int = positive(4)  # processes, of about 60 MiB each
    seconds: float = positive(2.0)  # that a comparison may take
    memory_gib: float = positive(1.0)  # that a comparison may need

    def __post_init__(self) -> None:
        check_parameters("math", self)
        missing = [name for name in ("math_verify", "antlr4") if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(f"the reward 'math' needs {missing[0]}: install the extra, pip install 'fluxjax[math]'")
        self._counts: collections.Counter[str] = collections.Counter()
        self._pool = WorkerPool(
            f"{__package__}.math_worker:equal",
            self.workers,
            seconds=self.seconds,
            memory_gib=self.memory_gib,
            name="the reward 'math'",
        )

    async def score(self, completion: Completion) -> Reward:
        """Scores a completion. Raises what `WorkerPool.call` does, but for a comparison that takes too long: the answer
        is to blame."""
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
        return _RIGHT if equal else _WRONG

    def unreadable(self, prompt: Prompt) -> str:
        """Says why the prompt's answer can't be graded; empty if it can."""
        parts = notation(prompt.answer)
        if as_number(parts.plain) is not None or _WORD.fullmatch(parts.plain) or _MISREAD.search(parts.plain):
            return ""
        try:
            readable = parts.formula and self._pool.call({"reference": sendable(parts.latex)})
        except (WorkerTimeout, WorkerMemory, WorkerError):
            readable = False
        return "" if readable else "is no formula that can be read"

    def take_counts(self) -> dict[str, float]:
        """Returns counts of what happened since the last call, by the names of metrics behind `rewards/`."""
        counts = {f"math/{name}": float(self._counts[name]) for name in ("compared", "timed_out", "gave_up")}
        self._counts.clear()
        return counts

    def close(self) -> None:
        self._pool.close()


def decided(reference: Notation, given: Notation, tolerance: float, lenient: bool) -> bool | None:
    """Says whether answers are equal where that takes no algebra; else `None`."""
    other_unit = reference.unit != given.unit and reference.unit and given.unit  # a missing one is no other
    if not given.formula or other_unit or reference.signs != given.signs:
        return False
    wanted, found = reference.plain, given.plain
    if wanted.replace(" ", "") == found.replace(" ", ""):
        return True
    if _WORD.fullmatch(wanted) or (_POINTS.fullmatch(wanted) and _POINTS.fullmatch(found)):
        return wanted.casefold() == found.casefold()  # math-verify takes them for products of letters, in any order
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
