"""Values that change during a run: what each text means, which text is refused, and that controllers stay in bounds."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxjax.base.types import Group, Prompt, Response, Reward, Sample
from fluxjax.config import ConfigError
from fluxjax.config.schedules import Pid, parse

PID = "pid(metric=train/entropy, target=0.6, low=0.5, high=1.2, kp=0.1, ki=0.01, kd=0.05)"
FINITE = st.floats(-1e6, 1e6)


def _prompt(source: str, id: str = "") -> Prompt:
    return Prompt(id, source, "?", "!")


def _group(source: str, id: str, *correct: bool) -> Group:
    response = Response("r", 0, 0, (1,), (0.0,), (0,), "stop")
    return Group(_prompt(source, id), tuple(Sample(response, Reward(float(one), one)) for one in correct))


class TestValues:
    @pytest.mark.parametrize(
        ("text", "values"),
        [
            ("1", {0.0: 1.0, 0.3: 1.0, 1.0: 1.0}),
            (" 1e-3 ", {0.5: 0.001}),
            ("linear(1.2, 0.8)", {-1.0: 1.2, 0.0: 1.2, 0.25: 1.1, 1.0: 0.8, 2.0: 0.8}),
            ("cosine(1.2,0.8)", {0.0: 1.2, 0.25: 1.0 + 0.2 * math.cos(math.pi / 4), 0.5: 1.0, 1.0: 0.8}),
            ("phases(1.2@0, 1.0@0.2, 0.7@0.7)", {0.0: 1.2, 0.19: 1.2, 0.2: 1.0, 0.69: 1.0, 0.7: 0.7, 1.0: 0.7}),
        ],
    )
    def test_by_hand(self, text: str, values: dict[float, float]) -> None:
        schedule = parse(text, "schedules.temperature")
        assert {progress: schedule.value(progress) for progress in values} == pytest.approx(values)

    def test_sources(self) -> None:
        schedule = parse("math: 1.0; code: linear(1.2, 0.8); *: 0.9", "schedules.temperature")
        assert [schedule.value(1.0, _prompt(source)) for source in ("math", "code", "pans")] == [1.0, 0.8, 0.9]
        assert schedule.value(1.0) == 0.9
        assert schedule.bounds == (0.8, 1.2)

    def test_source_without_a_value(self) -> None:
        schedule = parse("math: 1.0; code: 1.1", "schedules.temperature")
        with pytest.raises(ConfigError, match="temperature has no value for source 'pans', only for math, code"):
            schedule.value(0.0, _prompt("pans"))

    @given(first=FINITE, last=FINITE, progress=st.floats(-1, 2), name=st.sampled_from(["linear", "cosine"]))
    def test_between_first_and_last(self, first: float, last: float, progress: float, name: str) -> None:
        schedule = parse(f"{name}({first!r}, {last!r})", "x")
        low, high = schedule.bounds
        slack = 1e-9 * (1 + abs(low) + abs(high))
        assert low - slack <= schedule.value(progress) <= high + slack
        assert schedule.value(0.0) == pytest.approx(first) and schedule.value(1.0) == pytest.approx(last)


class TestSuccess:
    def test_of_a_prompt_of_its_source_and_unknown(self) -> None:
        schedule = parse("math: success(1.2, 0.8); *: 1.0", "schedules.temperature")
        assert schedule.value(0.0, _prompt("math", "new")) == pytest.approx(1.0)
        schedule.observe_group(_group("math", "hard", False, False))
        schedule.observe_group(_group("math", "easy", True, True))
        schedule.observe_group(_group("math", "half", True, True))
        schedule.observe_group(_group("math", "half", True, False))  # the last one counts
        schedule.observe_group(_group("code", "easy", True, True))
        values = [schedule.value(0.5, _prompt("math", id)) for id in ("hard", "easy", "half")]
        assert values == pytest.approx([1.2, 0.8, 1.0])
        assert 1.15 < schedule.value(0.5, _prompt("math", "new")) < 1.2  # the source: one failed, few others so far
        assert schedule.value(0.5, _prompt("code", "easy")) == 1.0

    def test_state(self) -> None:
        first, again = (parse("success(1.2, 0.8)", "x") for _ in range(2))
        first.observe_group(_group("math", "hard", False, False))
        first.observe_group(_group("math", "easy", True, True))
        again.load_state_dict(json.loads(json.dumps(first.state_dict())))
        for id in ("hard", "easy", "new"):
            assert again.value(0.0, _prompt("math", id)) == first.value(0.0, _prompt("math", id))

    def test_only_where_prompts_may_differ(self) -> None:
        with pytest.raises(ConfigError, match="one value for all prompts"):
            parse("success(1, 0)", "schedules.tail_prompts", per_prompt=False)
        with pytest.raises(ConfigError, match=r"they must be in \[0\.1, 1\]"):
            parse("success(1, 0)", "schedules.temperature", 0.1, 1.0)


class TestControllers:
    def test_moves_towards_the_target(self) -> None:
        """A plant whose metric follows the value is brought to the target and stays there, from either side."""
        for gain in (0.55, 1.0):
            schedule = parse(PID, "x")
            assert schedule.value(0.0) == pytest.approx(0.85)
            assert abs(gain * schedule.value(0.0) - 0.6) > 0.1
            for _ in range(400):
                schedule.observe({"train/entropy": gain * schedule.value(0.5), "train/loss": 3.0})
            assert gain * schedule.value(0.5) == pytest.approx(0.6, abs=0.02)

    def test_what_it_ignores(self) -> None:
        schedule = parse(PID, "x")
        for metrics in ({}, {"train/loss": 1.0}, {"train/entropy": math.nan}):
            schedule.observe(metrics)
        assert schedule.value(0.0) == pytest.approx(0.85)
        constant = parse("1.0", "x")
        constant.observe({"train/entropy": 0.1})
        assert constant.value(0.0) == 1.0 and constant.state_dict() == {}

    def test_no_windup(self) -> None:
        """However long the error pushed against a bound, the value leaves it as soon as the error turns."""
        for sign, bound in ((1.0, 1.2), (-1.0, 0.5)):
            pid = Pid(0.85, 0.5, 1.2, kp=0.1, ki=0.05, kd=0.0)
            for _ in range(1000):
                pid.update(sign)
            assert pid.now == bound
            assert pid.update(-0.2 * sign) * sign < bound * sign

    @given(
        errors=st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=40),
        gains=st.tuples(*[st.floats(-2, 2)] * 3),
    )
    def test_bounds(self, errors: list[float], gains: tuple[float, float, float]) -> None:
        kp, ki, kd = gains
        pid = Pid(0.5, 0.1, 0.9, kp=kp, ki=ki, kd=kd)
        for error in errors:
            assert 0.1 <= pid.update(error) <= 0.9

    def test_state(self) -> None:
        text = f"math: {PID}; *: linear(1.0, 0.0)"
        first, again = parse(text, "x"), parse(text, "x")
        for step in range(5):
            first.observe({"train/entropy": 0.1 * step})
        again.load_state_dict(json.loads(json.dumps(first.state_dict())))
        for schedule in (first, again):
            schedule.observe({"train/entropy": 0.9})
        assert first.value(0.5, _prompt("math")) == again.value(0.5, _prompt("math"))
        assert first.state_dict() == again.state_dict()

    def test_state_of_other_bounds(self) -> None:
        narrow, wide = (Pid(0.65, low, high, kp=0.1, ki=0.0, kd=0.0) for low, high in ((0.6, 0.7), (0.0, 1.0)))
        wide.update(3.0)
        narrow.load_state_dict(wide.state_dict())
        assert wide.now == pytest.approx(0.95) and narrow.now == 0.7


class TestRefusals:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "needs one schedule"),
            ("1; 2", "needs one schedule"),
            ("warm", "'warm' is no finite number"),
            ("nan", "no finite number"),
            ("linear(1.2)", "linear takes two values"),
            ("success(1)", "success takes two values"),
            ("cosine(1, x)", "'x' is no finite number"),
            ("sine(1, 2)", "there is no schedule 'sine'"),
            ("phases(1, 2)", "each phase must be VALUE@START"),
            ("phases(1@0.1)", "the first phase must start at 0"),
            ("phases(1@0, 2@0.5, 3@0.5)", "each other phase after the one before it"),
            ("phases(1@0, 2@1)", "below 1"),
            ("math: 1; math: 2", "each source once"),
            ("math: 1; 2", "'2' must be SOURCE: SCHEDULE"),
            ("math:", "'' is no finite number"),
            ("pid(target=1, low=0, high=1)", "pid needs metric"),
            ("pid(metric=a)", "pid needs target, low, high"),
            ("pid(metric=a, target=1, low=2, high=1)", "low <= start <= high"),
            ("pid(metric=a, target=1, low=0, high=1, start=2)", "low <= start <= high, not 0, 2, 1"),
            ("pid(metric=a, goal=1)", "each name once"),
            ("pid(metric=a, metric=b, target=1, low=0, high=1)", "each name once"),
            ("pid(a)", "NAME=VALUE"),
            ("linear(1, 2", "no finite number"),
        ],
    )
    def test_text(self, text: str, message: str) -> None:
        with pytest.raises(ConfigError) as error:
            parse(text, "schedules.temperature")
        said = str(error.value)
        assert said.startswith(f"schedules.temperature is {text!r}: ") and message in said and "allowed are" in said

    def test_values_that_the_field_cannot_have(self) -> None:
        for text in ("-1", "linear(1, -0.5)", "phases(1@0, -1@0.5)", "math: 1; code: -1", PID.replace("0.5", "-0.5")):
            with pytest.raises(ConfigError, match="they must be at least 0"):
                parse(text, "schedules.temperature", low=0.0)
        with pytest.raises(ConfigError, match=r"they must be in \[0, 1\]"):
            parse("1.5", "schedules.target_staleness", 0.0, 1.0)

    def test_sources_where_there_are_none(self) -> None:
        with pytest.raises(ConfigError, match="one value for all sources"):
            parse("math: 1", "schedules.learning_rate_scale", per_prompt=False)
