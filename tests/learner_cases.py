"""Random groups, tiny models and their learners, and what two ways of computing the same must have in common."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from packing_cases import MODEL, Content, compose, make_config, make_groups

import models
from fluxjax.algorithms import grpo
from fluxjax.batch.composition import unpack
from fluxjax.learner.learner import Learner
from sharding.mesh import make_mesh

MEDIA = [(1, 4, 4), (1, 8, 4), (2, 4, 8), (3, 4, 4)]
TOLERANCE = 1e-5  # float32, of the largest magnitude in each array


@functools.cache
def tiny(heads: tuple[int, int] | None = None, config=MODEL):
    """A model with weights large enough that attention is not uniform: then every gradient is well above rounding."""
    if heads is not None:
        text = dataclasses.replace(config.text, num_heads=heads[0], num_kv_heads=heads[1])
        config = dataclasses.replace(config, text=text)
    graphdef, params = models.split(models.create(config, seed=1))
    rng = np.random.default_rng(2)
    noise = lambda w: jnp.asarray(np.asarray(w) + 0.1 * rng.normal(size=w.shape).astype(np.float32))  # noqa: E731
    return models.merge(graphdef, jax.tree.map(noise, params))


@functools.cache
def learner(heads: tuple[int, int], devices: int, model=MODEL) -> Learner:
    return Learner(make_config(), tiny(heads, model), grpo.token_loss, mesh=make_mesh(devices))


def random_groups(seed: int):
    """One to seven groups of very different lengths, with text, images and videos in any order."""
    rng = np.random.default_rng(seed)
    contents: list[Content] = []
    lengths: list[list[int]] = []
    for _ in range(rng.integers(1, 8)):
        media = [MEDIA[i] for i in rng.integers(0, len(MEDIA), rng.integers(0, 3))]
        content: Content = [int(rng.integers(1, 20))]
        for grid in media:
            content += [grid, int(rng.integers(1, 6))]
        contents.append(content)
        lengths.append(rng.integers(1, 10, rng.integers(1, 4)).tolist())
    return make_groups(contents, lengths, seed)


def outcome(learner: Learner, composition):
    grads, tally = learner.accumulate(composition.microbatches)
    scores = learner.gradients.scores(learner.params, composition.microbatches)
    return tally, jax.tree.map(np.asarray, grads), unpack(composition, [one[0] for one in scores if one is not None])


def assert_close(got, want, relative=TOLERANCE, least=1e-30) -> None:
    """Every leaf to `relative` of its largest magnitude."""

    def close(path, a, b) -> None:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = np.abs(b).max(initial=least)
        np.testing.assert_allclose(a, b, rtol=0, atol=relative * scale, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(close, got, want)


def assert_equal(got, want) -> None:
    (tally, grads, scores), (want_tally, want_grads, want_scores) = got, want
    # Tallies are sums over tokens of terms of about one and either sign, which may cancel.
    assert_close(tally.sums, want_tally.sums, least=1.0)
    assert_close(grads, want_grads)
    assert scores.keys() == want_scores.keys()
    for key in scores:
        np.testing.assert_allclose(scores[key], want_scores[key], atol=TOLERANCE * 5, rtol=0)  # nats, of about 5


def alone(heads, groups, prepared, model=MODEL):
    config = make_config(tokens_per_row=128, rows=32, patches=2048)
    composition = compose(groups, prepared, config, vision=MODEL.vision, text=model.text)
    return outcome(learner(heads, 1, model), composition)


@functools.cache
def alone_of(heads: tuple[int, int], seed: int, model=MODEL):
    """What one device computes of random groups."""
    return alone(heads, *random_groups(seed), model)
