"""What a step asks of every response stands beside each other, from when its group is scored on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fluxjax.base.types import Columns, Group, Prompt, Response, Reward, Sample
from fluxjax.coordinator.ledger import Ledger, PromptStage
from fluxjax.coordinator.messages import Request

PROMPT = Prompt("p", "digits", "?", "7")


def response(sample: int, versions: tuple[int, ...]) -> Response:
    count = len(versions)
    return Response(
        f"00000000.00/{sample}", 0, sample, tuple(range(count)), (-0.5,) * count, versions, "stop", temperature=0.7
    )


def group(*versions: tuple[int, ...]) -> Group:
    samples = (Sample(response(k, own), Reward(float(k), False), k - 0.5) for k, own in enumerate(versions))
    return Group(PROMPT, tuple(samples))


def same(left: Columns, right: Columns) -> bool:
    return left.data == right.data and all(
        np.array_equal(a, b) and a.dtype == b.dtype and a.shape == b.shape
        for a, b in zip(left[1:3], right[1:3], strict=True)
    )


def test_columns_are_those_of_the_responses() -> None:
    draw, numbers_G3, advantages_G, data = group((3, 3), (), (2, 5, 4)).columns
    assert draw == 0
    assert numbers_G3.tolist() == [[0, 2, 3], [1, 0, -1], [2, 3, 5]]
    assert advantages_G.tolist() == [-0.5, 0.5, 1.5]
    assert [Response.of(0, each).versions for each in data] == [(3, 3), (), (2, 5, 4)]


@pytest.mark.parametrize("known", [True, False])
def test_other_advantages_change_nothing_else(known: bool) -> None:
    first = group((1,), (1, 2))
    if known:
        _ = first.columns
    second = first.with_advantages(np.array([2.0, -2.0]))
    assert ("columns" in vars(second)) == known, "responses were read again"
    assert [sample.advantage for sample in second.samples] == [2.0, -2.0]
    assert same(second.columns, Columns.of(second.samples))
    with pytest.raises(ValueError, match="zip"):
        first.with_advantages([1.0])


@pytest.mark.parametrize("packed", [True, False])
def test_a_scored_group_has_its_columns_where_responses_are_packed(packed: bool) -> None:
    """So that nobody waits for them when a step is planned; the same group is trained on, and found after a resume."""
    ledger = Ledger()
    ledger.draw([PROMPT], [])
    ledger.generate(Request(PROMPT, n=2, attempt=0), served=0)
    for k in range(2):
        came = response(k, (0, 0))
        ledger.finish(came.packed() if packed else came, newest_version=0)
        ledger.score(came)
        ledger.reward(came.rid, Reward(float(k), False))
    [entry] = ledger.at(PromptStage.SCORED)
    assert ("columns" in vars(entry.group())) == packed
    assert entry.group() is entry.group()
    resumed = Ledger()
    resumed.load_state_dict(ledger.state_dict(), {0: PROMPT})
    [again] = resumed.at(PromptStage.SCORED)
    assert again.group() == dataclasses.replace(entry.group())
