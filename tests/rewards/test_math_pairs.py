"""Pairs of answers: which are the same, by the reward `math` and by math-verify alone, either of them the reference."""

import collections
import json
import logging
import pathlib
from typing import cast

import math_verify
import pytest
from conftest import ROOT
from math_verify import grader

from fluxjax.rewards import math_worker
from fluxjax.rewards.extraction import boxed
from fluxjax.rewards.math import decided, notation


def pairs_in(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


PAIRS = pairs_in(pathlib.Path(__file__).with_name("math_pairs.jsonl"))
BY_KIND = collections.defaultdict(list)
for pair in PAIRS:
    BY_KIND[pair["kind"]].append(pair)


def both_ways(pair):
    answer = boxed(pair["text"])
    return (pair["ref"], answer), (answer, pair["ref"])


def equal(reference, given, tolerance=1e-6):
    """Compares as the reward does, in this process."""
    parts = notation(reference), notation(given)
    at_once = decided(*parts, tolerance, False)
    if at_once is not None:
        return at_once
    question = {"reference": parts[0].latex, "given": parts[1].latex, "strict": True, "tolerance": tolerance}
    return math_worker.equal(question)


@pytest.mark.slow
@pytest.mark.parametrize("kind", BY_KIND)
def test_pairs_of_a_kind(kind):
    """`missed` are those that the reward is known to get wrong: none of them is a wrong answer that is paid."""
    wrong = [
        (reference, given)
        for pair in BY_KIND[kind]
        for reference, given in both_ways(pair)
        if equal(reference, given) != (pair["want"] and not pair.get("missed"))
    ]
    assert not wrong


def test_pairs_that_others_reported(shared):
    path = shared / "cases" / "rl" / "math_pairs.jsonl"
    if not path.exists():
        pytest.skip(f"needs {path}, which is beside the repository where this was developed")
    pairs = pairs_in(path)
    assert len(pairs) >= 18
    assert not [pair for pair in pairs for answers in both_ways(pair) if equal(*answers) is not pair["want"]]


def test_a_tolerance_reaches_what_takes_algebra():
    assert equal(r"10 \sqrt { 3 }", "17.32", 1e-3) and not equal(r"10 \sqrt { 3 }", "17.32")
    assert not equal(r"10 \sqrt { 3 }", "17.3", 1e-4) and not equal("1000000.5", "1000000.6", 1e-3)
    assert equal(r"\left( 10\sqrt{3}, 1 \right)", "(17.32, 1)", 1e-3)


@pytest.mark.long
def test_error_rates_as_documented(monkeypatch):
    """docs/rewards.md has both rates over these pairs, both ways round."""
    monkeypatch.setattr(grader, "sympy_numeric_eq", math_worker._library_equal)
    monkeypatch.setattr(logging.getLogger("math_verify"), "level", logging.ERROR)

    def parsed(latex):
        return math_verify.parse(f"${latex}$", parsing_timeout=cast(int, None))

    paid = refused = 0
    for pair in PAIRS:
        first, second = parsed(pair["ref"]), parsed(boxed(pair["text"]))
        found = [math_verify.verify(*both, timeout_seconds=None) for both in ((first, second), (second, first))]
        paid += 0 if pair["want"] else sum(found)
        refused += 2 - sum(found) if pair["want"] else 0
    ours = 2 * sum(pair.get("missed", False) for pair in PAIRS)
    count = 2 * len(PAIRS)
    text = " ".join((ROOT / "docs" / "rewards.md").read_text().split())
    assert f"`math` is wrong on {ours} of {count} ({ours / count:.1%})" in text
    assert (
        f"math-verify alone on {paid + refused} ({(paid + refused) / count:.0%}): {paid} wrong answers are paid" in text
    )
