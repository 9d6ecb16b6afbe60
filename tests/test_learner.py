"""The learner on tiny real models: any number of devices as one, precision, rematerialisation, metrics, state."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import learner_cases
import numpy as np
import optax
import pytest
from checkpoint_cases import save
from jax.sharding import PartitionSpec as P
from learner_cases import assert_close
from packing_cases import MODEL, QWEN3, QWEN3_5, QWEN3_VL, TEXT, compose, make_config, make_groups
from turns import by_turns

import models
from fluxjax.algorithms import grpo, sft
from fluxjax.batch.composition import Microbatch
from fluxjax.config import DType, OptimConfig, Remat, Schedule
from fluxjax.learner.learner import GAP, Learner, learning_rate
from fluxjax.run.checkpoint import Checkpoints
from models.config import DecoderConfig
from models.decoder import logprobs as forward_logprobs
from sharding.kernels.runs import CHUNK
from sharding.mesh import make_mesh
from sharding.walk import REMAT, Walk
from sharding.weights import like

CONTENTS = {
    # text; an image; text of another length; a video and an image; ... : groups of uneven cost
    "vision": [[5], [3, (1, 4, 4), 2], [9], [2, (2, 4, 8), 3, (1, 4, 4), 1], [4], [1, (1, 8, 4), 1]],
    "text": [[5], [9], [4], [12], [3], [7]],
}
CONFIGS = {"vision": MODEL, "text": TEXT, "qwen3": QWEN3, "qwen3_vl": QWEN3_VL, "qwen3_5": QWEN3_5}
CONFIGS["qwen3_5_text"] = dataclasses.replace(QWEN3_5, architecture="qwen3_5_text", vision=None)
LENGTHS = [[3, 1, 6], [4, 4], [2, 5, 7, 1], [6, 3], [8], [1, 2, 3]]


def tiny(kind):
    return learner_cases.tiny(None, CONFIGS[kind])


def config_for(rows=8, **optim):
    config = make_config(rows=rows)
    config.steps = 10
    for name, value in optim.items():
        setattr(config.optim, name, value)
    return config


def microbatches_for(kind, config, num_shards=1, seed=0):
    vision, text = CONFIGS[kind].vision, CONFIGS[kind].text
    groups, prepared = make_groups(CONTENTS["vision" if vision else "text"], LENGTHS, seed)
    return compose(groups, prepared, config, num_shards, vision=vision, text=text).microbatches


def plain_logprobs(model, inputs, temperature=1.0):
    """What the learner should compute, without it."""
    graphdef, params = models.split(model)
    plain = jax.jit(lambda p, x: forward_logprobs(models.merge(graphdef, p), x, Walk(), temperature=temperature))
    return plain(params, inputs)


def gradients(learner, batches):
    """Loss and gradients of a step, by the programs of the step itself."""
    grads, tally = learner.accumulate(batches)
    return np.asarray(tally.sums["loss"]), jax.tree.map(np.asarray, grads)


# Adam divides by the root of the second moment, which turns rounding of near-zero gradients into whole steps.
# A large epsilon keeps parameters comparable after several steps.
SMOOTH: dict[str, Any] = {"eps": 1e-2, "lr": 1e-2, "weight_decay": 0.1}


@functools.cache
def on_one_device(kind):
    config = config_for(**SMOOTH)
    learner = Learner(config, tiny(kind), grpo.token_loss, mesh=make_mesh(1))
    first = gradients(learner, microbatches_for(kind, config))
    metrics = [learner.step(microbatches_for(kind, config, seed=seed)) for seed in range(3)]
    return first, metrics, learner.params


@pytest.fixture
def unwritten():
    """`unwritten()`: no program is written to disk until the test has ended."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    yield functools.partial(jax.config.update, name, math.inf)
    jax.config.update(name, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "devices", "remat"),
    by_turns(
        [
            ("vision", 3, "layer"),
            ("text", 2, "dots"),
            ("vision", 8, "none"),
            ("text", 6, "offload"),
            ("qwen3_vl", 3, "layer"),
            ("qwen3_5", 2, "layer"),
            ("qwen3_5", 3, "dots"),
            ("qwen3_5", 4, "none"),
        ]
    ),
)
def test_any_number_of_devices_equals_one(kind, devices, remat, unwritten):
    """Packed for that many devices, with other rows, padding and microbatches than on one, whatever is computed
    again."""
    if remat == "offload":  # XLA's CPU programs with host memory wait for each other's collectives once read from disk
        unwritten()
    want, want_metrics, want_params = on_one_device(kind)
    config = config_for(rows=1 if devices == 2 else 2, **SMOOTH)
    config.sharding.remat = Remat(remat)
    learner = Learner(config, tiny(kind), grpo.token_loss, mesh=make_mesh(devices))
    batches = microbatches_for(kind, config, devices)
    assert len(batches) > 1 or devices > 2, "microbatches add up"
    assert_close(gradients(learner, batches), want)
    for seed in range(3):
        metrics = learner.step(microbatches_for(kind, config, devices, seed))
        assert metrics == pytest.approx(want_metrics[seed], rel=1e-4, abs=1e-6)
    assert_close(learner.params, want_params)
    layout = learner.gradients.strategy.shardings
    for tree in (learner.params, learner.opt_state[1].mu, learner.opt_state[1].nu):
        assert jax.tree.map(lambda leaf: leaf.sharding, tree) == layout


