"""A packed step is the same step: loss and gradients of the real model equal those of every response alone.

Float32, the tiny Qwen2.5-VL of `packing_cases`, groups with images, videos, both, and neither.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_cases import assert_close
from packing_cases import MODEL, compose, make_config, make_groups

import models
from fluxjax.algorithms import grpo
from fluxjax.base.types import TrainBatch
from fluxjax.batch.composition import unpack
from fluxjax.config import AlgorithmConfig, LossAggregation
from fluxjax.learner.loss_inputs import with_logprobs
from models.decoder import logprobs
from models.inputs import PackedTokens, concatenate, pad
from sharding.walk import Walk

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5  # float32; of the largest gradient of each weight, and of the loss
CFG = AlgorithmConfig(kl_coefficient=0.2)
CONTENTS = [
    [3, (1, 4, 4), 2],  # image
    [2, (2, 4, 2), 4],  # video
    [7],  # text
    [1, (1, 2, 2), 2, (3, 2, 2), 1],  # image and video
    [4, (1, 6, 4), (1, 2, 2)],  # two images; the group is larger than a row
]
LENGTHS = [[3, 8, 1, 5], [4, 4, 9], [6, 2, 7, 7, 1], [5, 0, 3], [9, 8, 9, 9, 6]]
ALONE_TOKENS, ALONE_PATCHES = 32, 32  # one shape for all responses alone


def limits(share=True):
    """Buffers so small that every composition has several microbatches, and few shapes are compiled in all."""
    return make_config(tokens_per_row=48, rows=2, patches=96, share=share)


@pytest.fixture(scope="module")
def policy():
    """The model with weights so large that attention is far from uniform, and what masks it wrongly shows."""
    assert MODEL.vision is not None
    wide = dataclasses.replace(
        MODEL,
        text=dataclasses.replace(MODEL.text, initializer_range=0.15),
        vision=dataclasses.replace(MODEL.vision, initializer_range=0.15),
    )
    return models.split(models.create(wide, seed=3))


@functools.cache
def compiled(graphdef):
    def loss(params, batch):
        logprobs_BT, entropies_BT = logprobs(models.merge(graphdef, params), batch.inputs, Walk())
        loss_BT, _ = grpo.token_loss(logprobs_BT, entropies_BT, batch, CFG)
        return jnp.sum(batch.loss_weights_BT * loss_BT), (logprobs_BT, entropies_BT)

    # The program is the same; LLVM's optimiser would take most of the time of these tests.
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=options)


def run(policy, batches):
    """Loss and gradients summed over the batches, and (log-probs, entropies) of each."""
    graphdef, params = policy
    total, gradients, outputs = 0.0, None, []
    for batch in batches:
        (loss, output), gradient = compiled(graphdef)(params, jax.tree.map(jnp.asarray, batch))
        total += float(loss)
        gradients = gradient if gradients is None else jax.tree.map(jnp.add, gradients, gradient)
        outputs.append(output)
    return total, gradients, outputs


def alone(group, sample, prompt, weight, reference):
    """One response behind its prompt in a batch of its own: built here, without the composer."""
    response = sample.response
    P, G = len(prompt), len(response.token_ids)

    def row(values, dtype, fill=0):
        values = np.asarray(values, dtype)
        width = [(0, 0)] * (values.ndim - 1) + [(0, ALONE_TOKENS - P - G)]
        return np.expand_dims(np.pad(values, width, constant_values=fill), -2)

    def answer(values, fill=0.0):
        return row([fill] * P + list(values), np.float32)

    generated = np.tile(prompt.next_position + np.arange(G), (3, 1))
    inputs = PackedTokens(
        tokens_BT=row([*prompt.token_ids_T, *response.token_ids], np.int32),
        segments_BT=row([1] * (P + G), np.int32),
        branches_BT=row([0] * (P + G), np.int32),
        positions_3BT=row(np.concatenate([prompt.positions_3T, generated], axis=1), np.int32),
        predecessor_BT=np.maximum(np.arange(ALONE_TOKENS, dtype=np.int32) - 1, 0)[None],
        feature_index_BT=row([*prompt.feature_index_T, *[-1] * G], np.int32, -1),
        # One bound for all, since each other one is compiled anew; text goes without the tower.
        vision=prompt.vision and dataclasses.replace(pad(prompt.vision, ALONE_PATCHES), frame_bound=ALONE_PATCHES),
    )
    return TrainBatch(
        inputs,
        loss_weights_BT=answer([weight] * G),
        advantages_BT=answer([sample.advantage] * G),
        behaviour_logprobs_BT=answer(response.logprobs),
        reference_logprobs_BT=answer(reference),
        response_log_ratios_BT=answer(np.zeros(G)),
        lags_BT=row([-1] * P + [8 - version for version in response.versions], np.int32, -1),
    )


def weight_of(aggregation, length, max_new_tokens):
    lengths = [n for sizes in LENGTHS for n in sizes]
    return {
        LossAggregation.TOKEN_MEAN: 1 / sum(lengths),
        LossAggregation.SEQUENCE_MEAN: 1 / (length * sum(n > 0 for n in lengths)),
        LossAggregation.CONSTANT: 1 / (len(lengths) * max_new_tokens),
    }[aggregation]


@pytest.fixture(scope="module")
def case(policy):
    """Groups whose behaviour log-probs lie near the policy's, so that some ratios are clipped and some are not; with
    log-probs of a reference."""
    groups, prepared = make_groups(CONTENTS, LENGTHS, seed=5)
    composition = compose(groups, prepared, limits(), vision=MODEL.vision)
    own = unpack(composition, [output[0] for output in run(policy, composition.batches)[2]])
    rng = np.random.default_rng(0)
    near = []
    for group in groups:
        samples = []
        for sample in group.samples:
            values = own.get((sample.response.draw, sample.response.sample), np.zeros(0))
            noisy = tuple((values + rng.uniform(-0.4, 0.4, len(values))).astype(np.float32).tolist())
            samples.append(dataclasses.replace(sample, response=dataclasses.replace(sample.response, logprobs=noisy)))
        near.append(dataclasses.replace(group, samples=tuple(samples)))
    references = {key: (v + rng.uniform(-0.4, 0.4, len(v))).astype(np.float32) for key, v in own.items()}
    return near, prepared, references


def alone_results(policy, case, aggregation):
    groups, prepared, references = case
    batches, keys = [], []
    for group in groups:
        for sample in group.samples:
            response = sample.response
            if response.token_ids:
                weight = weight_of(aggregation, len(response.token_ids), limits().rollout.max_new_tokens)
                key = (response.draw, response.sample)
                prompt = prepared[response.draw].inputs
                batches.append(alone(group, sample, prompt, weight, references[key]))
                keys.append((key, len(prompt), len(response.token_ids)))
    total, gradients, outputs = run(policy, batches)
    per_token = {
        key: tuple(np.asarray(values)[0, start : start + length] for values in output)
        for (key, start, length), output in zip(keys, outputs, strict=True)
    }
    return total, gradients, per_token


def fill_reference(composition, references):
    return with_logprobs(
        composition,
        "reference_logprobs_BT",
        composition.scattered(np.concatenate([references[k] for k in composition.keys])),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("aggregation", "share"),
    [(LossAggregation.TOKEN_MEAN, True), (LossAggregation.SEQUENCE_MEAN, False), (LossAggregation.CONSTANT, True)],
)
def test_packed_equals_alone(policy, case, aggregation, share):
    groups, prepared, references = case
    config = limits(share)
    config.algorithm.loss_aggregation = aggregation
    composition = fill_reference(compose(groups, prepared, config, vision=MODEL.vision), references)
    assert len(composition.batches) > 1
    expected_loss, expected_gradients, per_token = alone_results(policy, case, aggregation)
    loss, gradients, outputs = run(policy, composition.batches)
    assert abs(loss - expected_loss) < TOLERANCE * max(1.0, abs(expected_loss))
    assert_close(gradients, expected_gradients, TOLERANCE, least=1e-3)
    for place, name in enumerate(("logprobs", "entropies")):
        for key, values in unpack(composition, [output[place] for output in outputs]).items():
            np.testing.assert_allclose(values, per_token[key][place], atol=TOLERANCE, err_msg=f"{name} {key}")


def test_packing_padding_and_neighbours_do_not_leak(policy, case):
    """Other pixels and tokens in one group leave every other group's log-probs as they are, bit for bit."""
    groups, prepared, _ = case
    composition = compose(groups, prepared, limits(), vision=MODEL.vision)
    victim = groups[0].prompt.draw
    changed = dict(prepared)
    inputs = prepared[victim].inputs
    pixels = dataclasses.replace(concatenate([inputs.vision]), patches_PX=-inputs.vision.patches_PX)
    tokens = np.where(inputs.feature_index_T < 0, (inputs.token_ids_T + 1) % 60, inputs.token_ids_T).astype(np.int32)
    changed[victim] = dataclasses.replace(
        prepared[victim], inputs=dataclasses.replace(inputs, token_ids_T=tokens, vision=pixels)
    )
    other = compose(groups, changed, limits(), vision=MODEL.vision)
    before = unpack(composition, [output[0] for output in run(policy, composition.batches)[2]])
    after = unpack(other, [output[0] for output in run(policy, other.batches)[2]])
    for key, values in before.items():
        if key[0] == victim:
            assert np.abs(values - after[key]).max() > 1e-3
        else:
            np.testing.assert_array_equal(values, after[key])
