"""The kernels of NVIDIA GPUs, of attention (over packed rows and over pages) and of the head, tested without one: lists
of tiles, results in Triton's interpreter, machine code, memory.

Triton and the CUDA plugin of the installed JAX are needed for all but the lists, in this environment or in a folder
that `FLUXJAX_AOT` names: `bash scripts/test.sh aot` makes one. `pytest -m gpu` runs the kernels where there is a GPU.
"""

import functools
import itertools
import pathlib
import re

import flash_program
import head_program
import jax
import jax.numpy as jnp
import numpy as np
import paged_program
import pytest
from cuda_ahead import run_ahead, run_on_gpu
from flax import nnx
from hypothesis import given, settings
from test_tiles import S, streams
from triton_code import SHARED_MEMORY, assert_no_spills_and_tensor_cores
from turns import by_turns, third_of

from models.creation import with_values
from models.layers import GatedMLP
from sharding import vocab
from sharding.kernels import flash
from sharding.kernels.attention import Mask, packed_attention
from sharding.mesh import Target, compiling_for

HERE = pathlib.Path(__file__).parent
PROGRAMS = {kind: HERE / f"{kind}_program.py" for kind in ("flash", "paged", "head")}
CASES = {
    "flash": flash_program.CASES | flash_program.CONTEXTS,
    "paged": paged_program.CASES,
    "head": head_program.CASES | head_program.LARGE,
}
INTERPRETED = [(kind, name) for kind, cases in CASES.items() for name in cases if name not in head_program.LARGE]
TOLERANCE = {"float32": 2e-6, "bfloat16": 0.012}  # of the largest value; bfloat16: 3 units in the last place
VALUES = 2e-6  # log-probabilities and entropies: products of bfloat16 are exact in float32, too
# The programs for GPUs that call kernels, out of how many.
CALLING = {
    "flash": ({"masked", "tiled", "windows"}, 7),
    "paged": ({"on a GPU"}, 3),
    "head": ({"bfloat16", "float32"}, 6),
}


@functools.cache
def interpreted(kind):
    return run_ahead(PROGRAMS[kind], "interpret", TRITON_INTERPRET="1")


def assert_near(kind, name, errors, slack=1):
    """Outputs and gradients are near the portable ones; `slack` is for float32 on a GPU, which multiplies otherwise."""
    dtype, exact = CASES[kind][name][0], 2 if kind == "head" else 0
    assert max(errors[:exact], default=0) < VALUES * slack, (name, errors)
    assert max(errors[exact:]) < TOLERANCE[dtype] * (slack if dtype == "float32" else 1), (name, errors)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), INTERPRETED)
def test_values_and_gradients_equal_the_portable_ones(kind, name):
    assert_near(kind, name, interpreted(kind)[name])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", PROGRAMS)