@pytest.mark.slow
def test_losses_and_gradients_do_not_depend_on_the_size_of_chunks():
    batch = microbatches_for("qwen3_5_text", config_for())[0].batch
    graphdef, params = models.split(tiny("qwen3_5_text"))

    @jax.jit
    def loss(params, inputs):
        logprobs, _ = forward_logprobs(models.merge(graphdef, params), inputs, Walk())
        return jnp.sum(logprobs * batch.loss_weights_BT)

    assert batch.inputs.runs.columns_BNC.shape[2] == 8
    sizes = (batch.inputs, batch.inputs.with_runs(size=CHUNK))
    short, long = (jax.value_and_grad(loss)(params, inputs) for inputs in sizes)
    assert_close(short, long)


@pytest.mark.medium
def test_state_is_spread_over_the_devices():
    learner = Learner(config_for(), tiny("text"), grpo.token_loss)
    assert learner.mesh.size == 8
    table = learner.params["embedding"]["table"]
    assert table.sharding.spec == P(("s2", "s1", "s0"))
    assert table.addressable_shards[0].data.size * 8 == table.size


@pytest.mark.long
def test_a_scan_over_layers_equals_layers_written_out():
    """Short stacks are written out, long ones scanned, with or without rematerialisation: two layers of the tower and
    two behind it, all ways."""
    batch = microbatches_for("vision", config_for())[0].batch
    graphdef, params = models.split(tiny("vision"))

    def loss(walk, params):
        logprobs, _ = forward_logprobs(models.merge(graphdef, params), batch.inputs, walk)
        return jnp.sum(logprobs * batch.loss_weights_BT)

    def run(walk):
        return jax.jit(jax.value_and_grad(functools.partial(loss, walk)))(params)

    scanned = run(Walk(unroll=0))
    assert_close(run(Walk()), scanned)
    for remat in REMAT.keys() - {"none"}:
        assert_close(run(Walk(remat=remat, unroll=0)), scanned, 1e-6)  # the same scan, computed again


@pytest.mark.long
def test_bfloat16_compute_with_float32_masters():
    devices = 8
    config = config_for(rows=2, **SMOOTH)
    config.model.compute_dtype = DType.BFLOAT16
    learner = Learner(config, tiny("vision"), grpo.token_loss, mesh=make_mesh(devices))
    batches = microbatches_for("vision", config, devices)
    metrics = learner.step(batches)
    _, want, _ = on_one_device("vision")
    assert {leaf.dtype for leaf in jax.tree.leaves(learner.params)} == {jnp.dtype(jnp.float32)}
    assert metrics["entropy"] == pytest.approx(want[0]["entropy"], rel=0.02)
    assert metrics["grad_norm"] == pytest.approx(want[0]["grad_norm"], rel=0.05)
    assert metrics["grad_norm"] != pytest.approx(want[0]["grad_norm"], rel=1e-5)  # it was another precision


