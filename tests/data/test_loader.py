"""The order of draws: every prompt once an epoch, honest mixtures, and resuming at any point.

Few examples and short draws: Grain's permutation of a handful of rows takes a millisecond (of thousands, 10 us).
"""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turns import third_of

from fluxjax.base.errors import DataError, RecordError
from fluxjax.base.types import Prompt
from fluxjax.data.loader import PromptLoader, SkippedPrompt


class Numbers:
    """A source of numbered prompts; those in `bad` cannot be used."""

    def __init__(self, name, size, bad=()):
        self.name, self.size, self.bad = name, size, bad

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index in self.bad:
            raise RecordError(str(index), "bad")
        return Prompt(str(index), self.name, f"q{index}", f"a{index}")

    def texts(self):
        return iter(())


class Drawing:
    """Draws from a loader, as `Preparer` does: in order, from wherever a state says."""

    def __init__(self, sizes, weights=None, seed=0):
        sources = {name: Numbers(name, size) for name, size in sizes.items()}
        self.loader = PromptLoader(sources, weights or dict.fromkeys(sizes, 1.0), seed)
        self.next_index = 0

    def draw(self, count) -> list[Any]:
        prompts = [self.loader.order[self.next_index + number] for number in range(count)]
        assert all(isinstance(prompt, Prompt) for prompt in prompts)
        self.next_index += count
        return prompts

    def state_dict(self):
        state = {"next_index": self.next_index, "seed": self.loader.seed, "mixtures": self.loader.mixtures}
        return json.loads(json.dumps(state))

    def load_state_dict(self, state):
        self.next_index = state["next_index"]
        self.loader.resume(state["seed"], state["mixtures"], self.next_index)


def keys(prompts):
    return [(p.source, p.id, p.draw, p.epoch) for p in prompts]


sizes_and_weights = st.dictionaries(
    st.sampled_from("abc"), st.tuples(st.integers(1, 12), st.sampled_from([0.1, 0.5, 1.0, 3.0])), min_size=1
)


@pytest.mark.slow
@settings(max_examples=third_of(30), deadline=None)
@given(sizes_and_weights, st.integers(0, 5), st.integers(0, 60))
def test_every_prompt_of_a_source_exactly_once_an_epoch(mixture, seed, count):
    sizes = {name: size for name, (size, _) in mixture.items()}
    drawn = Drawing(sizes, {name: weight for name, (_, weight) in mixture.items()}, seed).draw(count)
    assert [p.draw for p in drawn] == list(range(count))
    for name, size in sizes.items():
        own = [p for p in drawn if p.source == name]
        assert [p.epoch for p in own] == [i // size for i in range(len(own))]
        for epoch in range(len(own) // size):
            assert sorted(int(p.id) for p in own if p.epoch == epoch) == list(range(size))


@pytest.mark.slow
@settings(max_examples=third_of(30), deadline=None)
@given(sizes_and_weights, st.integers(0, 5), st.lists(st.integers(0, 9), max_size=4), st.integers(0, 30))
def test_resumed_at_any_point_it_goes_on_as_if_never_interrupted(mixture, seed, draws, cut):
    sizes = {name: size for name, (size, _) in mixture.items()}
    weights = {name: weight for name, (_, weight) in mixture.items()}
    straight, first, second = (Drawing(sizes, weights, seed) for _ in range(3))
    expected = straight.draw(cut + sum(draws))[cut:]
    first.draw(cut)
    second.load_state_dict(first.state_dict())
    resumed = [prompt for count in draws for prompt in second.draw(count)]
    assert keys(resumed) == keys(expected) and second.state_dict() == straight.state_dict()


def test_epochs_and_seeds_have_other_orders():
    first = Drawing({"a": 50}).draw(150)
    orders = [[p.id for p in first if p.epoch == epoch] for epoch in range(3)]
    orders.append([p.id for p in Drawing({"a": 50}, seed=1).draw(50)])
    assert len({tuple(order) for order in orders}) == 4


def test_sources_of_one_size_have_orders_of_their_own():
    drawn = Drawing({"a": 50, "b": 50}).draw(100)
    assert [p.id for p in drawn if p.source == "a"] != [p.id for p in drawn if p.source == "b"]


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1.0, 1.0), (1e-3, 1.0), (5.0, 1.0)])
def test_the_mixture_keeps_its_proportions_from_the_start(weights):
    drawn = Drawing({"a": 900, "b": 1000}, dict(zip("ab", weights, strict=True))).draw(2000)
    share = weights[0] / sum(weights)
    for count in (20, 200, 2000):
        assert abs(sum(p.source == "a" for p in drawn[:count]) - share * count) <= 1


