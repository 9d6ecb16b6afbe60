"""The scorer: names, users' functions, and every way in which a rule can fail."""

import asyncio
import pathlib
import subprocess
import sys
import textwrap

import pytest
import user_rewards
from conftest import ROOT
from reward_cases import PROMPT, response

from fluxjax.base.types import Reward
from fluxjax.config import ConfigError, RewardKindConfig, RewardsConfig, SourceConfig
from fluxjax.rewards import Scorer, guarded
from fluxjax.runtime import ports as collaborators

HERE = pathlib.Path(__file__).resolve().parent
HANG = 300.0  # seconds after which a test is taken for hung


@pytest.fixture(autouse=True)
def nothing_hangs_on():
    user_rewards.released.clear()
    user_rewards.begun.clear()
    yield
    user_rewards.released.set()


@pytest.fixture(autouse=True)
def scored_here(monkeypatch):
    """Functions are called in this process: `test_guarded.py` has others."""
    monkeypatch.setattr(guarded, "_HERE", ("function",))


def scorer(reward, timeout=10.0, concurrency=8, **more):
    kinds = {"function": RewardKindConfig(seconds=timeout, concurrency=concurrency)}
    return Scorer(
        {"s": SourceConfig(reward=reward)}, lambda ids: "".join(map(str, ids)), RewardsConfig(kinds=kinds), **more
    )


def scored(subject, text):
    return asyncio.run(subject.score_text(PROMPT, text))


def test_a_response_is_decoded_and_scored():
    assert isinstance(scorer("exact"), collaborators.RewardScorer)
    assert asyncio.run(scorer("exact").score(PROMPT, response(1, 2))) == Reward(1.0, True)
    assert asyncio.run(scorer("digits").score(PROMPT, response(1))).value == pytest.approx(0.5 / 3)


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        ("starts_right", "123", Reward(0.25, False)),
        ("as_bool", "12", Reward(1.0, True)),
        ("as_bool", "13", Reward(0.0, False)),
        ("later", "12", Reward(0.5, False)),
    ],
)
def test_users_functions(rule, text, expected):
    assert scored(scorer(f"user_rewards:{rule}"), text) == expected


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("raises", "KeyError: 'nothing here'"),
        ("exits", "RuntimeError: raised SystemExit"),
        ("cancels_itself", "cancelled itself"),
        ("own_timeout", "TimeoutError: the judge's server"),
        ("not_a_number", "returned nan"),
        ("nonsense", "returned str, expected Reward or a number"),
    ],
)
def test_a_rule_that_fails_is_a_scored_zero_with_a_reason(rule, reason, caplog):
    assert scored(scorer(f"user_rewards:{rule}"), "12") == Reward(0.0, False, reason)
    assert f"reward of s for prompt p1: {reason}; scored 0" in caplog.text


def test_a_failing_rule_is_logged_a_few_times_only(caplog):
    subject = scorer("user_rewards:raises")
    for _ in range(20):
        scored(subject, "")
    assert subject.metrics()["rewards/failed/raised"] == 20.0
    assert len(caplog.records) == 5 and "not logged" in caplog.records[-1].message


@pytest.mark.parametrize("rule", ["hangs", "refuses_to_stop", "blocks_its_loop"])
async def test_a_rule_that_hangs_is_a_scored_zero_and_leaves_its_place(rule):
    subject = scorer(f"user_rewards:{rule}", timeout=0.2, concurrency=1)
    try:
        three = await asyncio.gather(*(subject.score_text(PROMPT, "12") for _ in range(3)))
    finally:
        user_rewards.released.set()  # the loop waits for coroutines that refuse to be cancelled
    assert three == [Reward(0.0, False, "timed out after 0.2 s")] * 3


@pytest.mark.parametrize("rule", ["hangs", "blocks_its_loop", "never_stops"])
def test_a_hanging_rule_does_not_hold_up_the_end_of_the_process(rule):
    script = f"""
        import asyncio, sys
        sys.path[:0] = [{str(ROOT)!r}, {str(HERE)!r}]
        from fluxjax.config import RewardKindConfig, RewardsConfig, SourceConfig
        from fluxjax.rewards import Prompt, Scorer
        assert "jax" not in sys.modules
        settings = RewardsConfig(kinds={{"function": RewardKindConfig(seconds=0.2)}})
        subject = Scorer({{"s": SourceConfig(reward="user_rewards:{rule}")}}, str, settings)
        print(asyncio.run(subject.score_text(Prompt("1", "s", "?", "1"), "1")).reason)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=HANG, check=True
    )
    assert done.stdout == "timed out after 0.2 s\n"


async def test_a_cancelled_score_is_cancelled():
    subject = scorer("user_rewards:hangs", timeout=HANG)
    task = asyncio.create_task(subject.score_text(PROMPT, ""))
    while not user_rewards.begun.is_set():
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exakt", "s.reward is 'exakt'; it must be one of exact, positions, digits, number, math, .* or module:"),
        ("no_such_module:f", "importing 'no_such_module' raised ModuleNotFoundError: No module named"),
        ("user_rewards:starts_rite", "user_rewards has no 'starts_rite'; it has starts_right, as_bool"),
        ("user_rewards:NOT_A_FUNCTION", "is not a function, or an object with .*, but of type int"),
        ("user_rewards:", "user_rewards has no ''"),
        (":f", "importing '' raised ValueError"),
    ],
)
def test_a_wrong_reward_is_said_at_the_start(name, message):
    with pytest.raises(ConfigError, match=message):
        scorer(name)