@pytest.mark.slow
def test_metrics_against_numpy():
    """Everything reported about one step, recomputed from the log-probs of a plain forward pass."""
    config = config_for(lr=0.25, weight_decay=0.0, max_grad_norm=0.5)
    model = tiny("text")
    learner = Learner(config, model, grpo.token_loss, mesh=make_mesh(1))
    batches = microbatches_for("text", config)
    _, grads = gradients(learner, batches)
    metrics = learner.step(batches)

    gaps, entropies, loss = [], [], 0.0
    for batch in jax.tree.map(jnp.asarray, [microbatch.batch for microbatch in batches]):
        logprobs, entropy = (np.asarray(x) for x in plain_logprobs(model, batch.inputs))
        trained = batch.loss_weights_BT != 0
        token_loss, _ = grpo.token_loss(jnp.asarray(logprobs), jnp.asarray(entropy), batch, config.algorithm)
        loss += float((batch.loss_weights_BT * token_loss).sum())
        fresh = trained & (np.asarray(batch.lags_BT) == 0)
        gaps += np.abs(logprobs - np.asarray(batch.behaviour_logprobs_BT))[fresh].tolist()
        entropies += entropy[trained].tolist()
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["trained_tokens"] == sum(map(sum, LENGTHS)) > len(gaps) > 0, "the gap is of these weights' tokens"
    assert metrics[GAP] == pytest.approx(np.mean(gaps), rel=1e-5)
    assert metrics[f"{GAP}_max"] == pytest.approx(np.max(gaps), rel=1e-5)
    assert metrics["entropy"] == pytest.approx(np.mean(entropies), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(float(optax.tree_utils.tree_norm(grads)), rel=1e-5)
    assert metrics["lr"] == 0.25
    assert metrics["skipped_nonfinite"] == 0
    assert "clip_fraction" in metrics
    assert all(type(value) is float for value in metrics.values())


@pytest.mark.medium
@pytest.mark.parametrize("most", [0.5, 0.0])
def test_a_step_is_clipped_adamw(most):
    """The update of one step against the formula of Adam's first step: `lr * g / (|g| + eps) + lr * decay * w`, without
    decay for norms and biases. A largest norm of 0 clips nothing."""
    config = config_for(lr=0.1, eps=0.01, weight_decay=0.3, max_grad_norm=most)
    learner = Learner(config, tiny("text"), grpo.token_loss, mesh=make_mesh(1))
    served = learner.params  # perhaps by an engine, which does not copy what lies as it needs it
    before = jax.tree.map(np.asarray, served)
    _, grads = gradients(learner, microbatches_for("text", config))
    norm = float(optax.tree_utils.tree_norm(grads))
    assert norm > 0.5
    learner.step(microbatches_for("text", config))
    assert not any(weight.is_deleted() for weight in jax.tree.leaves(served))

    matrices, vectors = {"q", "k", "v", "o", "gate", "up", "down", "table"}, {"q_bias", "k_bias", "v_bias", "scale"}
    assert {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(before)} == matrices | vectors

    def expected(path, weight, grad):
        grad = grad * (most / norm if most else 1.0)
        decay = 0.3 if path[-1].key in matrices else 0.0
        return weight - 0.1 * (grad / (np.abs(grad) + 0.01) + decay * weight)

    assert_close(learner.params, jax.tree_util.tree_map_with_path(expected, before, grads), 1e-5)


@pytest.mark.medium
def test_an_update_takes_place_in_the_arrays_that_it_replaces():
    """No second copy of moments or gradients while a step is made: XLA would hold both if it could."""
    config = config_for()
    wide = dataclasses.replace(TEXT.text, hidden_size=128, intermediate_size=256, vocab_size=1024)
    learner = Learner(config, models.abstract(DecoderConfig("qwen2", text=wide)), grpo.token_loss, mesh=make_mesh(1))
    update = learner.lowered(microbatches_for("text", config)[0].batch)["update"].compile().memory_analysis()
    weights = sum(4 * math.prod(x.shape) for x in jax.tree.leaves(learner.params))
    assert update.temp_size_in_bytes < 0.02 * weights
    assert update.output_size_in_bytes - update.alias_size_in_bytes < 0.02 * weights


@pytest.mark.long
def test_moments_in_bfloat16():
    """Half of the optimizer's memory, for an update that is that of float32 to the bits that are left."""
    config, half = config_for(rows=1, **SMOOTH), config_for(rows=1, **SMOOTH)
    half.optim.moments_dtype = DType.BFLOAT16
    exact, rounded = (Learner(c, tiny("text"), grpo.token_loss, mesh=make_mesh(2)) for c in (config, half))
    microbatches = microbatches_for("text", config, 2)
    before = jax.tree.map(np.asarray, exact.params)
    for _ in range(3):
        for learner in (exact, rounded):
            assert learner.step(microbatches)["skipped_nonfinite"] == 0
    sizes = [sum(x.nbytes for x in jax.tree.leaves(learner.opt_state)) for learner in (exact, rounded)]
    assert sizes[1] < 0.51 * sizes[0]
    moved = [jax.tree.map(lambda new, old: np.asarray(new) - old, one.params, before) for one in (exact, rounded)]
    assert_close(moved[1], moved[0], 0.05)  # 8 bits of mantissa, three steps
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(rounded.params))


