"""Episodes in packed rows: tokens of the environment have no loss, and images and videos lie inside of responses. Loss,
gradients and log-probs are those of each episode alone, to 1e-5 (float32), under every strategy."""

import dataclasses

import jax
import numpy as np
import pytest
from episode_cases import alone, kinds, random_episodes
from learner_cases import assert_equal, outcome, tiny
from packing_cases import MODEL, QWEN3_5, QWEN3_VL, compose, make_config
from turns import by_turns

from fluxjax.algorithms import grpo
from fluxjax.base.types import ENVIRONMENT
from fluxjax.batch.composer import Composer
from fluxjax.config import FSDP, ODC, ConfigError, FlexUlysses, Ulysses
from fluxjax.hosts.orders import Learn, decode, encode, shares_of, told
from fluxjax.learner.learner import Learner
from models.inputs import ModelInput
from models.shadow import ShadowTensor
from sharding.mesh import make_mesh

HEADS = (8, 2)


def config_of(strategy, share=True, patches=384):
    config = make_config(tokens_per_row=160, rows=2, patches=patches, share=share)
    config.rollout.max_sequence_tokens = 160
    config.sharding.strategy = strategy()
    return config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "devices", "share", "model", "seed", "context"),
    [
        (FSDP, 1, True, MODEL, 0, "whole"),
        *by_turns(
            [
                (FSDP, 4, False, QWEN3_VL, 1, "turn"),
                (FlexUlysses, 8, True, MODEL, 2, "images:1"),
                (ODC, 4, True, QWEN3_5, 3, "turn"),
                (Ulysses, 4, False, QWEN3_VL, 4, "whole"),
                (FSDP, 2, True, QWEN3_5, 5, "images:1"),
                (ODC, 4, False, MODEL, 6, "whole"),
                (FlexUlysses, 4, True, QWEN3_5, 7, "whole"),
                (ODC, 4, True, QWEN3_VL, 8, "images:2"),
                (Ulysses, 4, True, MODEL, 9, "turn"),
            ]
        ),
    ],
)
def test_packed_episodes_equal_each_view_alone(strategy, devices, share, model, seed, context):
    """A view is the whole episode, or what the model saw of it where its context was rewritten."""
    groups, prepared, episodes = random_episodes(seed, context)
    assert kinds(episodes) >= {"turns", "image"}
    assert (len(episodes) > sum(len(group.samples) for group in groups)) == (context != "whole")
    assert any(len(set(sample.turn_advantages)) > 1 for _, sample, _, _ in episodes)
    config = config_of(strategy, share)
    composition = compose(groups, prepared, config, devices, vision=MODEL.vision, text=model.text)
    newest = max(sample.response.version_span[1] for _, sample, _, _ in episodes)
    many = Learner(config, tiny(HEADS, model), grpo.token_loss, mesh=make_mesh(devices))
    assert_equal(outcome(many, composition), alone(episodes, HEADS, model, newest))


def test_the_environments_tokens_are_in_no_cells_and_have_no_weight():
    groups, prepared, episodes = random_episodes(0)
    composition = compose(groups, prepared, config_of(FSDP), vision=MODEL.vision)
    trained = {(s.response.draw, s.response.sample): s.response.num_trained for _, s, _, _ in episodes}
    assert dict(zip(composition.keys, composition.lengths.tolist(), strict=True)) == trained
    weights = composition.of_responses([batch.loss_weights_BT for batch in composition.batches])
    assert (weights > 0).all() and np.isclose(weights.sum(), 1.0)
    assert sum(np.count_nonzero(batch.loss_weights_BT) for batch in composition.batches) == sum(trained.values())
    assert any(ENVIRONMENT in sample.response.versions for _, sample, _, _ in episodes)


def patches_of(inputs) -> int:
    return 0 if inputs.patches_PX is None else len(inputs.patches_PX)


