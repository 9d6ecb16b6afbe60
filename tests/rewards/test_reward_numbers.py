"""Numbers of any library are rewards, as they are and within a `Reward`."""

import decimal
import fractions

import jax.numpy as jnp
import numpy as np
import pytest

from fluxjax.rewards import Reward
from fluxjax.rewards.calls import plain_answer
from fluxjax.rewards.named import RewardFailure, as_batch, as_reward

NUMBERS = [
    (np.bool_(True), 1.0),
    (np.array(False), 0.0),
    (np.array(0.25), 0.25),
    (np.float32(0.5), 0.5),
    (np.int64(2), 2.0),
    (jnp.array(0.25), 0.25),
    (jnp.array(True), 1.0),
    (jnp.bfloat16(0.5), 0.5),
    (fractions.Fraction(1, 4), 0.25),
    (decimal.Decimal("0.25"), 0.25),
    (True, 1.0),
]


def users_reward(**values):
    """A reward as a user's code makes it, where nothing checks types."""
    reward = Reward(0.5, False)
    for name, value in values.items():
        object.__setattr__(reward, name, value)
    return reward


@pytest.mark.parametrize(("value", "number"), NUMBERS, ids=lambda value: f"{type(value).__name__}-{value}")
def test_numbers_of_all_libraries(value, number):
    reward = as_reward(value)
    assert reward == Reward(number, number >= 1.0) and type(reward.value) is float and type(reward.correct) is bool
    parts = {"part": value}
    inside = as_reward(users_reward(value=value, correct=jnp.array(True), parts=parts))
    assert inside == Reward(number, True, parts={"part": number}) and type(inside.parts["part"]) is float
    assert plain_answer(value)[0] == number
    assert [as_reward(answer).value for answer in as_batch([value, 1], 2)] == [number, 1.0]


@pytest.mark.parametrize("value", [0.7 + 0.2 + 0.1, np.float32(0.7) + np.float32(0.2) + np.float32(0.1), 1.0])
def test_rounding_makes_nothing_wrong(value):
    assert as_reward(value).correct and not as_reward(value - 1e-3).correct


@pytest.mark.parametrize("value", [10**400, fractions.Fraction(10**400), decimal.Decimal("sNaN")], ids=type)
def test_a_number_that_no_float_holds_costs_its_own_response_only(value):
    """In a batch of a process, what `plain_answer` raises would cost all of them."""
    for result in (value, users_reward(value=value, correct=True), users_reward(parts={"part": value})):
        (reason,) = plain_answer(result)
        assert "is no float" in reason


def test_an_array_of_them_is_a_batch():
    assert as_batch(np.array([True, False]), 2) == [True, False]
    assert as_batch(np.array([fractions.Fraction(1, 4)]), 1) == [fractions.Fraction(1, 4)]


@pytest.mark.parametrize(
    "value",
    ["1", None, np.array([1.0]), np.array("1"), 1j, np.array(1j), decimal.Decimal("nan"), jnp.zeros((1,)), b"1"],
)
def test_other_values_are_no_rewards(value):
    for result in (value, users_reward(value=value, correct=True)):
        with pytest.raises(RewardFailure, match="returned"):
            as_reward(result)
