"""Answers are found in texts: marked ones, last numbers; and what a number is."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxjax.rewards.extraction import TAIL, as_number, boxed, explicit_answer, last_number, stated, tagged


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{4} no, \boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ 1 }", r"\left\{ 1"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{5", None),
        (r"\boxed 5", None),
        ("5", None),
    ],
)
def test_boxed(text, answer):
    assert boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 5.", "5"),
        ("The answer is: $x+1$. Therefore we are done.", "$x+1$"),
        ("Answer: B", "B"),
        ("**Answer:** B", "B"),
        ("**Final Answer**: 3.5 m", "3.5 m"),
        ("answer = 7\nThat was easy.", "7"),
        ("The answer is 5. No, the answer is 6!", "6"),
        ("The answer is 1.5", "1.5"),
        ("The answerer is 5", None),
        ("No one knows", None),
    ],
)
def test_stated(text, answer):
    assert stated(text) == answer


def test_the_last_mark_counts_and_tags_before_boxes_before_words():
    words = "The answer is 1."
    assert explicit_answer(words) == "1"
    assert explicit_answer(rf"\boxed{{2}} {words}") == "2"
    assert explicit_answer(rf"<answer> 3 </answer> \boxed{{2}} {words}") == "3"
    assert explicit_answer(r"<answer>It is \boxed{4}.</answer> \boxed{2}") == "4"
    assert explicit_answer("<answer>5</answer> or <answer>6</answer>") == "6"
    assert explicit_answer("</answer>5<answer>") is None
    assert tagged("<answer>a<answer>b</answer>c") == "b"
    assert explicit_answer(r"\boxed{1}" + " " * TAIL) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5 + 2 = 7", "7"),
        ("x = -3.", "-3."),
        ("5-3", "3"),
        ("about 1,234.5 m", "1,234.5"),
        ("1,2", "2"),
        ("it is 3/4", "3/4"),
        ("12 % of them", "12 %"),
        ("CO2", None),
        ("version 1.2.3", "1.2"),
        ("\N{MINUS SIGN}4", "-4"),
        ("7" + "0" * 60, None),
        ("none", None),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("-1,000.5", Fraction(-2001, 2)),
        ("+ 3 / 4", Fraction(3, 4)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        ("$12$", 12),
        (r"12\%", Fraction(12, 100)),
        ("12 %", Fraction(12, 100)),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("2e-3", Fraction(2, 1000)),
        ("1,00", None),
        ("1/0", None),
        (r"\frac{1}{0}", None),
        ("1/0%", None),
        ("2x", None),
        ("3 m", None),
        ("--1", None),
        ("nan", None),
        ("inf", None),
        ("1e9999", None),
        ("\u0665", None),
        ("", None),
        ("9" * 41, None),
    ],
)
def test_as_number(text, number):
    assert as_number(text) == number


@given(st.integers(-(10**30), 10**30))
def test_integers_are_found_as_they_are_written(value):
    for written in (f"{value}", f"{value:,}", f"{value}.0"):
        assert as_number(written) == value
        assert as_number(last_number(f"x = {written} apples") or "") == value


@given(st.fractions(max_denominator=10**6), st.integers(0, 12))
def test_fractions_and_decimals_are_read(value, places):
    assert as_number(f"{value.numerator}/{value.denominator}") == value
    written = f"{float(value):.{places}f}"
    assert as_number(written) == Fraction(written)


@given(st.text("ab{}\\ ", max_size=30))
def test_a_box_holds_balanced_braces(text):
    content = boxed(f"\\boxed{{{text}}}")
    if content is not None:
        plain = re.sub(r"\\.", "", content)
        assert plain.count("{") == plain.count("}")
