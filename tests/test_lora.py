"""LoRA in training: what adapters make of weights, under every strategy, for the optimizer, checkpoints and engines."""

import asyncio
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import save
from flax.traverse_util import flatten_dict, unflatten_dict
from learner_cases import assert_close, assert_equal, outcome
from packing_cases import TEXT, answered, compose, make_config, make_groups, model_input
from test_learner import CONFIGS, gradients, microbatches_for, tiny
from turns import by_turns

import models
from fluxjax.algorithms import ALGORITHMS, grpo
from fluxjax.base.types import PreparedPrompt, Prompt
from fluxjax.batch.composition import unpack
from fluxjax.config import ODC, Config, ConfigError, DType, FlexUlysses, Remat, Ulysses
from fluxjax.config.learning import DELTA_TARGETS, LORA_TARGETS
from fluxjax.learner.learner import Learner, fingerprint
from fluxjax.learner.run_models import RunModels, first_reference
from fluxjax.run.checkpoint import Checkpoints
from models.lora import PROJECTIONS
from rollout.engine import GenerateRequest, SamplingParams
from rollout.jax_engine import JaxEngine
from sharding.mesh import make_mesh

RANK, ALPHA = 3, 6.0  # no number of devices divides this rank
DEVICES = 4


def adapted(config: Config, targets=LORA_TARGETS) -> Config:
    config.steps = 10
    config.lora.rank, config.lora.alpha, config.lora.targets = RANK, ALPHA, targets
    config.optim.eps, config.optim.lr, config.optim.weight_decay = 1e-2, 1e-2, 0.1
    return config


def learner_of(kind, config, devices=1) -> Learner:
    """A learner whose adapters have been trained: their product is not zero."""
    learner = Learner(config, tiny(kind), grpo.token_loss, mesh=make_mesh(devices))
    rng = np.random.default_rng(3)

    def moved(adapter):
        return np.asarray(adapter) + 0.1 * rng.normal(size=adapter.shape).astype(np.float32)

    own = jax.tree.map(moved, learner.trained(learner.params))
    learner.params = learner.with_trained(learner.gradients.strategy.shard_trained(own))
    return learner


def frozen_of(learner):
    return jax.tree.map(np.array, learner.gradients.strategy.frozen(learner.params))


def merged(base, own):
    """`w + alpha / rank * a @ b` written out once more, of flat dictionaries."""
    weights = dict(base)
    for *parents, name in base:
        if (a := own.get((*parents, f"{name}_lora_a"))) is not None:
            b, weight = own[(*parents, f"{name}_lora_b")], base[(*parents, name)]
            product = jnp.einsum("lir,lro->lio", a.reshape(len(a), -1, RANK), b.reshape(len(b), RANK, -1))
            weights[(*parents, name)] = weight + ALPHA / RANK * product.reshape(weight.shape)
    return weights


def targets_of(kind):
    return (*LORA_TARGETS, *DELTA_TARGETS) if CONFIGS[kind].text.delta else LORA_TARGETS


@functools.cache
def alone(seed, kind, rank):
    config = adapted(make_config(tokens_per_row=128, rows=32), targets_of(kind))
    config.lora.rank = rank
    learner = learner_of(kind, config)
    composition = compose(*text_groups(seed), learner.config, text=CONFIGS[kind].text)
    return outcome(learner, composition)


def text_groups(seed):
    rng = np.random.default_rng(seed)
    lengths = [rng.integers(1, 10, 2).tolist() for _ in range(5)]
    return make_groups([[int(n)] for n in rng.integers(1, 20, 5)], lengths, seed)


def test_the_settings_name_the_projections_of_a_layer():
    assert PROJECTIONS == LORA_TARGETS


@pytest.mark.medium
def test_new_adapters_change_nothing():
    inputs = microbatches_for("text", make_config(rows=8))[0].batch.inputs
    learner = Learner(adapted(make_config(rows=8)), tiny("text"), grpo.token_loss, mesh=make_mesh(1))
    plain = Learner(make_config(rows=8), tiny("text"), grpo.token_loss, mesh=make_mesh(1))
    for got, want in zip(learner.logprobs(inputs), plain.logprobs(inputs), strict=True):
        np.testing.assert_array_equal(got, want)
    jax.tree.map(np.testing.assert_array_equal, learner.weights(), plain.params)
    a = np.asarray(flatten_dict(learner.params)["layers", "attention", "o_lora_a"])
    bound = 1 / np.sqrt(np.prod(a.shape[1:3]))  # PEFT: Kaiming's uniform distribution with a slope of sqrt(5)
    assert 0.9 * bound < np.abs(a).max() <= bound and abs(a.mean()) < 0.1 * bound


