"""The scorer: users' rewards here and in processes, objects, batches, mixtures; every way in which one can fail, what
is measured, and what ends the run."""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys
import textwrap
import time
from unittest import mock

import pytest
import user_rewards
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_cases import PROMPT, response
from turns import third_of

from fluxjax.base.types import Prompt, Reward
from fluxjax.config import ConfigError, RewardKindConfig, RewardsConfig, RewardTerm, SourceConfig
from fluxjax.report.display import reward_words
from fluxjax.rewards import Scorer, calls
from fluxjax.rewards import scorer as scoring

HERE = pathlib.Path(__file__).resolve().parent
HANG = 300.0  # seconds after which a test is taken for hung


def bounds(seconds=60.0, concurrency=2):
    kinds = {
        "function": RewardKindConfig(seconds=seconds, concurrency=concurrency),
        "batch": RewardKindConfig(seconds=seconds, concurrency=1),
        "here": RewardKindConfig(seconds=seconds, concurrency=concurrency),
    }
    return RewardsConfig(kinds=kinds)


@pytest.fixture(autouse=True, scope="module")
def little_memory():
    with mock.patch.object(calls, "MEMORY_GIB", 0.25):
        yield


@contextlib.contextmanager
def scorer(source, limits=None, **more):
    source = SourceConfig(reward=source) if isinstance(source, str) else source
    subject = Scorer({"s": source}, lambda ids: "".join(map(str, ids)), limits or bounds(), **more)
    with contextlib.closing(subject):
        yield subject


def scored(subject, *texts):
    async def all_of_them():
        return await asyncio.gather(*(subject.score_text(PROMPT, text) for text in texts))

    return asyncio.run(all_of_them())


# --- processes ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def misbehaving():
    """A scorer, and what it noted."""
    noted: list[tuple[str, str]] = []
    with scorer("user_rewards:misbehaves", note=lambda *note: noted.append(note)) as subject:
        yield subject, noted


@pytest.mark.medium
def test_a_users_function_runs_in_another_process():
    with scorer("user_rewards:process") as subject:
        (reward,) = scored(subject, "abc")
    assert reward.correct and reward.value != os.getpid() and reward.parts == {"length": 3.0} and reward.seconds > 0


@pytest.mark.medium
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise", "KeyError: 'nothing here'"),
        ("nan", "returned nan"),
        ("allocate", "needs more than 0.25 GiB of memory"),
        ("list", "returned list, expected Reward or a number"),
        ("die", "ended its process (exit code 3)"),
    ],
)
def test_what_misbehaves_is_a_scored_zero_and_the_next_is_scored(misbehaving, text, reason):
    subject, noted = misbehaving
    noted.clear()
    bad, good = scored(subject, text, "good")
    assert bad == Reward(0.0, False, reason) and good == Reward(1.0, True)
    assert noted == [("s", f"user_rewards:misbehaves: {reason}")]


@pytest.mark.medium
def test_what_hangs_is_killed():
    with scorer("user_rewards:misbehaves", bounds(0.3)) as subject:
        assert scored(subject, "hang") == [Reward(0.0, False, "timed out after 0.3 s")]


@settings(max_examples=third_of(20))
@given(st.lists(st.sampled_from(["good", "raise", "nan", "list", "twice"]), min_size=1, max_size=12))
def test_every_response_gets_its_own_reward(misbehaving, texts):
    """Also beside one that answers twice, which is heard once."""
    subject, _ = misbehaving
    subject.metrics()
    values = [reward.value for reward in scored(subject, *texts)]
    assert values == [float(text in ("good", "twice")) for text in texts]
    assert subject.metrics()["rewards/failed"] == values.count(0.0)


# --- in this process ----------------------------------------------------------------------------


@pytest.fixture
def released():
    """What hangs does not hang on."""
    user_rewards.released.clear()
    user_rewards.begun.clear()
    yield
    user_rewards.released.set()


def here(rule, *limits, **more):
    """A scorer that calls a user's function in this process."""
    return scorer("exact", bounds(*limits), given={"s": getattr(user_rewards, rule)}, **more)