def test_values_and_gradients_on_a_gpu(kind):
    errors = run_on_gpu(PROGRAMS[kind])
    for name in CASES[kind]:
        assert_near(kind, name, errors[name], slack=10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("capability", by_turns(SHARED_MEMORY))
def test_machine_code_has_no_spills_and_uses_tensor_cores(capability, kind):
    kernels = run_ahead(PROGRAMS[kind], "assemble", str(capability))
    assert len(kernels) == {"flash": 3 * (4 if capability == 90 else 2), "paged": 4, "head": 2 * 3}[kind]
    assert_no_spills_and_tensor_cores(kernels, capability)


@pytest.mark.long
@pytest.mark.parametrize("kind", PROGRAMS)
def test_programs_for_gpus_call_the_kernels_where_they_can(kind):
    counts = run_ahead(PROGRAMS[kind], "dispatch")
    assert ({name for name, count in counts.items() if count > 0}, len(counts)) == CALLING[kind]


@pytest.mark.long
def test_a_program_for_an_h100_has_no_logits_in_memory():
    tokens, vocabulary, width = 4096, 65536, 512
    found = run_ahead(PROGRAMS["head"], "compile", str(tokens), str(vocabulary), str(width))
    assert found["fused"]["calls"] and not found["portable"]["calls"]
    # The head and its gradient, [V, D], are arguments and results; the chunk of gradients of logits has 2**26 numbers.
    assert found["fused"]["largest"] <= max(vocabulary * width, 1 << 26) < tokens * vocabulary
    assert found["fused"]["temporaries"] < 0.2 * tokens * vocabulary * 4
    assert found["fused"]["temporaries"] < found["portable"]["temporaries"]


@pytest.mark.slow
def test_attention_of_an_h100_calls_mosaics_kernels_and_holds_no_scores():
    found = run_ahead(PROGRAMS["flash"], "hopper")
    # A loop over layers each way: forward, and forward again with the gradients.
    assert found["kernels"] == {"forward": 2, "query_gradients": 1, "key_gradients": 1}
    layers = 3 * 4096 * 8 * 128 * 2  # the inputs of the layers, in bfloat16
    assert found["temporaries"] < 5 * layers < 4 * 8 * 4096 * 4096  # the scores of one layer


def test_cpus_and_old_gpus_compute_portably(monkeypatch):
    monkeypatch.setattr("sharding.mesh._importable", lambda: True)
    hidden, weights = jnp.zeros((1, 8, 64)), jnp.zeros((32, 64))
    assert not vocab.chosen(hidden, weights) and not flash.chosen(*[jnp.zeros((1, 8, 2, 64))] * 3)
    with compiling_for(Target("gpu", 75)):
        assert not vocab.chosen(hidden, weights)
    with compiling_for(Target("gpu", 90)):
        assert vocab.chosen(hidden, weights)
        assert not vocab.chosen(hidden, weights.astype(jnp.bfloat16))
        assert not vocab.chosen(jnp.zeros((1, 8, 40)), jnp.zeros((32, 40)))


def test_a_gated_mlp_of_gpus_has_the_same_gradients():
    structure, weights = nnx.split(with_values(GatedMLP(8, 24, bias=True, std=1.0)))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 8)), jnp.float32)

    def gradients(weights, x):
        return jax.grad(lambda weights, x: jnp.sum(nnx.merge(structure, weights)(x) ** 2), (0, 1))(weights, x)

    want = gradients(weights, x)
    with compiling_for(Target("gpu", 90)):
        assert "custom_vjp" in str(jax.make_jaxpr(lambda x: nnx.merge(structure, weights)(x))(x))
        got = gradients(weights, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()), got, want)


@pytest.mark.parametrize("capability", [80, 90])  # Triton's kernels and Mosaic's
def test_tiles_are_listed_once_for_all_layers(monkeypatch, capability):
    def launch(module, kernel, arguments, outs, *_, **__):
        return [jnp.zeros(out.shape, out.dtype) for out in outs]

    monkeypatch.setattr("sharding.mesh._importable", lambda: True)
    monkeypatch.setattr(flash, "launch", launch)
    numbers = jnp.ones((1, 600), jnp.int32)
    queries = jnp.zeros((1, 600, 2, 64), jnp.bfloat16)

    def sums_in_layers(described):
        """The cumulative sums and maxima that list tiles, in each loop over layers: forward and backward."""

        def loss(x):
            attend = packed_attention(numbers, numbers, described)
            layer = jax.checkpoint(lambda x, _: (attend(x, x, x), None))
            return jnp.sum(jax.lax.scan(layer, x, None, length=3)[0])

        with compiling_for(Target("gpu", capability)):
            program = jax.make_jaxpr(jax.grad(loss))(queries)
        return [len(re.findall("cumsum|cummax", str(step))) for step in program.eqns if step.primitive.name == "scan"]

    assert any(sums_in_layers(None))
    assert sums_in_layers(jax.ShapeDtypeStruct(queries.shape, queries.dtype)) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@settings(deadline=None, max_examples=third_of(50))