@pytest.mark.parametrize("strategy", [FSDP, FlexUlysses, ODC])
def test_a_group_whose_observations_exceed_a_device_is_cut(strategy):
    """Each response fits with its prompt. All of a group do not: each device then holds the patches of its own ones."""
    groups, prepared, _ = random_episodes(0)
    responses = {draw: list(map(patches_of, prompt.responses.values())) for draw, prompt in prepared.items()}
    own = {draw: patches_of(prompt.inputs) for draw, prompt in prepared.items()}
    most = max(own[draw] + max(patches) for draw, patches in responses.items() if patches)
    assert any(own[draw] + sum(patches) > most for draw, patches in responses.items())
    composition = compose(groups, prepared, config_of(strategy, patches=most), 2, vision=MODEL.vision, text=MODEL.text)
    keys = {(sample.response.draw, sample.response.sample) for group in groups for sample in group.samples}
    assert set(composition.keys) == keys
    for batch in composition.batches:
        assert batch.inputs.vision.num_patches <= 2 * most
    too_few = most // 2 if strategy is FSDP else most // 4
    with pytest.raises(ConfigError, match="patches"):
        compose(groups, prepared, config_of(strategy, patches=too_few), 2, vision=MODEL.vision, text=MODEL.text)


def test_inputs_of_another_length_are_refused():
    groups, prepared, _ = random_episodes(0)
    draw, prompt = next((draw, prompt) for draw, prompt in prepared.items() if prompt.responses)
    sample = next(iter(prompt.responses))
    prepared[draw] = dataclasses.replace(prompt, responses={sample: prompt.inputs})
    with pytest.raises(ValueError, match=rf"prompt-{draw}: response {sample} has \d+ tokens, but its inputs have"):
        compose(groups, prepared, config_of(FSDP), vision=MODEL.vision)


def here(composition):
    """The responses and views that have tokens in the rows of a process, with the number of these tokens."""
    found = zip(composition.keys, composition.views, composition.lengths.tolist(), strict=True)
    return {(*key, view): length for key, view, length in found if length}


def shadow(inputs, name):
    if inputs.patches_PX is None:
        return inputs
    assert isinstance(inputs, ModelInput)
    return inputs.with_patches(ShadowTensor.of(name, inputs.patches_PX.shape, np.float32))


@pytest.mark.parametrize(("strategy", "context"), [(FSDP, "turn"), (FlexUlysses, "images:1"), (ODC, "whole")])
def test_another_process_lays_out_the_same_rows(strategy, context):
    """It gets tickets in the place of pixels, and only sizes of groups that its rows do not have."""
    groups, prepared, _ = random_episodes(4, context)
    for draw, prompt in prepared.items():
        responses = {k: shadow(inputs, f"{draw}/{k}") for k, inputs in prompt.responses.items()}
        prepared[draw] = dataclasses.replace(prompt, inputs=shadow(prompt.inputs, f"{draw}"), responses=responses)
    composer = Composer(config_of(strategy), 4, MODEL.vision, MODEL.text)
    heard: dict[str, str] = {}
    for share in composer.outline(groups, prepared).cut(2):
        rows, responses = told(share, lambda ticket: f"place of {ticket}")
        order = decode(b"".join(encode(Learn(1, [rows], responses))))
        assert isinstance(order, Learn)
        [got] = shares_of(order, lambda media: {draw: prepared[draw].inputs for draw in media}, heard.update)
        ours, theirs = composer.lay_out(share), composer.lay_out(got)
        assert here(ours) == here(theirs) and len(ours.batches) == len(theirs.batches) > 0
        assert jax.tree.structure(ours.batches) == jax.tree.structure(theirs.batches)
        for a, b in zip(jax.tree.leaves(ours.batches), jax.tree.leaves(theirs.batches), strict=True):
            assert a == b if isinstance(a, ShadowTensor) else np.array_equal(a, b)
        np.testing.assert_array_equal(ours.cells, theirs.cells)
    assert heard and all(place == f"place of {ticket}" and "/" in ticket for ticket, place in heard.items())


def test_pixels_that_no_store_holds_go_to_no_other_process():
    groups, prepared, _ = random_episodes(4)
    share = Composer(config_of(FSDP), 2, MODEL.vision, MODEL.text).outline(groups, prepared)
    with pytest.raises(ConfigError, match=r"set data\.loader=shadow"):
        told(share)
