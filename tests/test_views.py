"""Contexts that are rewritten between turns: a sampled token is trained on in one view, behind what the engine saw."""

import collections
import dataclasses

import numpy as np
import pytest
from episode_cases import Stretch, random_episodes, seen_before, views_by_walking
from hypothesis import given
from hypothesis import strategies as st
from packing_cases import END, IMAGE, MODEL, START, VIDEO, compose
from test_episode_batches import config_of

from fluxjax.base.scored import views_of
from fluxjax.base.types import ENVIRONMENT
from fluxjax.batch.composer import Team
from fluxjax.batch.composition import unpack
from fluxjax.config import FSDP, Config, ConfigError, LossAggregation, SourceConfig
from fluxjax.coordinator.messages import Turn
from fluxjax.learner.loss_inputs import decided
from fluxjax.runtime.conversations import turn_request
from models.inputs import ModelInput, media_numbers, picked, text_input
from rollout.engine import SamplingParams

CONTEXTS = ["whole", "turn", "images:1", "images:2", "images:3"]
MERGE = 4
# By kind, the placeholders of a medium between its start and its end. A video with times has inner starts and ends.
SHOWN = {
    "image": [START, IMAGE, IMAGE, END],
    "video": [START, VIDEO, VIDEO, VIDEO, END],
    "timed": [START, 7, START, VIDEO, END, 8, 9, START, VIDEO, END, END],
}
texts = st.integers(1, 3).map(lambda n: ("text", [5] * n))
observations = st.lists(texts | st.sampled_from(sorted(SHOWN.items())), max_size=4).map(
    lambda parts: [*parts, ("text", [6])]
)
said = st.integers(1, 3)


@st.composite
def records(draw: st.DrawFn) -> tuple[ModelInput, np.ndarray, list[Stretch]]:
    """The inputs of a response, the versions of its tokens, and its stretches."""
    ids, versions, stretches, turns = list[int](), list[int](), list[Stretch](), draw(st.integers(1, 6))
    for turn in range(turns):
        parts = draw(observations) if turn else []
        for kind, tokens in [*parts, ("said", list(range(10, 10 + draw(said))))]:
            stretches.append(Stretch(turn, "media" if kind in SHOWN else kind, len(ids), len(ids) + len(tokens)))
            ids += tokens
            versions += [turn if kind == "said" else ENVIRONMENT] * len(tokens)
    plain, ids_T = text_input(ids, draw(st.integers(0, 9))), np.array(ids, np.int32)
    shown = (ids_T == IMAGE) | (ids_T == VIDEO)
    return (
        dataclasses.replace(plain, feature_index_T=np.where(shown, np.cumsum(shown) - 1, -1)),
        np.array(versions),
        stretches,
    )


def indices(stretches: list[Stretch]) -> list[int]:
    return [index for each in stretches for index in range(each.start, each.stop)]


@given(records(), st.sampled_from(CONTEXTS))
def test_each_sampled_token_is_trained_on_once_behind_what_the_engine_saw(record, context):
    inputs, versions, stretches = record
    media = media_numbers(inputs)
    numbers = [each for each in stretches if each.kind == "media"]
    for number, each in enumerate(numbers, 1):
        assert (media[each.start : each.stop] == number).all()
    assert (media > 0).sum() == len(indices(numbers))
    views, trained = views_of(versions, media, context), list[int]()
    assert [(kept.tolist(), int(versions[first:].max(initial=-9) >= 0)) for kept, first in views] == [
        (indices(seen), 1) for seen, _ in views_by_walking(stretches, context)
    ]
    for kept, first in views:
        own = kept[(kept >= first) & (versions[kept] != ENVIRONMENT)]
        trained += own.tolist()
        for each in (each for each in stretches if each.kind == "said" and each.start in own):
            before = indices(seen_before(stretches, each.turn, context))
            assert kept[kept < each.start].tolist() == before
            # The engine is asked at the beginning of the turn, or within it if it was parked.
            for end in range(max(each.start, 1), each.stop):
                asked, _ = views_of(versions[:end], media[:end], context)[-1]
                assert asked.tolist() == [*before, *range(each.start, end)]
    assert trained == np.flatnonzero(versions != ENVIRONMENT).tolist()
    if context == "whole":
        [(kept, first)] = views
        assert (kept.tolist(), first) == (list(range(len(versions))), 0)


