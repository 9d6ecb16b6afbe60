"""Attention on NVIDIA GPUs, tested without one: lists of tiles, results in Triton's interpreter, machine code.

Triton and the CUDA plugin of the installed JAX are needed for all but the lists, in this environment or in a folder
that `FLUXJAX_AOT` names: `bash scripts/test.sh aot` makes one. `pytest -m gpu` runs the kernel where there is a GPU.
"""

import itertools
import pathlib

import flash_program
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_ahead import run_ahead, run_on_gpu
from hypothesis import given, settings
from test_tiles import S, streams
from triton_code import SHARED_MEMORY, assert_no_spills_and_tensor_cores
from turns import by_turns, third_of

from sharding.kernels import flash
from sharding.kernels.attention import Mask

PROGRAM = pathlib.Path(__file__).with_name("flash_program.py")
TOLERANCE = {"float32": 2e-6, "bfloat16": 0.012}  # of the largest value; bfloat16: 3 units in the last place


@pytest.fixture(scope="module")
def interpreted():
    return run_ahead(PROGRAM, "interpret", TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.parametrize("name", flash_program.CASES)
def test_values_and_gradients_equal_the_portable_kernel(interpreted, name):
    assert max(interpreted[name]) < TOLERANCE[flash_program.CASES[name][0]], interpreted[name]


@pytest.mark.slow
@pytest.mark.parametrize("capability", by_turns(SHARED_MEMORY))
def test_machine_code_has_no_spills_and_uses_tensor_cores(capability):
    kernels = run_ahead(PROGRAM, "assemble", str(capability))
    assert len(kernels) == 3 * (4 if capability == 90 else 2)
    assert_no_spills_and_tensor_cores(kernels, capability)


@pytest.mark.long
def test_programs_for_gpus_call_the_kernels_where_they_can():
    # forward, forward again under checkpoint, and the two of the backward pass
    counts = run_ahead(PROGRAM, "dispatch")
    assert {name: count > 0 for name, count in counts.items()} == {
        "masked": True,
        "tiled": True,
        "windows": True,
        "dense": False,
        "odd": False,
        "on cpus": False,
        "on an old GPU": False,
    }


@pytest.mark.gpu
def test_values_and_gradients_on_a_gpu():
    errors = run_on_gpu(PROGRAM)
    for name, (dtype, *_) in flash_program.CASES.items():
        assert max(errors[name]) < TOLERANCE[dtype] * (10 if dtype == "float32" else 1), (name, errors[name])


def test_cpus_compute_portably():
    assert not flash.chosen(*[jnp.zeros((1, 8, 2, 64))] * 3)


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
        launch = flash.launch_of(kernel, jnp.dtype(dtype), 80, capability)
        assert launch.queries % 16 == launch.keys % 16 == 0
