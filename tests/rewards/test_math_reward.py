"""The reward of mathematical answers: what is equal, what is not, and what takes for ever."""

import asyncio
import contextlib
import json
import re

import pytest
from reward_cases import scored
from turns import TURN

from fluxjax.base.scored import Completion, Prompt
from fluxjax.base.worker_pool import WorkerDied
from fluxjax.config import ConfigError
from fluxjax.rewards import math as math_reward
from fluxjax.rewards.math import MathAnswer, decided, notation


@pytest.fixture(scope="module")
def subject():
    with contextlib.closing(MathAnswer(workers=2, seconds=300.0)) as reward:
        yield reward


@pytest.fixture(scope="module")
def lenient():
    with contextlib.closing(MathAnswer(workers=1, seconds=300.0, lenient=True)) as reward:
        yield reward


AT_ONCE = [
    ("5", r"\boxed{5}", True),
    ("5", "The answer is $5$.", True),
    ("5", "2 + 3 = 5", True),
    ("5", r"\boxed{6}", False),
    ("5", r"I think 5, no \boxed{6}", False),
    ("5", r"\boxed{}", False),
    ("5", "no idea", False),
    ("1000", r"\boxed{1,000}", True),
    (r"12,\!000,\!085", r"\boxed{12000085}", True),
    ("1000000", r"\boxed{1000001}", False),
    ("1000000", r"\boxed{1000001.0}", False),
    ("0.5", r"\boxed{\dfrac{1}{2}}", True),
    (r"\frac{1}{3}", r"\boxed{0.333333}", True),
    (r"\frac{1}{3}", r"\boxed{0.33}", False),
    ("0.0000001", r"\boxed{0}", False),
    (r"\$187.12", r"\boxed{187.12}", True),
    ("12", r"\boxed{12\%}", False),
    ("0.12", r"\boxed{12\%}", True),
    (r"\dfrac{\pi}{2}", r"\boxed{\tfrac{\pi}{2}}", True),
    (r"\left( 1, 2 \right)", r"\boxed{(1,2)}", True),
    ("Yes", r"\boxed{\text{yes}}", True),
    ("Yes", r"\boxed{No}", False),
    ("no", r"\boxed{on}", False),
    ("even", r"\boxed{neve}", False),
    ("-4", "\\boxed{\N{MINUS SIGN}4}", True),
    ("12", r"\boxed{12 \text{ cm}^2}", True),
    ("A^T", r"\boxed{A^{\top}}", True),
    (r"A^\top B", r"\boxed{A^{T}B}", True),
    ("A^T", r"\boxed{A}", False),
    ("A^T B", r"\boxed{BA^T}", False),
    ("(AB)^T", r"\boxed{(BA)^T}", False),
    ("A B", r"\boxed{B A}", False),
    ("A B", r"\boxed{AB}", True),
    (r"\vec{a} \times \vec{b}", r"\boxed{\vec{b} \times \vec{a}}", False),
    ("f''(x)", r"\boxed{f^{\prime\prime}(x)}", True),
    ("f''(x)", r"\boxed{f^\prime(x)}", False),
]
BY_ALGEBRA = [
    ("x^2+2x+1", r"\boxed{(x+1)^2}", True),
    ("x^2+2x+1", r"\boxed{(x+1)^3}", False),
    (r"\sqrt{8}", r"\boxed{2\sqrt{2}}", True),
    (r"2\pi", r"\boxed{6.283185}", True),
    (r"2\pi", r"\boxed{6.28}", False),
    ("5", r"\boxed{x = 5}", True),
    ("x = 5", r"\boxed{5}", True),
    ("x + 0.12", r"\boxed{x + 12\%}", True),
    ("x + 12", r"\boxed{x + 12\%}", False),
    ("AB = BA", r"\boxed{BA = AB}", True),
    ("AB = BA", r"\boxed{AB = BA + 1}", False),
    ("R = I", r"\boxed{R = I + 1}", False),
    ("x + 2y - 9 = 0", r"\boxed{x = 9 - 2y}", True),
    (r"n \geq 2", r"\boxed{2 \le n}", True),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{bmatrix}1&2\\3&4\end{bmatrix}}", True),
    ("5", "\\boxed{\ud800}", False),
]


@pytest.mark.parametrize(("answer", "text", "right"), AT_ONCE)
def test_answers_that_are_decided_at_once(answer, text, right):
    with contextlib.closing(MathAnswer()) as reward:
        result = scored(reward, answer, text)
        assert result.correct is right and result.value == float(right)
        assert not reward._counts["compared"], "a worker was asked"


@pytest.mark.parametrize(("answer", "text", "right"), BY_ALGEBRA)
def test_answers_that_take_algebra(subject, answer, text, right):
    before = subject._counts["compared"]
    result = scored(subject, answer, text)
    assert result.correct is right and result.value == float(right) and not result.reason
    assert subject._counts["compared"] > before, "no worker was asked"


@pytest.mark.parametrize(
    ("answer", "text"), [("12", r"\boxed{12\%}"), (r"12\%", r"\boxed{12}"), ("(1,2)", r"\boxed{\{1,2\}}")]
)
def test_lenient_is_as_math_verify_is(subject, lenient, answer, text):
    assert scored(lenient, answer, text).correct
    assert not scored(subject, answer, text).correct


def test_only_what_is_marked():
    with contextlib.closing(MathAnswer(only_marked=True)) as reward:
        assert scored(reward, "5", "it is 5").reason == "no answer found"
        assert scored(reward, "5", r"it is \boxed{5}").correct