@pytest.mark.parametrize("context", ["turn", "images:1", "images:2"])
def test_a_turn_is_asked_for_behind_what_it_sees_as_if_the_conversation_had_never_been_longer(context):
    _, prepared, episodes = random_episodes(5, context)
    spoken = collections.Counter[tuple[int, int]]()
    for group, sample, whole, prompt in episodes:
        key = sample.response.draw, sample.response.sample
        [record] = [s.response for s in group.samples if s.response.sample == key[1]]
        own = np.array(sample.response.versions) != ENVIRONMENT
        end = int(np.flatnonzero(np.array(record.versions) != ENVIRONMENT)[spoken[key]])  # where the view's turn begins
        spoken[key] += own.sum()
        columns = {name: getattr(record, name)[:end] for name in ("token_ids", "logprobs", "versions")}
        told, before = prepared[key[0]], dataclasses.replace(record, **columns)
        if (inputs := told.responses.get(key[1])) is not None:
            first = picked(inputs.laid_out(), np.arange(end), told.inputs.laid_out().next_position, MERGE)
            told = dataclasses.replace(told, responses={key[1]: first})
        sampling = SamplingParams(max_new_tokens=200)
        got, size = turn_request(Turn(group.prompt, before, 0), told, sampling, 1, MERGE).prompt, prompt + own.argmax()
        assert got.token_ids_T.tolist() == whole.token_ids_T[:size].tolist()
        assert got.positions_3T.tolist() == whole.positions_3T[:, :size].tolist()
        assert whole.positions_3T[:, size].tolist() == [got.next_position] * 3
        assert got.feature_index_T.tolist() == whole.feature_index_T[:size].tolist()
        if got.patches_PX is not None:
            np.testing.assert_array_equal(got.patches_PX, whole.vision.patches_PX[: len(got.patches_PX)])
        for name in ("frame_segments_P", "window_segments_P", "positions_P2") if got.vision is not None else ():
            same, there = (getattr(of, name)[: got.vision.num_patches] for of in (got.vision, whole.vision))
            assert name == "positions_P2" or 1 <= same.min() <= same.max() <= got.vision.num_patches
            np.testing.assert_array_equal(np.diff(same, axis=0) != 0, np.diff(there, axis=0) != 0)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("mean", LossAggregation)
def test_an_episode_weighs_the_same_in_any_number_of_views(context, mean):
    sums = []
    for rule in ("whole", context):
        config = config_of(FSDP)
        config.algorithm.loss_aggregation = mean
        groups, prepared, _ = random_episodes(3, rule)
        composition = compose(groups, prepared, config, vision=MODEL.vision)
        for name, of in (
            ("loss_weights_BT", np.float64),
            ("advantages_BT", np.float64),
            ("behaviour_logprobs_BT", float),
        ):
            values = unpack(composition, [np.asarray(getattr(b, name), of) for b in composition.batches])
            sums.append({key: value.tolist() for key, value in values.items()})
    assert sums[:3] == sums[3:]


def test_means_over_an_episode_have_all_of_its_views():
    """And process 0 gets the tokens of an episode in the order in which they were sampled."""
    groups, prepared, _ = random_episodes(4, "turn")
    composition = compose(groups, prepared, config_of(FSDP), vision=MODEL.vision)
    assert len(set(composition.keys)) < len(composition.keys)
    tokens = composition.of_responses([b.behaviour_logprobs_BT for b in composition.batches], np.float64)
    said = {(s.response.draw, s.response.sample): s.response for group in groups for s in group.samples}

    def decide(keys, lengths, numbers):
        ends = np.cumsum(lengths)
        for key, end, length in zip(keys, ends, lengths, strict=True):
            record = [p for p, v in zip(said[key].logprobs, said[key].versions, strict=True) if v != ENVIRONMENT]
            np.testing.assert_allclose(numbers["values"][end - length : end], record, rtol=1e-6)
        return {"means": np.repeat(np.add.reduceat(numbers["values"], ends - lengths) / lengths, lengths)}

    [found] = decided(Team(), [composition], [composition.lengths], [{"values": tokens}], decide)
    begins = np.cumsum(composition.lengths) - composition.lengths
    for key, mean in zip(composition.keys, found["means"][begins], strict=True):
        record = [p for p, v in zip(said[key].logprobs, said[key].versions, strict=True) if v != ENVIRONMENT]
        assert mean == pytest.approx(np.mean(record), rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"context": "images:0", "environment": "a:b"},
            r"data.sources.s.context .*'images:0'.* must be whole, turn or im",
        ),
        ({"context": "last", "environment": "a:b"}, r"data.sources.s.context .*must be whole, turn or images:K"),
        ({"context": "turn"}, r"data.sources.s.context 'turn' is given, but data.sources.s.environment is empty"),
    ],
)
def test_contexts_that_do_not_exist_are_refused(settings, text):
    config = Config()
    config.data.sources = {"s": SourceConfig(**settings)}
    with pytest.raises(ConfigError, match=text):
        config.validate()