@pytest.mark.slow
def test_gradients_that_are_not_finite_change_nothing():
    config = config_for()
    learner = Learner(config, tiny("text"), grpo.token_loss, mesh=make_mesh(2))
    good = microbatches_for("text", config, 2)
    learner.step(good)
    before = jax.tree.map(np.array, (learner.params, learner.opt_state))
    batch = good[0].batch
    poisoned = batch.behaviour_logprobs_BT.copy()
    poisoned[batch.loss_weights_BT != 0] = -np.inf  # an infinite importance ratio
    bad = dataclasses.replace(good[0], batch=dataclasses.replace(batch, behaviour_logprobs_BT=poisoned))
    metrics = learner.step([bad, *good[1:]])
    assert metrics["skipped_nonfinite"] == 1
    assert not np.isfinite(metrics["grad_norm"])
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, (learner.params, learner.opt_state)), before)
    assert learner.step(good)["skipped_nonfinite"] == 0
    assert learner.version == 3


@pytest.mark.slow
def test_parameters_handed_out_survive_later_steps():
    """Engines, references and checkpoints keep what they were given, the model its own weights."""
    model = tiny("text")
    config = config_for()
    learner = Learner(config, model, grpo.token_loss, mesh=make_mesh(1))
    held, held_values = learner.params, jax.tree.map(np.array, learner.params)
    for _ in range(2):
        learner.step(microbatches_for("text", config))
    jax.tree.map(np.testing.assert_array_equal, held, held_values)
    jax.tree.map(np.testing.assert_array_equal, models.split(model)[1], held_values)
    inputs = microbatches_for("text", config)[0].batch.inputs
    then = learner.logprobs(inputs, held)
    assert_close(then, plain_logprobs(model, inputs))
    assert np.abs(np.asarray(learner.logprobs(inputs)[0]) - np.asarray(then[0])).max() > 1e-3


@pytest.mark.slow
def test_logprobs_are_those_of_the_sampling_temperature():
    config = config_for()
    config.rollout.temperature = 0.5
    inputs = microbatches_for("text", config, 2)[0].batch.inputs
    learner = Learner(config, tiny("text"), grpo.token_loss, mesh=make_mesh(2))
    assert_close(learner.logprobs(inputs), plain_logprobs(tiny("text"), inputs, 0.5))
    learner.reset(sft.token_loss, temperature=1.0)
    assert_close(learner.logprobs(inputs), plain_logprobs(tiny("text"), inputs))
    config.rollout.temperature = 0.0  # greedy: scored with 1
    learner.reset(sft.token_loss)
    assert_close(learner.logprobs(inputs), plain_logprobs(tiny("text"), inputs))


@pytest.mark.slow
def test_warm_start_then_rl():
    """SFT brings the likelihood of its answers up; the reset keeps what was learned and forgets the optimizer."""
    config = config_for()
    learner = Learner(config, tiny("text"), sft.token_loss, mesh=make_mesh(2))
    batches = microbatches_for("text", config, 2)
    answers = [dataclasses.replace(m.batch, lags_BT=np.full_like(m.batch.lags_BT, -1)) for m in batches]
    batches = [Microbatch(batch) for batch in answers]
    losses = [learner.step(batches) for _ in range(8)]
    assert losses[-1]["nll"] < losses[0]["nll"] - 0.1
    assert GAP not in losses[0]  # nothing here was generated by an engine
    trained = jax.tree.map(np.array, learner.params)
    learner.reset(grpo.token_loss, optim=OptimConfig(lr=0.5), steps=100)
    jax.tree.map(np.testing.assert_array_equal, learner.params, trained)
    assert learner.version == 0
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(learner.opt_state))
    metrics = learner.step(microbatches_for("text", config, 2))
    assert metrics["lr"] == 0.5
    assert GAP in metrics


