"""Rewards that are classes are found by name, made with their arguments, and scored by a `Scorer`."""

import asyncio
import contextlib
import inspect
import math
import time

import pytest
from reward_cases import HOSTILE, scored
from sandboxes import bubblewrap

from fluxjax.base.types import Prompt
from fluxjax.config import ConfigError, SourceConfig
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
    # Two have settings that they need, one a source with an environment (tests/test_episode_runs.py).
    assert CASES.keys() | {"overlong", "judge", "environment"} == CLASSES.keys()


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


@pytest.mark.medium
@pytest.mark.parametrize("name", ["number", *(name for name in CASES if name != "code")])
def test_hostile_texts_score_nothing_in_little_time(name):
    """The slowest takes 30 ms on an idle core: one that grew with the square of the length would take minutes."""
    reward = find_reward(name, arguments={"seconds": 5.0, "workers": 2} if name == "math" else {})
    answer = "7" if name == "number" else CASES[name][0]
    with contextlib.closing(reward) if hasattr(reward, "close") else contextlib.nullcontext():
        for text in HOSTILE:
            begin = time.process_time()
            result = scored(reward, answer, text, QUESTION)
            assert time.process_time() - begin < 5, text[:20]
            assert not result.correct and math.isfinite(result.value) and result.value < 0.5, text[:20]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("overlong", {}, "reward is 'overlong'.*most_tokens is 0; it must be positive: set it to rollout.max_new_tok"),
        ("overlong", {"most_tokens": 10}, "overlong.interval is 0; it must be positive"),
        ("overlong", {"most_tokens": 10, "interval": 11}, "is 11; it must be at most overlong.most_tokens, 10"),
        ("format", {"pattern": "("}, r"format.pattern is '\(', which is no regular expression"),
        ("numeric", {"tolerence": 0.1}, "reward is 'numeric', which does not take the arguments .*'tolerence'"),
        ("numeric", {"tolerance": -0.1}, "numeric.tolerance is -0.1; it must not be negative"),
        ("edit_distance", {"threshold": 2.0}, r"edit_distance.threshold is 2.0; it must be in \[0, 1\]"),
        ("boxes", {"correct_from": 0.0}, r"boxes.correct_from is 0.0; it must be in \(0, 1\]"),
        ("boxes", {"threshold": math.nan}, "boxes.threshold is nan; it must be a finite number"),
        ("math", {"seconds": 0.0}, "math.seconds is 0.0; it must be greater than 0"),
        ("math", {"workers": 0}, "math.workers is 0; it must be greater than 0"),
        ("math", {"tolerance": math.nan}, "math.tolerance is nan; it must be a finite number"),
    ],
)
def test_arguments_that_are_missing_wrong_or_unknown_are_named(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        find_reward(name, arguments=arguments)