@given(stream=streams(), scattered=streams(contiguous=False))
def test_lists_name_every_needed_tile_once_and_masked_ones_first(stream, scattered, causal):
    queries, keys = 8, 4
    filled = -(-S // queries) * queries
    for numbers in (stream, scattered):
        segments, branches = (jnp.asarray(np.pad(x, (0, filled - S)))[None] for x in numbers)
        allowed = np.asarray(Mask(segments, branches, causal).dense())[0]
        allowed = allowed.reshape(filled // queries, queries, filled // keys, keys)
        active, whole = flash.tile_table(segments, branches, queries, keys, causal)
        visits, counts = (np.asarray(x)[0] for x in flash.tile_lists(active, whole))
        assert not (allowed.any((1, 3)) & ~np.asarray(active)[0]).any()
        assert allowed.all((1, 3))[np.asarray(whole)[0]].all()
        for line, (masked, every) in enumerate(counts):
            listed = visits[line, :every].tolist()
            assert sorted(listed) == np.flatnonzero(active[0, line]).tolist()
            assert sorted(listed[masked:]) == np.flatnonzero(whole[0, line]).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@settings(deadline=None, max_examples=third_of(60))
@given(row=streams())
def test_on_hopper_one_interval_of_queries_sees_each_key(causal, row):
    segments, branches = (jnp.asarray(np.tile(x, 6)[: 5 * S])[None] for x in row)
    copy = jnp.arange(5 * S)[None] // S * 10  # segments of copies have other numbers
    segments = jnp.where(segments != 0, segments + copy, 0)
    branches = branches if causal else jnp.zeros_like(branches)
    with compiling_for(Target("gpu", 90)):
        visits = flash.visits_of(segments, branches, causal, jax.ShapeDtypeStruct((1, 5 * S, 2, 64), jnp.bfloat16))
    assert visits.bounds is not None
    first, last = (np.asarray(x)[0, None, :] for x in visits.bounds)
    filled = visits.segments.shape[1]
    want = np.asarray(Mask(visits.segments, visits.branches, causal).dense())[0]
    got = (np.arange(filled)[:, None] >= first) & (np.arange(filled)[:, None] < last)
    real = np.asarray(visits.segments)[0] != 0
    np.testing.assert_array_equal(got[real], want[real])
    # Padding sees keys only where it lies between two tokens of their segment.
    numbers = np.asarray(visits.segments)[0]
    for query in np.flatnonzero(~real):
        assert {numbers[key] for key in np.flatnonzero(got[query])} <= set(numbers[:query]) & set(numbers[query:])
    assert filled == 256 and not got[:, ~real].any()
    # Every tile with an allowed pair is listed for each kernel.
    for (tiles, counts), tiling, transposed in zip(visits.lists, visits.tilings, (False, False, True), strict=True):
        queries, keys = tiling.sizes
        needed = want.reshape(filled // queries, queries, filled // keys, keys).any((1, 3))
        lines = zip(np.asarray(tiles)[0], np.asarray(counts)[0, :, 1], needed.T if transposed else needed, strict=True)
        for line, several, wanted in lines:
            assert set(np.flatnonzero(wanted).tolist()) <= set(line[:several].tolist())


def test_hopper_computes_heads_of_64_and_128_in_bfloat16_unless_jax_was_built_for_cuda_12(monkeypatch):
    def queries(dtype, head):
        return jax.ShapeDtypeStruct((1, 8, 2, head), dtype)

    with compiling_for(Target("gpu", 90)):
        assert flash.for_hopper(queries(jnp.bfloat16, 64)) and flash.for_hopper(queries(jnp.bfloat16, 128))
        assert not any(flash.for_hopper(queries(*other)) for other in ((jnp.float32, 64), (jnp.bfloat16, 80)))
        ones = jnp.ones((1, 200), jnp.int32)
        assert flash.visits_of(ones, None, True, queries(jnp.bfloat16, 64), ahead=64).bounds is None  # behind a context
        monkeypatch.setattr("importlib.metadata.distributions", lambda **about: ["jax-cuda12-plugin"])
        assert not flash.for_hopper(queries(jnp.bfloat16, 64))
    with compiling_for(Target("gpu", 100)):
        assert not flash.for_hopper(queries(jnp.bfloat16, 64))


def test_foreign_branches_and_padding_are_not_visited():
    segments = np.repeat([1, 2, 0], [80, 32, 16]).astype(np.int32)[None]
    branches = np.repeat([0, 1, 2, 3, 4, 0], [16, 16, 16, 16, 16, 48]).astype(np.int32)[None]
    active, whole = flash.tile_table(jnp.asarray(segments), jnp.asarray(branches), 8, 8, True)
    # Of the prompt 3, of each response 4 that look at the prompt and 3 at itself, of the second segment 10.
    assert int(active.sum()) == 3 + 4 * (4 + 3) + 10
    # All but the tiles on the diagonal.
    assert int(whole.sum()) == int(active.sum()) - 2 - 4 * 2 - 4


def test_settings_exist_for_every_head_size():
    kernels = ("forward", "query_gradients", "key_gradients")
    for capability, kernel, dtype in itertools.product(SHARED_MEMORY, kernels, ("bfloat16", "float32")):
        tiling = flash.tiling_of(kernel, jnp.dtype(dtype), 80, capability)
        assert not any(size % 16 for size in tiling.sizes)