def test_a_response_is_decoded_and_scored():
    with scorer("exact") as subject:
        assert asyncio.run(subject.score(PROMPT, response(1, 2))) == Reward(1.0, True)
    with scorer("digits") as subject:
        assert asyncio.run(subject.score(PROMPT, response(1))).value == pytest.approx(0.5 / 3)


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
    with here(rule) as subject:
        assert scored(subject, text) == [expected]


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("raises", "KeyError: 'nothing here'"),
        ("exits", "RuntimeError: raised SystemExit"),
        ("cancels_itself", "cancelled itself"),
        ("own_timeout", "TimeoutError: the judge's server"),
        ("not_a_number", "returned nan"),
        ("nonsense", "returned str, expected Reward or a number"),
        ("huge", "returned int, which is no float: int too large to convert to float"),
    ],
)
def test_a_rule_that_fails_is_a_scored_zero_that_is_logged_a_few_times(rule, reason, caplog):
    with here(rule) as subject:
        assert scored(subject, *["12"] * 20) == [Reward(0.0, False, reason)] * 20
        way = "raised" if rule in ("raises", "exits", "cancels_itself", "own_timeout") else "invalid"
        assert subject.metrics()[f"rewards/failed/{way}"] == 20.0
    records = [record.message for record in caplog.records if "; scored 0" in record.message]
    assert len(records) == 5 and "not logged" in records[-1]
    assert records[0] == f"reward of s for prompt p1: {reason}; scored 0"


@pytest.mark.parametrize("rule", ["hangs", "refuses_to_stop", "blocks_its_loop"])
async def test_a_rule_that_hangs_is_a_scored_zero_and_leaves_its_place(rule, released):
    with here(rule, 0.2, 1) as subject:
        try:
            three = await asyncio.gather(*(subject.score_text(PROMPT, "12") for _ in range(3)))
        finally:
            user_rewards.released.set()  # the loop waits for coroutines that refuse to be cancelled
    assert three == [Reward(0.0, False, "timed out after 0.2 s")] * 3


@pytest.mark.medium
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


async def test_a_cancelled_score_is_cancelled(released):
    with here("hangs", HANG) as subject:
        task = asyncio.create_task(subject.score_text(PROMPT, ""))
        while not user_rewards.begun.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


# --- objects and classes ------------------------------------------------------------------------


def test_objects_and_classes_are_given_completions_and_keep_their_state():
    counts = user_rewards.Counts()
    with scorer("exact", given={"s": counts}) as subject:
        reward = asyncio.run(subject.score(PROMPT, response(1, 2)))
        assert reward == Reward(1.0, True, "2 tokens") and subject.state_dict()["training"] == {"s": {"": {"count": 1}}}
    assert counts.closed
    with scorer(SourceConfig(rewards={"n": RewardTerm("user_rewards:Counts", arguments={"start": 5})})) as subject:
        subject.load_state_dict({"training": {"s": {"n": {"count": 7}}}})
        assert asyncio.run(subject.score(PROMPT, response(1))).value == 8.0
        subject.load_state_dict({})  # a checkpoint of an earlier release


@pytest.mark.medium
def test_an_object_may_be_synchronous_and_held_out_prompts_have_a_reward_of_their_own():
    with scorer("exact", given={"s": user_rewards.Plain()}) as subject:
        assert scored(subject, "12") == [Reward(0.5, False)]
    with scorer(SourceConfig(reward="user_rewards:Plain", eval_reward="exact")) as subject:
        assert scored(subject, "12") == [Reward(1.0, True)]
        assert asyncio.run(subject.score(PROMPT, response(1, 2))) == Reward(0.5, False)


# --- batches ------------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize("place", ["here", "in a process"])
def test_batches_are_bounded_in_size_and_in_waiting(place, monkeypatch):
    lengths = user_rewards.Lengths()
    given = {"s": lengths} if place == "here" else None
    monkeypatch.setattr(calls, "BATCH", 4)
    with scorer("user_rewards:Lengths", given=given) as subject:
        assert [r.value for r in scored(subject, *("x" * n for n in range(10)))] == list(range(10))
    assert lengths.sizes == ([4, 4, 2] if place == "here" else [])


