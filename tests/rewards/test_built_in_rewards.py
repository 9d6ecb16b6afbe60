"""Rewards that are classes are found by name, made with their arguments, and scored by a `Scorer`."""

import asyncio
import contextlib
import inspect

import pytest
from sandboxes import bubblewrap

from fluxjax.base.types import Prompt, Response
from fluxjax.config import ConfigError, SourceConfig
from fluxjax.config.rewards import RewardTerm
from fluxjax.rewards import REWARDS, Scorer, find_reward

CLASSES = {name: value for name, value in REWARDS.items() if inspect.isclass(value)}
QUESTION = "Which one?\nA. a cat\nB. a dog"
CASES = {  # answer, a right text
    "math": ("0.5", r"\boxed{\frac{1}{2}}"),
    "choice": ("B", "It is a dog."),
    "numeric": ("100", "101"),
    "edit_distance": ("kitten", "Kitten"),
    "boxes": ("[0, 0, 10, 10]", '{"bbox_2d": [0, 0, 10, 10]}'),
    "ordered_list": ("1, 2", "1 -> 2"),
    "format": ("5", "<think>2 + 3</think><answer>5</answer>"),
    "code": ('{"inputs": ["1"], "outputs": ["2"]}', "print(int(input()) + 1)"),
}


def test_each_class_has_a_case_here():
    assert CASES.keys() | {"overlong", "judge"} == CLASSES.keys()  # which have settings that they need


@pytest.mark.parametrize("name", CASES)
def test_a_source_names_its_reward(name):
    answer, text = CASES[name]
    if name == "code":
        bubblewrap()
    with contextlib.closing(Scorer({"s": SourceConfig(reward=name)}, lambda ids: "")) as scorer:
        right, wrong = (
            asyncio.run(scorer.score_text(Prompt("1", "s", QUESTION, answer), text)) for text in (text, "A. nothing")
        )
    assert right.correct and right.value == 1.0 and not right.reason
    assert not wrong.correct and wrong.value < 0.5


def test_a_mixture_of_answer_format_and_length():
    terms = {
        "math": RewardTerm(arguments={"only_marked": True, "workers": 1}),
        "form": RewardTerm(reward="format", weight="0.1"),
        "overlong": RewardTerm(weight="0.5", arguments={"most_tokens": 4, "interval": 2}),
    }
    texts = {
        (1,): "<think>2 + 3</think><answer>5</answer>",
        (1, 2, 3): r"\boxed{5}",
        (1, 2, 3, 4, 5): "it is 5",
    }
    with contextlib.closing(Scorer({"s": SourceConfig(rewards=terms)}, lambda ids: texts[tuple(ids)])) as scorer:
        for ids, value, correct, parts in [
            ((1,), 1.1, True, {"math": 1.0, "form": 1.0, "overlong": 0.0}),
            ((1, 2, 3), 0.75, True, {"math": 1.0, "form": 0.0, "overlong": -0.5}),
            ((1, 2, 3, 4, 5), -0.5, False, {"math": 0.0, "form": 0.0, "overlong": -1.0}),
        ]:
            response = Response("r", 0, 0, ids, (0.0,) * len(ids), (0,) * len(ids), "stop")
            reward = asyncio.run(scorer.score(Prompt("1", "s", "?", "5"), response))
            assert reward.value == pytest.approx(value) and reward.correct is correct and reward.parts == parts


def test_arguments_that_are_missing_or_unknown_are_named():
    with pytest.raises(ConfigError, match=r"reward is 'overlong'.*overlong.most_tokens is 0; it must be positive"):
        find_reward("overlong")
    with pytest.raises(ConfigError, match=r"reward is 'numeric', which can't be given .*'tolerence'"):
        find_reward("numeric", arguments={"tolerence": 0.1})
    with pytest.raises(ConfigError, match=r"numeric.tolerance is -1.0; it must not be negative"):
        find_reward("numeric", arguments={"tolerance": -1.0})