@pytest.mark.slow
def test_a_reset_compiles_again_only_what_changed():
    """`fit` after `fit`, of other length, is no reason; another clipping range is."""
    config, traced = config_for(), []

    def token_loss(*args):
        traced.append(args)
        return grpo.token_loss(*args)

    learner = Learner(config, tiny("text"), token_loss, mesh=make_mesh(1))
    batches = microbatches_for("text", config, 1)
    learner.step(batches)
    count = len(traced)
    learner.reset(token_loss, optim=OptimConfig(lr=0.5), steps=7)
    assert learner.step(batches)["lr"] == 0.5
    assert len(traced) == count
    config.algorithm.clip_high += 0.1
    learner.reset(token_loss)
    learner.step(batches)
    assert len(traced) > count


@pytest.mark.slow
def test_a_restored_state_is_never_on_the_devices_beside_the_old_one(tmp_path, held_by, monkeypatch):
    learner = Learner(config_for(), tiny("text"), grpo.token_loss, mesh=make_mesh(2))
    device = jax.devices()[1]  # where the model that it was made of is not
    state = held_by(device)
    weights = sum(x.nbytes for x in jax.tree.leaves(learner.params)) // 2
    assert 3 * weights <= state < 3.5 * weights  # masters and two moments, and a few weights that are on both devices
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1, learner.state(), {})
    held: dict[str, int] = {}
    put = jax.device_put

    def now(name):
        held[name] = max(held.get(name, 0), held_by(device))

    _, arrays, _ = checkpoints.restore(like(learner.state()), make_room=lambda: (learner.forget(), now("read"))[0])
    learner.reset(grpo.token_loss)
    now("reset")
    monkeypatch.setattr(jax, "device_put", lambda *args, **options: (put(*args, **options), now("taken"))[0])
    learner.load_state(arrays)
    assert held["read"] < 0.01 * state and held["reset"] <= 1.01 * state
    assert held["taken"] <= state + 0.5 * weights  # one array at a time
    assert learner.version == 0
    monkeypatch.undo()
    learner.step(microbatches_for("text", config_for(), 2))
    checkpoints.close()


def test_rows_must_divide_over_the_devices_and_there_is_one_microbatch():
    config = config_for(rows=1)
    learner = Learner(config, tiny("text"), grpo.token_loss, mesh=make_mesh(8))
    with pytest.raises(ValueError, match="can't be divided over 8 devices"):
        learner.step(microbatches_for("text", config, 3))
    with pytest.raises(ValueError, match="at least one microbatch"):
        learner.step([])


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_learning_rate(schedule, warmup):
    steps, lr = 20, 2.0
    rate = learning_rate(OptimConfig(lr=lr, schedule=schedule, warmup_steps=warmup), steps)
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        rates = np.array([np.asarray(rate(jnp.int32(step))).item() for step in range(steps + 1)])
    np.testing.assert_allclose(rates[:warmup], [lr * (i + 1) / warmup for i in range(warmup)], rtol=1e-6)
    progress = np.arange(steps + 1 - warmup) / (steps - warmup)
    shape = {Schedule.CONSTANT: np.ones_like(progress), Schedule.LINEAR: 1 - progress}
    shape[Schedule.COSINE] = (1 + np.cos(np.pi * progress)) / 2
    np.testing.assert_allclose(rates[warmup:], lr * shape[schedule], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("jitted", [False, True])
def test_a_learning_rate_may_be_a_schedule(warmup: int, jitted: bool):
    steps, optim = 20, OptimConfig(lr="cosine(0.5, 0.1)", warmup_steps=warmup)
    rate: Any = learning_rate(optim, steps)
    rate = jax.jit(rate) if jitted else rate
    with jax.numpy_dtype_promotion("standard"):
        rates = np.array([np.asarray(rate(jnp.int32(step))).item() for step in range(steps + 3)])
    np.testing.assert_allclose(rates[:warmup], 0.5 * np.arange(1, warmup + 1) / 4, rtol=1e-6)
    progress = np.minimum(np.arange(steps + 3 - warmup) / (steps - warmup), 1.0)
    np.testing.assert_allclose(rates[warmup:], 0.3 + 0.2 * np.cos(np.pi * progress), rtol=1e-5)