@pytest.mark.medium
@pytest.mark.parametrize(
    ("answers", "values", "reason"),
    [
        ("one too many", [0, 0, 0], "returned 4 rewards for 3 responses"),
        ("nan", [1, 0, 3], "returned nan"),
        ("hangs", [0, 0, 0], "timed out after 0.3 s"),
    ],
)
@pytest.mark.parametrize("place", ["here", "in a process"])
def test_a_batch_that_goes_wrong(place, answers, values, reason):
    given = {"s": {"n": user_rewards.Lengths(answers)}} if place == "here" else None
    term = RewardTerm("user_rewards:Lengths", arguments={"answers": answers})
    limits = bounds(0.3 if answers == "hangs" else 60.0)
    with scorer(SourceConfig(rewards={"n": term}), limits, given=given) as subject:
        rewards = scored(subject, "x", "xx", "xxx")
    assert [r.value for r in rewards] == values
    assert {r.reason for r in rewards if not r.value} == {f"n: {reason}"}


# --- mixtures -----------------------------------------------------------------------------------


@pytest.mark.medium
def test_a_mixture_is_a_weighted_sum_and_its_first_reward_says_what_is_correct():
    terms = {
        "exact": RewardTerm(weight="2"),
        "length": RewardTerm("user_rewards:scaled", "linear(0, -1)", {"factor": 0.5}),
        "bad": RewardTerm("user_rewards:misbehaves"),
    }
    progress = [0.5]
    with scorer(SourceConfig(rewards=terms), progress=lambda: progress[0]) as subject:
        right, wrong = scored(subject, "12", "raise")
        assert right == Reward(2 - 0.5 + 1, True, parts={"exact": 1.0, "length": 1.0, "bad": 1.0})
        assert wrong.value == -0.5 * 2.5 and not wrong.correct and wrong.reason == "bad: KeyError: 'nothing here'"
        assert wrong.parts == {"exact": 0.0, "length": 2.5, "bad": 0.0}


def test_samples_of_a_group_have_the_same_weights_also_after_a_resume():
    progress = [0.0]
    terms = {"exact": RewardTerm(weight="linear(1, 0)"), "positions": RewardTerm(weight="0")}
    with scorer(SourceConfig(rewards=terms), progress=lambda: progress[0]) as subject:
        assert asyncio.run(subject.score(PROMPT, response(1, 2))).value == 1.0
        progress[0] = 0.5
        assert asyncio.run(subject.score(PROMPT, response(1, 2, sample=1))).value == 1.0
        state = subject.state_dict()
    with scorer(SourceConfig(rewards=terms), progress=lambda: progress[0]) as subject:
        subject.load_state_dict(state)
        assert asyncio.run(subject.score(PROMPT, response(1, 2, sample=2))).value == 1.0
        other = Prompt("p2", "s", "?", "12", draw=1)
        assert asyncio.run(subject.score(other, response(1, 2, draw=1))).value == 0.5


