"""Training of adapters beside frozen weights: which adapters, and how the frozen weights are recognised later."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

import models
from sharding.walk import Params

from ..config import Config


def lora_of(config: Config) -> models.Lora | None:
    """The adapters that are trained, if any."""
    settings = config.lora
    return models.Lora(settings.rank, settings.alpha, settings.targets) if settings.rank else None


def fingerprint(params: Params, mesh: Mesh) -> Array:
    """Four bytes of each weight, `[W]` uint32, on every device: another value if one bit of the weight is another."""
    return _fingerprints(mesh)(params)


@functools.cache
def _fingerprints(mesh: Mesh) -> jax.stages.Wrapped:
    def all_of(params: Params) -> Array:
        return jnp.stack([_of(weight) for weight in jax.tree.leaves(params)])

    return jax.jit(all_of, out_shardings=NamedSharding(mesh, P()))


def _of(weight: Array) -> Array:
    """The sum of a weight's numbers, read as integers, each times an odd factor that depends on its place: sums of
    integers depend on no order, and an odd factor loses no bit."""
    factors = jnp.ones(weight.shape, jnp.uint32)
    for axis in range(weight.ndim):
        places = jax.lax.broadcasted_iota(jnp.uint32, weight.shape, axis)
        factors += places * jnp.uint32(2 * _STRIDES[axis])
    return jnp.sum(jax.lax.bitcast_convert_type(weight, jnp.uint32) * factors, dtype=jnp.uint32)


_STRIDES = (73856093, 19349663, 83492791, 49979687, 67867967)  # primes without a meaning, one an axis