@pytest.mark.medium
def test_a_long_answer_is_wrong_at_once():
    with contextlib.closing(MathAnswer(most_characters=10)) as reward:
        assert scored(reward, "x+1", r"\boxed{1+0+0+0+0+0+x}").reason == "the answer is longer than 10 characters"
        assert scored(reward, "5", r"\boxed{5.00000000}").correct


PATHOLOGICAL = {
    "tower of powers": r"9^{9^{9^9}}",
    "brackets": "(" * 450 + "1" + ")" * 450,
    "fractions": r"\frac{" * 100 + "1" + "}{2}" * 100,
    "matrix": r"\begin{pmatrix}" + r"\\".join(["&".join(["9^{9^9}"] * 10)] * 10) + r"\end{pmatrix}",
}


def algebra(text):
    """An answer to be compared with x + 1."""
    return Completion(Prompt("1", "s", "?", "x + 1"), rf"\boxed{{{text}}}")


@pytest.mark.slow
async def test_pathological_answers_cost_themselves_only():
    """Each is killed at its time, if need be, and its process replaced."""
    with contextlib.closing(MathAnswer(workers=2, seconds=1.0)) as reward:
        results = await asyncio.gather(*(reward.score(algebra(text)) for text in PATHOLOGICAL.values()))
        assert not any(result.correct for result in results)
        assert results[0].reason == "comparing the answer took more than 1 s"
        assert reward._pool.load().killed >= 1
        counts, reasons = reward.take_counts(), [result.reason for result in results]
        assert counts["math/compared"] == sum("longer than" not in reason for reason in reasons) > 1
        assert counts["math/timed_out"] == sum("took more than" in reason for reason in reasons) >= 1
        assert counts["math/gave_up"] == sum(reason.startswith("comparing the answer:") for reason in reasons)
        assert not any(reward.take_counts().values())
        # A good answer gets more time: it is not to fail where this machine is slow.
        assert reward._pool.call({"reference": "x + 1", "given": "1 + x", "strict": True}, 300.0)


@pytest.mark.slow
def test_an_answer_that_needs_too_much_memory_is_wrong():
    """2 to this power takes 1.2 GB; the process gets 0.06 GiB, and goes on."""
    with contextlib.closing(MathAnswer(workers=1, seconds=300.0, memory_gib=0.06)) as reward:
        assert not scored(reward, "x + 1", r"\boxed{2^{9999999999}}").correct
        assert scored(reward, "x + 1", r"\boxed{1 + x}").correct
        assert not reward._pool.load().killed


@pytest.mark.slow
async def test_others_go_on_beside_one_that_hangs():
    reward = MathAnswer(workers=2, seconds=300.0)
    stuck = asyncio.create_task(reward.score(algebra(PATHOLOGICAL["tower of powers"])))
    await asyncio.sleep(0)
    good = await asyncio.gather(*(reward.score(algebra(f"{n + 1} + x - {n}")) for n in range(10)))
    assert all(result.correct for result in good)
    assert not stuck.done()
    await asyncio.to_thread(reward.close)
    with pytest.raises((WorkerDied, RuntimeError)):  # the latter, if its process had not begun yet
        await stuck


@pytest.mark.slow
def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(math_reward.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs math_verify: install the extra, pip install 'fluxjax\[math\]'"):
        MathAnswer()


# References of DeepMath that math-verify takes for equal to their corrupted form, and why.
EXCEPTIONS = {
    r"\gcd(k, p - 1)": "sympy takes k and p for polynomials' variables, so that this and gcd(k, p - 2) are 1",
}


def corrupted(answer):
    """The answer with its first digit raised by one; without digits, its negative or more by one."""
    if digit := re.search(r"[0-9]", answer):
        return answer[: digit.start()] + str((int(digit[0]) + 1) % 10) + answer[digit.end() :]
    if "infty" in answer:  # where one more is no more
        return answer.removeprefix("-") if answer.startswith("-") else f"-{answer}"
    return f"{answer} + 1"


@pytest.mark.long
async def test_deepmath_references(shared):
    """Each of the 1,600 references is right, by text and by math-verify alone; a corrupted one is wrong. A third each
    turn."""
    path = shared / "data" / "deepmath.jsonl"
    if not path.exists():
        pytest.skip(f"needs {path}")
    answers = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
    assert len(answers) == 1600
    if TURN is not None:
        answers = answers[TURN::3]

    async def score(pairs):
        asked = [Completion(Prompt("1", "s", "?", answer), rf"We get \boxed{{{text}}}.") for answer, text in pairs]
        results = await asyncio.gather(*map(reward.score, asked))
        assert not [result.reason for result in results if result.reason]
        return [answer for (answer, _), result in zip(pairs, results, strict=True) if result.value == 1.0]

    with contextlib.closing(MathAnswer(workers=2, seconds=300.0)) as reward:
        assert await score([(answer, answer) for answer in answers]) == answers
        distinct = sorted(set(answers))  # equal pairs have equal scores
        assert await score([(answer, corrupted(answer)) for answer in distinct]) == [
            answer for answer in EXCEPTIONS if answer in distinct
        ]
        algebraic = [answer for answer in distinct if decided(notation(answer), notation("x+"), 0.0, False) is None]
        assert len(algebraic) > (300 if TURN is None else 100)
        parts = [notation(answer).latex for answer in algebraic]
        questions = [{"reference": part, "given": part, "strict": True} for part in parts]
        assert all(await asyncio.gather(*map(reward._pool.acall, questions)))