@pytest.mark.parametrize(
    ("source", "given", "message"),
    [
        ({"reward": "digits", "rewards": {"exact": RewardTerm()}}, None, "data.sources.s.reward is 'digits', but"),
        ({"rewards": {"a": RewardTerm("exact", "success(1, 2)")}}, None, r"rewards.a.weight is 'success\(1, 2\)'"),
        ({"rewards": {"a": RewardTerm("exact", "pid(metric=x, target=1, low=0, high=1)")}}, None, "must be a constant"),
        ({"rewards": {"exakt": RewardTerm()}}, None, "data.sources.s.rewards.exakt.reward is 'exakt'; it must be one"),
        (
            {"rewards": {"a": RewardTerm("exact", arguments={"x": 1})}},
            None,
            "which does not take the arguments {'x': 1}",
        ),
        ({"reward": "user_rewards:Refuses"}, None, "raised RuntimeError: no such model"),
        ({"eval_reward": "user_rewards:nothing"}, None, "data.sources.s.eval_reward is 'user_rewards:nothing'"),
        (
            {"reward": "exakt"},
            None,
            "is 'exakt'; it must be one of exact, positions, digits, number, math, .* or module:",
        ),
        (
            {"reward": "no_such_module:f"},
            None,
            "importing 'no_such_module' raised ModuleNotFoundError: No mod",
        ),
        (
            {"reward": "user_rewards:starts_rite"},
            None,
            "rewards has no 'starts_rite'; it has starts_right, as_bool",
        ),
        ({"reward": "user_rewards:NOT_A_FUNCTION"}, None, "is not a function, or an object with .*, but of type int"),
        ({"reward": "user_rewards:"}, None, "user_rewards has no ''"),
        ({"reward": ":f"}, None, "importing '' raised ValueError"),
        ({}, {"t": len}, "rewards: there is no source t, only s"),
        ({}, {"s": 3}, "the reward for source s is 3; it must be a function, or an object"),
        ({"rewards": {"exact": RewardTerm()}}, {"s": {"b": len}}, "has the rewards exact; give a dictionary"),
    ],
)
def test_wrong_settings_are_said_at_the_start(source, given, message, monkeypatch):
    source = SourceConfig(**source)
    limits = bounds()
    monkeypatch.setattr(scoring, "_HERE", ("function",))  # else a class is made where it is called
    with pytest.raises(ConfigError, match=message):
        source.validate_rewards("data.sources.s")
        Scorer({"s": source}, str, limits, given=given)


# --- measures -----------------------------------------------------------------------------------


def test_what_rewards_take_is_measured():
    async def slow(prompt, text):
        await asyncio.sleep(0.1)
        return 1.0

    slow.kind = "here"
    with scorer("exact", given={"s": slow}) as subject:
        scored(subject, *"abcd")  # two at a time
        metrics = subject.metrics()
        assert subject.metrics() == {}, "since then, nothing happened"
    assert metrics["rewards/scored"] == 4 and metrics["rewards/waiting"] == 2 and metrics["rewards/failed"] == 0
    assert 0.1 <= metrics["rewards/seconds_median"] <= metrics["rewards/seconds_p95"] <= metrics["rewards/seconds_max"]
    assert metrics["rewards/seconds_max"] >= 0.2 and 0 < metrics["rewards/busy/here"] <= 1.01
    assert "2 waited" in reward_words(metrics) and reward_words({}) == ""


def test_what_a_reward_counts_is_measured():
    class Counting:
        counts = 0.0

        def score(self, completion):
            self.counts += 1
            return 1.0

        def take_counts(self):
            taken, self.counts = {"mine/calls": self.counts}, 0.0
            return taken

    with scorer("exact", given={"s": Counting()}) as subject:
        assert [reward.value for reward in scored(subject, "a", "b")] == [1.0, 1.0]
        assert subject.metrics()["rewards/mine/calls"] == 2.0


def test_rules_are_not_measured():
    with scorer("exact") as subject:
        scored(subject, "12", "13")
        assert subject.metrics() == {}


def test_a_reward_that_fails_too_often_is_given_up_once():
    lines = []

    def fails(prompt, text):
        raise ConnectionError("no judge")

    fails.kind = "here"
    with scorer(
        "exact", dataclasses.replace(bounds(), max_failed=0.4), given={"s": fails}, give_up=lines.append
    ) as subject:
        scored(subject, *["x"] * 99)
        assert not lines
        scored(subject, *["x"] * 20)
    (line,) = lines
    name = test_a_reward_that_fails_too_often_is_given_up_once.__name__
    assert line == (
        f"reward '{name}.<locals>.fails' of data.sources.s failed on 100% of the last 100 responses, more than "
        "rewards.max_failed = 0.4; most often: ConnectionError: no judge"
    )


@pytest.mark.medium
def test_a_close_that_hangs_is_left_behind(monkeypatch):
    class Hangs:
        kind = "here"

        def score(self, completion):
            return 1.0

        def close(self):
            time.sleep(600)

    monkeypatch.setattr("fluxjax.rewards.scorer._CLOSING_SECONDS", 0.05)
    with scorer("exact", given={"s": Hangs()}) as subject:
        assert scored(subject, "x")[0].value == 1.0
