"""Rewards of the form: formats, and what too many tokens cost."""

import contextlib
import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_cases import scored

from fluxjax.config import ConfigError
from fluxjax.config.bounds import check_fields
from fluxjax.rewards.shaping import Format, Overlong


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<think>a</think><answer>b</answer>", True),
        (" <think>\na\n</think>\n\n<answer> b </answer>\n", True),
        ("<think>1 < 2</think><answer>b</answer>", True),
        ("<think></think><answer>b</answer>", False),
        ("<think>a</think><answer> </answer>", False),
        ("<think>a</think> so <answer>b</answer>", False),
        ("First <think>a</think><answer>b</answer>", False),
        ("<think>a</think><answer>b</answer> Bye", False),
        ("<think>a<think>b</think></think><answer>b</answer>", False),
        ("<think>a</think><answer>b</answer><answer>c</answer>", False),
        ("<answer>b</answer><think>a</think>", False),
        ("<think>a<answer>b</think>c</answer>", False),
        ("<think>a</answer><answer>b</think>", False),
        ("<think>a</think><answer>b", False),
    ],
)
def test_think_and_answer(text, right):
    reward = scored(Format(), "b", text)
    assert reward.correct is right and reward.value == float(right)


def test_patterns_are_matched_with_the_whole_text():
    with contextlib.closing(Format(pattern=r"(a+)+\nb", seconds=300.0)) as reward:
        assert scored(reward, "", "aaa\nb").correct
        assert not scored(reward, "", "aaa\nbc").correct
        assert not scored(reward, "", "\ud800").correct


@pytest.mark.medium
def test_a_match_that_takes_for_ever_is_killed():
    with contextlib.closing(Format(pattern=r"(a+)+\nb", seconds=0.5)) as reward:
        assert scored(reward, "", "a" * 60).reason == "format.pattern took more than 0.5 s"
        assert reward._pool.call({"pattern": "a.b", "text": "a\nb"}, 300.0)  # by another process


@pytest.mark.parametrize(
    ("num_tokens", "value"),
    [(0, 0.0), (1, 0.0), (60, 0.0), (61, -0.025), (80, -0.5), (99, -0.975), (100, -1.0), (101, -1.0), (10**9, -1.0)],
)
def test_overlong_by_hand(num_tokens, value):
    reward = scored(Overlong(most_tokens=100, interval=40), "5", "five", num_tokens=num_tokens)
    assert reward.value == pytest.approx(value, abs=1e-12)
    assert reward.correct is (value == 0.0)


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 3000))
def test_overlong_never_rises_and_is_continuous(most, interval, num_tokens):
    interval = min(interval, most)
    reward = Overlong(most_tokens=most, interval=interval)
    here, next_ = (scored(reward, "", "x", num_tokens=n).value for n in (num_tokens, num_tokens + 1))
    assert -1 <= next_ <= here <= 0
    assert here - next_ <= 1 / interval + 1e-12


@pytest.mark.parametrize(
    ("count", "share", "message"),
    [
        (1.5, 0.5, "test.count is 1.5; it must be of type int"),
        (True, 0.5, "test.count is True; it must be of type int"),
        (1, "half", "test.share is 'half'; it must be a finite number"),
        (1, False, "test.share is False; it must be a finite number"),
        (1, float("inf"), "test.share is inf; it must be a finite number"),
        (1, 1, ""),
    ],
)
def test_types_of_parameters(count, share, message):
    @dataclasses.dataclass
    class Parameters:  # `Any`, as a file of settings may have anything
        count: Any = 1
        share: Any = 0.5

    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        check_fields(Parameters(count, share), "test.")
