"""The head's kernels on NVIDIA GPUs, tested without one: results in Triton's interpreter, machine code, memory.

Triton and the CUDA plugin of the installed JAX are needed, in this environment or in a folder that `FLUXJAX_AOT` names:
`bash scripts/test.sh aot` makes one. `pytest -m gpu` runs the kernels where there is a GPU.
"""

import pathlib

import head_program
import jax.numpy as jnp
import pytest
from cuda_ahead import run_ahead, run_on_gpu
from triton_code import SHARED_MEMORY, assert_no_spills_and_tensor_cores
from turns import by_turns

from sharding import vocab
from sharding.target import Target, compiling_for

PROGRAM = pathlib.Path(__file__).with_name("head_program.py")
TOLERANCE = {"float32": 2e-6, "bfloat16": 0.012}  # of the largest value; bfloat16: 3 units in the last place
VALUES = 2e-6  # log-probabilities and entropies: products of bfloat16 are exact in float32, too


@pytest.fixture(scope="module")
def interpreted():
    return run_ahead(PROGRAM, "interpret", TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.parametrize("name", head_program.CASES)
def test_values_and_gradients_equal_the_portable_form(interpreted, name):
    logprobs, entropies, *grads = interpreted[name]
    assert max(logprobs, entropies) < VALUES, interpreted[name]
    assert max(grads) < TOLERANCE[head_program.CASES[name][0]], interpreted[name]


@pytest.mark.slow
@pytest.mark.parametrize("capability", by_turns(SHARED_MEMORY))
def test_machine_code_has_no_spills_and_uses_tensor_cores(capability):
    kernels = run_ahead(PROGRAM, "assemble", str(capability))
    assert len(kernels) == 2 * 3
    assert_no_spills_and_tensor_cores(kernels, capability)


@pytest.mark.long
def test_programs_for_gpus_call_the_kernels_where_they_can():
    counts = run_ahead(PROGRAM, "dispatch")
    assert {name: count > 0 for name, count in counts.items()} == {
        "bfloat16": True,
        "float32": True,
        "of two dtypes": False,
        "odd width": False,
        "on cpus": False,
        "on an old GPU": False,
    }


@pytest.mark.long
def test_a_program_for_an_h100_has_no_logits_in_memory():
    tokens, vocabulary, width = 4096, 65536, 512
    found = run_ahead(PROGRAM, "compile", str(tokens), str(vocabulary), str(width))
    assert found["fused"]["calls"] and not found["portable"]["calls"]
    # The head and its gradient, [V, D], are arguments and results; the chunk of gradients of logits has 2**26 numbers.
    assert found["fused"]["largest"] <= max(vocabulary * width, 1 << 26) < tokens * vocabulary
    assert found["fused"]["temporaries"] < 0.2 * tokens * vocabulary * 4
    assert found["fused"]["temporaries"] < found["portable"]["temporaries"]


@pytest.mark.gpu
def test_values_and_gradients_on_a_gpu():
    errors = run_on_gpu(PROGRAM)
    for name, (dtype, *_) in (head_program.CASES | head_program.LARGE).items():
        logprobs, entropies, *grads = errors[name]
        assert max(logprobs, entropies) < 10 * VALUES, (name, errors[name])
        assert max(grads) < TOLERANCE[dtype] * (10 if dtype == "float32" else 1), (name, errors[name])


def test_cpus_and_old_gpus_compute_portably(monkeypatch):
    monkeypatch.setattr("sharding.target._importable", lambda: True)
    hidden, weights = jnp.zeros((1, 8, 64)), jnp.zeros((32, 64))
    assert not vocab.chosen(hidden, weights)
    with compiling_for(Target("gpu", 75)):
        assert not vocab.chosen(hidden, weights)
    with compiling_for(Target("gpu", 90)):
        assert vocab.chosen(hidden, weights)
        assert not vocab.chosen(hidden, weights.astype(jnp.bfloat16))
        assert not vocab.chosen(jnp.zeros((1, 8, 40)), jnp.zeros((32, 40)))
