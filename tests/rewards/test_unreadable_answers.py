"""Answers that a reward can't grade are named before a run begins, and too many of them are refused."""

import contextlib
import itertools
import json
import runpy

import pytest
from conftest import ROOT
from reward_cases import scored

from fluxjax.config import Config, ConfigError, RewardsConfig, SourceConfig
from fluxjax.rewards import Prompt, Scorer, number
from fluxjax.rewards.math import MathAnswer
from fluxjax.rewards.named import find_reward
from fluxjax.run.trainer import FluxTrainer

OPTIONS = "Which?\nA. red\nB. green"
READABLE = {
    "number": ["5", "-1,000.5", "x = 5", r"\$5", "72 apples", "6 * 7 = 42\n#### 42", "2000/2", "12%", "1e5", "-2.5E+3"],
    "numeric": ["5", r"\frac{3}{5}", "2e-3", "about 12 %", "$12$"],
    "exact": ["left", r"10 \sqrt { 3 }"],
    "choice": ["B", "(A)", "green"],
    "boxes": ["[1, 2, 3, 4]", '[{"bbox_2d": [1, 2, 3, 4]}]'],
    "math": ["5", r"10 \sqrt { 3 }", r"\frac{3}{5}", r"1, 2, \ldots, n", "Sunday", r"x > 3", r"5 \text{ cm}"],
}
UNREADABLE = {
    "number": [
        r"10 \sqrt { 3 }",
        r"\frac{3}{5}",
        "(1, 2)",
        "",
        "6.6e-34 m2",
        "(1,2)",
        "2^10",
        "5x",
        "seven",
        "3:45",
        "5!",
        "x=3,y=4",
    ],
    "numeric": [r"10 \sqrt { 3 }", "(1, 2)", "many", "2x"],
    "exact": ["", " . "],
    "choice": ["C", "blue", "A or B", ""],
    "boxes": ["", "left", "[1, 2, 3]", "[3, 4, 1, 2]"],
    "math": ["", "$$", r"\frac{1", r"x + \foo{2} ? &"],
}


@pytest.mark.medium
@pytest.mark.parametrize("name", READABLE)
def test_each_rule_says_which_answers_it_can_grade(name):
    scorer = Scorer({"s": SourceConfig(reward=name)}, lambda ids: "")
    with contextlib.closing(scorer):
        (reward,) = scorer._training["s"].rewards.values()
        texts = READABLE[name] + UNREADABLE[name]
        assert [answer for answer in texts if reward.unreadable(Prompt("1", "s", OPTIONS, answer))] == UNREADABLE[name]


def checked(answers, reward="number", max_unreadable=0.1, **options):
    texts = itertools.chain.from_iterable((OPTIONS, answer) for answer in answers)
    scorer = Scorer({"s": SourceConfig(reward=reward)}, lambda ids: "", RewardsConfig(max_unreadable=max_unreadable))
    with contextlib.closing(scorer):
        scorer.check_answers({"s": texts}, **options)


def test_too_many_answers_that_cannot_be_graded_are_refused():
    answers = ["5"] * 7 + [r"10 \sqrt { 3 }", r"\frac{3}{5}", r"\frac{3}{5}"]
    with pytest.raises(ConfigError) as error:
        checked(answers)
    assert str(error.value) == (
        "the reward 'number' of data.sources.s can't grade 3 of the first 10 answers, such as "
        r"'10 \\sqrt { 3 }' is more than a number, '\\frac{3}{5}' is more than a number: a share of more than "
        "rewards.max_unreadable = 0.1; choose another reward ('math' reads formulas), or mend the answers"
    )
    with pytest.raises(ConfigError, match="of the first 10 held-out answers"):
        checked(answers, held_out=True)


def test_a_few_are_a_warning(caplog):
    checked(["5"] * 9 + [r"\frac{3}{5}"])
    assert "can't grade 1 of the first 10 answers" in caplog.text and "score 0" in caplog.text
    caplog.clear()
    checked(["5"] * 600 + [r"\frac{3}{5}"] * 900, max_unreadable=0.0)  # only the first 500 are read
    checked([r"\frac{3}{5}"] * 3, max_unreadable=1.0, reward="exact")
    checked(["", "5"], max_unreadable=0.0)  # a record without an answer is skipped when it is drawn
    assert not caplog.text


def test_a_reward_of_a_user_may_say_it_too():
    class Picky:
        async def score(self, completion):
            return 1.0

        def unreadable(self, prompt):
            return "is too short" if len(prompt.answer) < 3 else ""

    scorer = Scorer({"s": SourceConfig()}, lambda ids: "", given={"s": Picky()})
    with contextlib.closing(scorer), pytest.raises(ConfigError, match=r"Picky' of .* can't grade 1 of .*'ab' is too"):
        scorer.check_answers({"s": ["?", "ab"]})


@pytest.mark.slow
def test_a_run_is_refused_before_it_begins(tmp_path):
    rows = [{"prompt": "how long?", "answer": r"10 \sqrt { 3 }"}, {"prompt": "how wide?", "answer": "3"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config: Config = runpy.run_path(str(ROOT / "configs" / "text.py"))["get_config"]("debug")
    config.run_dir = str(tmp_path / "run")
    config.data.sources = {"geometry": SourceConfig(path=str(tmp_path / "train.jsonl"), reward="number")}
    with pytest.raises(ConfigError, match=r"'number' of data.sources.geometry can't grade 1 of the first 2 answers"):
        FluxTrainer(config)


@pytest.mark.medium
def test_the_geometry_recipes_pay_for_the_answer_only():
    """`number`, their reward before, paid for the last number of a formula."""
    for name in ("qwen2_5_vl_3b", "qwen2_5_vl_7b", "qwen2_5_vl_32b", "mimo_vl_7b"):
        config: Config = runpy.run_path(str(ROOT / "configs" / f"{name}.py"))["get_config"]()
        ((reward, term),) = config.data.sources["geometry3k"].rewards.items()
        assert (reward, term.arguments) == ("math", {"tolerance": 1e-3})
    geometry = find_reward("math", arguments=term.arguments)
    assert isinstance(geometry, MathAnswer)
    assert number(Prompt("1", "s", "?", r"10 \sqrt { 3 }"), "I guess 3").correct
    with contextlib.closing(geometry):
        for answer, text, right in [
            (r"10 \sqrt { 3 }", "I guess 3", False),
            (r"10 \sqrt { 3 }", "17.32", True),
            (r"10 \sqrt { 3 }", r"\boxed{10\sqrt3}", True),
            (r"\frac { 3 } { 5 }", "the answer is 5", False),
            (r"\frac { 3 } { 5 }", r"\boxed{0.6}", True),
        ]:
            assert scored(geometry, answer, text).correct is right, (answer, text)
