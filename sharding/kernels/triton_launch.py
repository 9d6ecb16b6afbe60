"""Launches Triton kernels through jax-triton, and says whether the target of a program can run them.

Triton is imported and asked for only where the computation goes to an NVIDIA GPU (`possible`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..target import target

LEAST_CAPABILITY = 80  # Ampere, the first with bfloat16 and TF32 products

_log = logging.getLogger(__name__)


def possible(*arrays: Array) -> bool:
    """Says, while a program is traced, whether a Triton kernel can compute with these arrays.

    It can where the target (`sharding.target`) is an NVIDIA GPU since Ampere, jax-triton can be imported, and all
    arrays are bfloat16 or all float32.
    """
    device = target()
    if not device.is_gpu or not _importable() or not _capable(device.capability):
        return False
    return {array.dtype.name for array in arrays} in ({"bfloat16"}, {"float32"})


@functools.cache
def _importable() -> bool:
    try:
        for module in ("jax_triton", "triton"):
            importlib.import_module(module)
        if jax.__version_info__ >= (0, 12) and importlib.metadata.version("jax-triton").startswith("0.4."):
            raise ImportError("jax-triton 0.4 does not know JAX 0.12")  # tracing would fail
    except Exception as error:  # versions that do not fit each other fail in many ways
        _log.warning("GPUs compute without our Triton kernels, slowly: %s (pip install 'fluxjax[cuda13]')", error)
        return False
    return True


@functools.cache
def _capable(capability: int) -> bool:
    if capability < LEAST_CAPABILITY:
        _log.warning("GPUs compute without our Triton kernels, slowly: these need NVIDIA GPUs since Ampere")
    return capability >= LEAST_CAPABILITY


def launch(
    module: str,
    kernel: str,
    arguments: tuple[Array | int | float, ...],
    outs: Any,
    grid: tuple[int, int, int],
    *,
    warps: int,
    stages: int,
    **constants: int | bool | str,
) -> list[Array]:
    """Launches a kernel of a module of this folder. The program names its calls `module_kernel`."""
    jax_triton: Any = importlib.import_module("jax_triton")
    kernels: Any = importlib.import_module(f".{module}", __package__)
    name = f"{module}_{kernel}"
    with jax.named_scope(name):
        return jax_triton.triton_call(
            *arguments,
            kernel=getattr(kernels, kernel),
            out_shape=tuple(outs),
            grid=grid,
            name=name,
            num_warps=warps,
            num_stages=stages,
            compute_capability=target().capability,
            **constants,
        )


def varying_zero(*arrays: Array) -> Array:
    """A float32 zero that varies over every mesh axis over which one of `arrays` does. A loop's initial value must vary
    like its results, and a kernel's results like its inputs; only the arrays tell these axes."""
    zero = jnp.zeros((), jnp.float32)
    for array in arrays:
        zero = zero + jnp.where(False, array.reshape(-1)[0], 0).astype(jnp.float32)
    return zero
