"""Rewards by rule: hand-computed values, and properties that every shaped reward must have."""

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxjax.base.types import Prompt
from fluxjax.rewards import REWARDS, digits, exact, number, positions


def prompt(answer):
    return Prompt("1", "s", "?", answer)


@pytest.mark.parametrize(
    ("rule", "answer", "text", "value"),
    [
        (exact, "left", "left", 1.0),
        (exact, "left", " Left.\n", 1.0),
        (exact, "New York", "new  york", 1.0),
        (exact, "STRASSE", "straße", 1.0),
        (exact, "left", "left left", 0.0),
        (exact, "left", "", 0.0),
        (exact, "", "", 1.0),
        (exact, "3.5", "35", 0.0),
        (number, "1000", "The answer is 1,000", 1.0),
        (number, "1000", "1000.00", 1.0),
        (number, "1000", "2000/2", 1.0),
        (number, "0.5", "1/2", 1.0),
        (number, "0.5", ".5", 1.0),
        (number, "-3", "x = -3", 1.0),
        (number, "3", "-3", 0.0),
        (number, "7", "5 + 2 = 7", 1.0),
        (number, "7", "7 or maybe 8", 0.0),
        (number, "7", "seven", 0.0),
        (number, "seven", "seven", 0.0),
        (number, "7", "7/0", 0.0),
        (number, "12", "1,2", 0.0),
        (number, "1", "9" * 5000, 0.0),
        (number, "1", "1e999999999", 0.0),
        (number, "1", "1" + "/" * 1000, 1.0),
        (digits, "123", "123", 1.0),
        (digits, "123", "1 2 3", 1.0),
        (digits, "123", "124", 0.5 * 3 / 4),  # two digits and the end
        (digits, "123", "12", 0.5 * 2 / 4),  # two digits, ended early
        (digits, "123", "1234", 0.5 * 3 / 5),  # three digits, ended late
        (digits, "123", "312", 0.5 * 1 / 4),  # only the end is in place
        (digits, "1", "", 0.0),
        (digits, "7", "3", 0.5 * 1 / 2),
        (digits, "12", "x2", 0.5 * 2 / 3),
        (positions, "ab cd", "AB CD", 1.0),
        (positions, "ab cd", "abcd", 0.5 * 2 / 6),  # white space counts, case does not
    ],
)
def test_rules_by_hand(rule, answer, text, value):
    reward = rule(prompt(answer), text)
    assert reward.value == pytest.approx(value, abs=1e-12) and reward.correct is (value == 1.0)


@given(st.text("0123456789", min_size=1, max_size=12), st.text("0123456789 x", max_size=20))
def test_shaped_rewards_are_bounded_and_only_the_answer_gets_all(answer, text):
    for rule in (digits, positions):
        reward = rule(prompt(answer), text)
        assert 0 <= reward.value <= 1
        assert reward.correct == (reward.value == 1.0)
        assert reward.correct or reward.value <= 0.5


@given(st.text("0123456789", min_size=2, max_size=12), st.data())
def test_one_more_right_digit_is_always_worth_something(answer, data):
    wrong = list("x" * len(answer))
    values = []
    for index in data.draw(st.permutations(range(len(answer)))):
        values.append(digits(prompt(answer), "".join(wrong)).value)
        wrong[index] = answer[index]
    values.append(digits(prompt(answer), "".join(wrong)).value)
    assert values == sorted(values) and len(set(values)) == len(values)


@pytest.mark.medium
@pytest.mark.parametrize("name", [name for name, rule in REWARDS.items() if inspect.isfunction(rule)])
@given(answer=st.text(max_size=30), text=st.text(max_size=200))
def test_no_text_makes_a_rule_raise(name, answer, text):
    reward = REWARDS[name](prompt(answer), text)
    assert 0 <= reward.value <= 1