@pytest.mark.slow
def test_gradients_are_those_of_the_weights_that_adapters_make():
    """By the chain rule, from gradients of a model without adapters that has the merged weights."""
    config = adapted(make_config(rows=8))
    learner, batches = learner_of("text", config), microbatches_for("text", config)
    loss, grads = gradients(learner, batches)
    plain = Learner(make_config(rows=8), tiny("text"), grpo.token_loss, mesh=make_mesh(1))
    own, base = flatten_dict(learner.trained(learner.params)), flatten_dict(plain.params)
    weights, pull = jax.vjp(functools.partial(merged, base), own)
    plain.params = unflatten_dict(weights)
    assert_close(learner.weights(), plain.params, 1e-6)
    want_loss, of_weights = gradients(plain, batches)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    [want] = pull(jax.tree.map(jnp.asarray, flatten_dict(of_weights)))
    assert_close(flatten_dict(grads), want)
    assert len(want) == 2 * len(LORA_TARGETS) and all(np.abs(x).max() > 1e-4 for x in want.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "kind", "rank"),
    by_turns(
        [
            (FlexUlysses(), "text", RANK),
            (ODC(), "text", RANK),
            (FlexUlysses(), "qwen3", 0),
            (ODC(), "qwen3", RANK),
            (ODC(), "qwen3", 0),
            (ODC(), "qwen3_5_text", RANK),
            (ODC(), "qwen3_5_text", 0),
            (FlexUlysses(), "qwen3_5_text", RANK),
            (Ulysses(max_degree=2), "qwen3_5_text", 0),
        ]
    ),
)
def test_every_strategy_equals_one_device(strategy, kind, rank):
    """`test_any_number_of_devices_equals_one` has FSDP, `test_spread_equivalence` fixed degrees."""
    config = adapted(make_config(tokens_per_row=64, rows=4), targets_of(kind))
    config.sharding.strategy, config.lora.rank = strategy, rank
    composition = compose(*text_groups(7), config, DEVICES, text=CONFIGS[kind].text)
    assert_equal(outcome(learner_of(kind, config, DEVICES), composition), alone(7, kind, rank))


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "remat"), by_turns([(8, "none"), (3, "layer")], first=2))
def test_any_number_of_devices_equals_one(devices, remat):
    """Weights that a mesh can't cut, or only in part, and a vision tower, which has no adapters."""
    config = adapted(make_config(rows=2))
    config.sharding.remat = Remat(remat)
    want = learner_of("vision", adapted(make_config(rows=8)))
    got = learner_of("vision", config, devices)
    many, all_at_once = (microbatches_for("vision", c, n) for c, n in ((config, devices), (want.config, 1)))
    assert_close(gradients(got, many), gradients(want, all_at_once))
    for learner, batches in ((got, many), (want, all_at_once)):
        learner.step(batches)
    assert_close(got.weights(), want.weights())
    assert got.weights()["layers"]["mlp"]["down"].sharding == got.params["layers"]["mlp"]["down"].sharding


@pytest.mark.medium
def test_only_adapters_are_trained():
    """Frozen weights stay bit for bit, and the very arrays; gradients and moments are those of adapters."""
    config = adapted(make_config(rows=8), targets=("q_proj", "down_proj"))
    learner = learner_of("text", config, 2)
    before, arrays = frozen_of(learner), flatten_dict(learner.params)
    own = jax.tree.map(np.array, learner.trained(learner.params))
    adapted_paths = ("layers", "attention", "q"), ("layers", "mlp", "down")
    names = {(*path[:-1], f"{path[-1]}_lora_{part}") for path in adapted_paths for part in "ab"}
    assert set(flatten_dict(own)) == names == set(flatten_dict(learner.opt_state[1].mu))
    for _ in range(2):
        assert learner.step(microbatches_for("text", config, 2))["grad_norm"] > 0
    jax.tree.map(np.testing.assert_array_equal, frozen_of(learner), before)
    after = flatten_dict(learner.params)
    assert all(after[path] is arrays[path] for path in flatten_dict(before))
    assert all(np.abs(np.asarray(after[path]) - value).max() > 1e-4 for path, value in flatten_dict(own).items())


