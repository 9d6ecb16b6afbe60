"""The environment of a process that compiles for GPUs without one; the test is skipped where the packages are absent.

They are no part of the test environment: JAX would look for GPUs at every start. `bash scripts/test.sh aot` puts them
into a folder and names it in FLUXJAX_AOT, and CI runs the tests so: there, nothing is skipped.
"""

import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence

import pytest

from fluxjax.sizing.topology import plugin_packages

OF_TESTS = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")  # set for tests on CPU devices


def cuda_environment(*packages: str) -> dict[str, str]:
    """Environment variables with which JAX finds its CUDA plugin, and these packages, and runs on the CPU.
    `pjrt` is the compiler of the plugin's CUDA."""
    folder = os.environ.get("FLUXJAX_AOT", "")
    path = [folder] if folder else sys.path
    plugin, pjrt = plugin_packages(path)
    for package in (plugin, *(pjrt if name == "pjrt" else name for name in packages)):
        if not any(importlib.metadata.distributions(name=package, path=path)):
            if folder:  # somebody said that it is there
                pytest.fail(f"FLUXJAX_AOT names {folder}, which has no {package}")
            pytest.skip(f"needs {package}: run `bash scripts/test.sh aot`, or name a folder with it in FLUXJAX_AOT")
    return {**clean_environment(), "JAX_PLATFORMS": "cpu", "PYTHONPATH": folder}


def clean_environment() -> dict[str, str]:
    """The environment without what is set for tests on CPU devices."""
    return {name: value for name, value in os.environ.items() if name not in OF_TESTS}


def run_ahead(program: pathlib.Path, *words: str, **environment: str):
    """What a Python program prints as JSON, run with Triton and these environment variables."""
    return _printed(program, words, cuda_environment("jax-triton", "triton") | environment)


def run_on_gpu(program: pathlib.Path):
    """Runs the program on the GPU of this machine, as `pytest -m gpu` asks, and returns what it prints.

    Skips the test where `nvidia-smi` lists no GPU. Where it lists one, the test fails unless our kernels run on it."""
    needs_gpu()
    found = _printed(program, ("device",), clean_environment() | {"JAX_PLATFORMS": "cuda,cpu", "PYTHONPATH": ""})
    assert found["with triton"], "the GPU computed without our kernels: jax-triton cannot be imported"
    return found


def _printed(program: pathlib.Path, words: Sequence[str], environment: dict[str, str]):
    command = [sys.executable, program, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def needs_gpu() -> None:
    """Skips the test where `nvidia-smi` lists no GPU."""
    command = shutil.which("nvidia-smi")
    listed = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=60).stdout if command else ""
    if "GPU 0" not in listed:
        pytest.skip("needs an NVIDIA GPU: nvidia-smi lists none")
