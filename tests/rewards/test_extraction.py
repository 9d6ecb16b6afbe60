"""Answers are found in texts: marked ones, last numbers; and what a number is."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxjax.rewards.extraction import TAIL, as_number, boxed, explicit_answer, last_number, stated, tagged


@pytest.mark.parametrize(
    ("find", "text", "found"),
    [
        (boxed, r"so \boxed{5}", "5"),
        (boxed, r"\boxed{4} no, \boxed{5}", "5"),
        (boxed, r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (boxed, r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (boxed, r"\boxed{\left\{ 1 }", r"\left\{ 1"),
        (boxed, r"\boxed{\boxed{5}}", "5"),
        (boxed, r"\boxed{}", ""),
        (boxed, r"\boxed{5", None),
        (boxed, r"\boxed 5", None),
        (boxed, "5", None),
        (stated, "The answer is 5.", "5"),
        (stated, "The answer is: $x+1$. Therefore we are done.", "$x+1$"),
        (stated, "Answer: B", "B"),
        (stated, "**Answer:** B", "B"),
        (stated, "**Final Answer**: 3.5 m", "3.5 m"),
        (stated, "answer = 7\nThat was easy.", "7"),
        (stated, "The answer is 5. No, the answer is 6!", "6"),
        (stated, "The answer is 1.5", "1.5"),
        (stated, "The answerer is 5", None),
        (stated, "No one knows", None),
        (last_number, "5 + 2 = 7", "7"),
        (last_number, "x = -3.", "-3."),
        (last_number, "5-3", "3"),
        (last_number, "about 1,234.5 m", "1,234.5"),
        (last_number, "1,2", "2"),
        (last_number, "it is 3/4", "3/4"),
        (last_number, "12 % of them", "12 %"),
        (last_number, "CO2", None),
        (last_number, "version 1.2.3", "1.2"),
        (last_number, "\N{MINUS SIGN}4", "-4"),
        (last_number, "7" + "0" * 60, None),
        (last_number, "none", None),
        (as_number, "-1,000.5", Fraction(-2001, 2)),
        (as_number, "+ 3 / 4", Fraction(3, 4)),
        (as_number, r"-\frac{3}{4}", Fraction(-3, 4)),
        (as_number, "$12$", 12),
        (as_number, r"12\%", Fraction(12, 100)),
        (as_number, "12 %", Fraction(12, 100)),
        (as_number, ".5", Fraction(1, 2)),
        (as_number, "5.", 5),
        (as_number, "2e-3", Fraction(2, 1000)),
        (as_number, "1,00", None),
        (as_number, "1/0", None),
        (as_number, r"\frac{1}{0}", None),
        (as_number, "1/0%", None),
        (as_number, "2x", None),
        (as_number, "3 m", None),
        (as_number, "--1", None),
        (as_number, "nan", None),
        (as_number, "inf", None),
        (as_number, "1e9999", None),
        (as_number, "\u0665", None),
        (as_number, "", None),
        (as_number, "9" * 41, None),
    ],
)
def test_what_is_found_in_a_text(find, text, found):
    assert find(text) == found


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


@pytest.mark.medium
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
