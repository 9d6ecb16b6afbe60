"""FSDP on any number of devices: loss, gradients and log-probs of one device; nothing whole, nothing replicated."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from toy import L, assert_equal, make_batch, normal, strategy, toy

from sharding.mesh import make_mesh
from sharding.weights import Cut, WeightSpec, by_path, cut_of


def run(devices, **options):
    model, params = toy()
    fsdp = strategy(devices, model, **options)
    batch = fsdp.place(make_batch())
    params = fsdp.shard(params)
    result = jax.jit(fsdp.loss_and_grad)(params, batch)
    return result, jax.jit(fsdp.logprobs)(params, batch["inputs"]), fsdp


@functools.cache
def single():
    return run(1)[:2]


@pytest.mark.slow
def test_one_device_equals_plain_autodiff():
    model, params = toy()
    graphdef, batch = nnx.graphdef(model), make_batch()

    def plain(params):
        model = nnx.merge(graphdef, params)
        x = model.table.weight[...][batch["inputs"]["tokens"]]
        for layer in range(L):
            w = jax.tree.map(lambda weights: weights[layer], params["layers"])  # noqa: B023
            inner = jnp.tanh((x * jnp.broadcast_to(w["scale"], x.shape)) @ w["up"])
            x = x + inner @ w["down"] * jnp.sum(w["odd"])
        logs = jax.nn.log_softmax(jnp.einsum("BTD,VD->BTV", x, params["table"]["weight"]))
        return -jnp.sum(batch["weights"] * jnp.take_along_axis(logs, batch["inputs"]["targets"][..., None], -1)[..., 0])

    (value, _, grads), _ = single()
    assert_equal((value, grads), jax.value_and_grad(plain)(params), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (2, {"unroll": 0, "remat": "dots"}),
        (3, {"remat": "layer"}),
        (6, {"unroll": 0}),
        (6, {"remat": "offload"}),
        (8, {}),
        (8, {"unroll": 0, "remat": "layer"}),
    ],
)
def test_any_number_of_devices_equals_one(devices, options):
    result, logprobs, fsdp = run(devices, **options)
    assert_equal((result, logprobs), single(), 1e-5)
    jax.tree.map(
        lambda grad, sharding: (
            grad.sharding.is_equivalent_to(sharding, grad.ndim)
            or pytest.fail(f"gradient lies as {grad.sharding}, not as {sharding}")
        ),
        result[2],
        fsdp.shardings,
    )
    assert logprobs[0].sharding.spec == P(fsdp.mesh.axis_names if devices in (3, 6) else fsdp.mesh.axis_names[1:])


@pytest.mark.slow
@pytest.mark.parametrize("devices", [6, 8])
def test_bfloat16_compute_stays_near_and_gradients_are_float32(devices):
    (value, _, grads), _, _ = run(devices, compute_dtype=jnp.bfloat16)
    (want, _, want_grads), _ = single()
    assert {grad.dtype for grad in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
    assert float(value) != float(want)  # it did compute in another precision
    assert_equal((value, grads), (want, want_grads), 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_weights_that_are_cast_before_the_step_have_the_same_gradients(devices):
    model, params = toy(width=16, inner=32)
    fsdp = strategy(devices, model, compute_dtype=jnp.bfloat16, remat="layer")
    batch, params, step = fsdp.place(make_batch()), fsdp.shard(params), jax.jit(fsdp.loss_and_grad)
    copies = jax.jit(fsdp.copies)(params)
    (value, _, grads), (want, _, want_grads) = step(copies, batch), step(params, batch)
    assert_equal((value, grads), (want, want_grads), 0.01)  # bfloat16 has 8 bits, and the table has two gradients
    paths = {path: "bfloat16" if path in fsdp.copied else "float32" for path in by_path(params)}
    assert paths == {path: str(grad.dtype) for path, grad in by_path(grads).items()}
    assert paths == {path: str(weight.dtype) for path, weight in by_path(copies).items()}
    # All devices have the same slice of the odd bias, so that `copies` leaves it alone.
    odd = {path for path in paths if path[-1] == "odd"}
    assert odd and fsdp.copied == paths.keys() - (odd if devices > 1 else set())


def test_float32_weights_are_not_copied():
    assert not strategy(1, toy()[0]).copied


def test_a_weight_is_cut_along_the_first_axis_that_divides():
    def cut(shape, axes, devices):
        return cut_of(WeightSpec(shape, axes, normal), make_mesh(devices))

    assert cut((24, 12), ("V", "D"), 8) == Cut(0, ("s2", "s1", "s0"))
    assert cut((12, 18), ("D", "F"), 6) == Cut(1, ("replica", "s0"))
    assert cut((16, 18), ("D", "F"), 8) == Cut(0, ("s2", "s1", "s0"))  # F comes first, but 8 does not divide 18
    assert cut((12, 18), ("D", "F"), 8) == Cut(0, ("s1", "s0"))  # 4 divides D, so two copies of four slices
    assert cut((4, 10), ("N", "H"), 6) == Cut(0, ("s0",))
    assert cut((5,), ("H",), 8) is None
    assert cut((4, 5), ("N", "H"), 3) is None
    assert cut((24, 12), ("V", "D"), 1) is None


def compiled(devices, fsdp_options=None, **sizes):
    model, params = toy(**sizes)
    fsdp = strategy(devices, model, **(fsdp_options or {}))
    return jax.jit(fsdp.loss_and_grad).lower(fsdp.shard(params), fsdp.place(make_batch())).compile()


@pytest.mark.medium
def test_gradients_are_scattered_not_summed_whole():
    """Sizes that 8 divides give gathers and scatters; only the odd bias and scalars are summed on all devices."""
    text = compiled(8, width=16, inner=32).as_text() or ""
    assert re.search(r"= \S+ all-gather(-start)?\(", text)
    assert re.search(r"= \S+ reduce-scatter\(", text)
    summed = [int(size) for size in re.findall(r"= f32\[(\d+)\][^ ]* all-reduce", text)]
    assert all(size <= 5 for size in summed)
    assert not re.findall(r"= f32\[\d+,[\d,]+\][^ ]* all-reduce", text)


@pytest.mark.slow
def test_whole_weights_do_not_outlive_their_layer():
    """The stack's weights, 4 MB of 16 layers, are never all gathered at once, with or without rematerialisation."""
    sizes = {"width": 128, "inner": 256, "layers": 16}
    whole = 2 * 128 * 256 * 16 * 4
    programs = [compiled(8, {"remat": remat}, **sizes) for remat in ("none", "layer")]
    # Activations of the backward pass and the weights of a layer or two, but not the stack.
    assert max(program.memory_analysis().temp_size_in_bytes for program in programs) < whole / 2


def test_rows_must_divide():
    model, _ = toy()
    with pytest.raises(ValueError, match=r"shape \(12, 5\) can't be divided over 8 devices along dimension 0"):
        strategy(8, model).place(make_batch(12))