@pytest.mark.slow
def test_a_checkpoint_has_adapters_only_and_goes_on_bit_for_bit(tmp_path):
    config = adapted(make_config(rows=8))
    config.algorithm.kl_coefficient = 0.1

    def steps(learner, seeds):
        for seed in seeds:
            learner.step(microbatches_for("text", config, 2, seed))
        return jax.tree.map(np.asarray, (learner.params, learner.opt_state))

    first = learner_of("text", config, 2)
    reference = first_reference(config, first)  # adapters as they are now
    assert flatten_dict(reference)["layers", "mlp", "up"] is flatten_dict(first.params)["layers", "mlp", "up"]
    steps(first, [0])
    arrays = RunModels(config, ALGORITHMS["grpo"], first, reference=reference).arrays()
    stored = sum(x.nbytes for x in jax.tree.leaves(arrays))
    adapters = sum(x.nbytes for x in jax.tree.leaves(first.trained(first.params)))
    assert stored < 4 * adapters + 1000, "adapters, those of the reference, two moments"
    with_checkpoints = Checkpoints(tmp_path, 1)
    save(with_checkpoints, 1, arrays, {})
    with_checkpoints.wait()
    want = steps(first, [1, 2])

    again = Learner(config, tiny("text"), grpo.token_loss, mesh=make_mesh(2))
    frozen = frozen_of(again)
    run_models = RunModels(config, ALGORITHMS["grpo"], again)
    _, arrays, _ = with_checkpoints.restore(run_models.abstract(), make_room=run_models.forget)
    run_models.load(arrays, config.steps)
    jax.tree.map(np.testing.assert_array_equal, run_models.reference, reference)
    jax.tree.map(np.testing.assert_array_equal, steps(again, [1, 2]), want)
    jax.tree.map(np.testing.assert_array_equal, frozen_of(again), frozen)

    graphdef, params = models.split(tiny("text"))
    other = params | {"norm": {"scale": params["norm"]["scale"].at[3].add(1e-6)}}
    another = Learner(config, models.merge(graphdef, other), grpo.token_loss, mesh=make_mesh(2))
    _, arrays, _ = with_checkpoints.restore(RunModels(config, ALGORITHMS["grpo"], another).abstract())
    with_checkpoints.close()
    with pytest.raises(ConfigError, match="other weights"):
        another.load_state(arrays["learner"])


def test_frozen_weights_are_recognised_by_every_bit_and_place():
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(3, 4, 5)).astype(np.float32)
    one, two = (np.asarray(fingerprint({"w": jnp.asarray(weight)}, make_mesh(n))) for n in (1, 8))
    np.testing.assert_array_equal(one, two)
    bits = weight.view(np.uint32).copy()
    bits[2, 1, 3] ^= 1
    swapped = weight.copy()
    swapped[0, 1], swapped[1, 0] = weight[1, 0], weight[0, 1]
    for other in (bits.view(np.float32), swapped):
        assert np.asarray(fingerprint({"w": jnp.asarray(other)}, make_mesh(1))) != one


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.value)
def test_an_engine_with_merged_weights_samples_from_the_trainers_policy(dtype):
    """Float32: to rounding. Bfloat16: as near as without adapters, for both compute with the same rounded weights."""
    gaps = {}
    for rank in (0, RANK):
        config = adapted(make_config(rows=8))
        config.lora.rank, config.model.compute_dtype = rank, dtype
        plain = Learner(config, tiny("text"), grpo.token_loss, mesh=make_mesh(2))
        learner = learner_of("text", config, 2) if rank else plain
        inputs = model_input([6], np.random.default_rng(1))
        record = Prompt("one", "test", "?", "!", draw=5)

        async def answers(learner=learner, inputs=inputs, dtype=dtype):
            engine = JaxEngine(models.abstract(TEXT), slots=4, max_sequence_tokens=48, compute_dtype=dtype.value)
            await engine.update_weights(1, learner.weights())
            request = GenerateRequest("one", inputs, SamplingParams(max_new_tokens=12, temperature=1.0), 4, 0)
            ids, logprobs = {k: [] for k in range(4)}, {k: [] for k in range(4)}
            async for chunk in engine.generate(request):
                ids[chunk.sample] += chunk.token_ids
                logprobs[chunk.sample] += chunk.logprobs
            await engine.close()
            return ids, logprobs

        ids, logprobs = asyncio.run(asyncio.wait_for(answers(), 120))
        group = answered(record, [(ids[k], logprobs[k]) for k in ids], version=1)
        composition = compose([group], {5: PreparedPrompt(record, inputs)}, config, 2)
        scores = learner.gradients.scores(learner.params, composition.microbatches)
        found = unpack(composition, [np.asarray(one[0]) for one in scores if one is not None])
        gaps[rank] = max(np.abs(found[5, k] - np.array(logprobs[k])).max() for k in ids)
        if rank and dtype is DType.FLOAT32:
            others = plain.gradients.scores(plain.params, composition.microbatches)
            unadapted = unpack(composition, [np.asarray(one[0]) for one in others if one is not None])
            assert np.abs(unadapted[5, 0] - found[5, 0]).max() > 0.05, "the adapters do nothing"
    if dtype is DType.FLOAT32:
        assert gaps[RANK] < 1e-4
    else:
        assert gaps[RANK] < 3 * gaps[0] + 1e-2


@pytest.mark.slow
def test_gradients_of_lent_devices_come_back():
    config = adapted(make_config(rows=8))
    learner = learner_of("text", config, 2)
    want, _ = learner.accumulate(microbatches_for("text", config, 2))
    lent = learner.gradients.on(jax.devices()[2:3])
    outcome = lent.accumulate(lent.strategy.shard(learner.params), microbatches_for("text", config))
    got, _ = learner.gradients.bring(outcome)
    assert_close(got, want)
    places, wanted = (jax.tree.map(lambda x: x.sharding, tree) for tree in (got, learner.trained(learner.params)))
    assert places == wanted