def test_the_order_of_sources_in_the_configuration_does_not_matter():
    assert keys(Drawing({"a": 5, "b": 7}, {"a": 1.0, "b": 2.0}).draw(30)) == keys(
        Drawing({"b": 7, "a": 5}, {"b": 2.0, "a": 1.0}).draw(30)
    )


def test_other_weights_go_on_with_each_source_where_it_was():
    first = Drawing({"a": 10, "b": 10, "c": 10})
    head = first.draw(12)
    second = Drawing({"a": 10, "b": 10, "d": 3}, {"a": 3.0, "b": 1.0, "d": 1.0})
    second.load_state_dict(first.state_dict())
    tail = second.draw(25)
    assert [p.draw for p in tail] == list(range(12, 37))
    for name in "ab":
        whole = Drawing({name: 10}).draw(40)
        own = [p for p in head + tail if p.source == name]
        assert [(p.id, p.epoch) for p in own] == [(p.id, p.epoch) for p in whole[: len(own)]]
    assert [sum(p.source == name for p in tail) for name in "abd"] == [15, 5, 5]


@pytest.mark.slow
def test_any_draw_is_replayed_by_its_number_across_changed_mixtures():
    """As prompts in flight are when a run is resumed: also those that were drawn by other weights, twice over."""
    mixtures = [
        ({"a": 10, "b": 10, "c": 7}, None),
        ({"a": 10, "b": 10, "d": 3}, {"a": 3.0, "b": 1.0, "d": 1.0}),
        ({"a": 10}, {"a": 1.0}),
        ({"a": 10, "b": 10, "c": 7}, {"a": 1.0, "b": 0.1, "c": 0.5}),
    ]
    drawn, state = [], None
    for count, (sizes, weights) in zip((40, 40, 0, 40), mixtures, strict=True):
        subject = Drawing(sizes, weights)
        if state is not None:
            subject.load_state_dict(state)
        drawn += subject.draw(count)
        state = subject.state_dict()
    order = subject.loader.order
    for prompt in drawn:
        if prompt.source == "d":
            with pytest.raises(
                DataError, match=f"row {prompt.row} of data source 'd', which data.sources does not name"
            ):
                order[prompt.draw]
        else:
            assert keys([order[prompt.draw]]) == keys([prompt])
    for name, size in (("a", 10), ("b", 10), ("c", 7)):  # one sequence each, across all mixtures
        assert [p.epoch for p in drawn if p.source == name] == [
            i // size for i in range(sum(p.source == name for p in drawn))
        ]
        whole = Drawing({name: size}).draw(120)
        ids = [p.id for p in drawn if p.source == name]
        assert ids == [p.id for p in whole[: len(ids)]]


def test_a_state_of_other_data_is_refused():
    state = Drawing({"a": 10}).state_dict()
    with pytest.raises(DataError, match="'a' had 10 records when the checkpoint was made and has 11 now"):
        Drawing({"a": 11}).load_state_dict(state)
    with pytest.raises(DataError, match="made with seed 0; resume it with that seed, not 1"):
        Drawing({"a": 10}, seed=1).load_state_dict(state)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_wrong_weights_are_refused(weight):
    with pytest.raises(DataError, match=r"data\.sources\.a\.weight is"):
        Drawing({"a": 1}, {"a": weight})
    with pytest.raises(DataError, match="weights are given for"):
        Drawing({"a": 1}, {"b": 1.0})
    with pytest.raises(DataError, match="no data sources"):
        Drawing({})


def test_an_unusable_record_is_a_draw_with_a_reason():
    order = PromptLoader({"a": Numbers("a", 3, bad={1})}, {"a": 1.0}, seed=0).order
    drawn = [order[draw] for draw in range(3)]
    bad = [item for item in drawn if isinstance(item, SkippedPrompt)]
    assert [(item.prompt.id, item.prompt.source, item.reason) for item in bad] == [("1", "a", "bad")]
    prompts = [item.prompt if isinstance(item, SkippedPrompt) else item for item in drawn]
    assert [(p.draw, p.epoch) for p in prompts] == [(0, 0), (1, 0), (2, 0)]
    assert sorted(p.row for p in prompts) == [0, 1, 2] and bad[0].prompt.row == 1
