"""The environment of a process that compiles for GPUs without one; the test is skipped where the packages are absent.

They are no part of the test environment: JAX would look for GPUs at every start. `bash scripts/test.sh aot` puts them
into a folder and names it in FLUXJAX_AOT, and CI runs the tests so: there, nothing is skipped.
"""

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys

import pytest

OF_TESTS = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")  # set for tests on CPU devices


def cuda_environment(*packages: str) -> dict[str, str]:
    """Environment variables with which JAX finds its CUDA plugin, and these packages, and runs on the CPU."""
    folder = os.environ.get("FLUXJAX_AOT", "")
    path = [folder] if folder else sys.path
    for name in ("jax-cuda12-plugin", *packages):
        if not any(importlib.metadata.distributions(name=name, path=path)):
            if folder:  # somebody said that it is there
                pytest.fail(f"FLUXJAX_AOT names {folder}, which has no {name}")
            pytest.skip(f"needs {name}: run `bash scripts/test.sh aot`, or name a folder with it in FLUXJAX_AOT")
    clean = {name: value for name, value in os.environ.items() if name not in OF_TESTS}
    return {**clean, "JAX_PLATFORMS": "cpu", "PYTHONPATH": folder}


def run_ahead(program: pathlib.Path, *words: str, **environment: str):
    """What a Python program prints as JSON, run with Triton and these environment variables."""
    found = cuda_environment("jax-triton", "triton") | environment
    done = subprocess.run([sys.executable, program, *words], env=found, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def run_on_gpu(program: pathlib.Path):
    """What the program prints on the GPU of this machine; `pytest -m gpu` asks for it, and is skipped without one."""
    if not list(pathlib.Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("needs an NVIDIA GPU")
    return run_ahead(program, "device", JAX_PLATFORMS="cuda,cpu", PYTHONPATH="")
