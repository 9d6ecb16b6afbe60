"""Measures the best speeds of the machine, the denominators of all other parts: products, copies, transfers, calls."""

from __future__ import annotations

import sys

import part


def measure(figures: part.Figures, dry: bool) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    device, wait = jax.devices()[0], jax.block_until_ready
    figures.add(device=device.device_kind, platform=device.platform, capability=_capability(device))
    memory = device.memory_stats() or {}
    figures.add(memory_gib=round(memory.get("bytes_limit", 0) / 2**30, 2))

    def product() -> dict[str, float]:
        size = 256 if dry else 8192
        a, b = (jax.random.normal(key, (size, size), "bfloat16") for key in jax.random.split(jax.random.key(0)))
        multiply = jax.jit(jnp.matmul)
        taken = part.seconds(lambda: multiply(a, b), wait, 2 if dry else 20)
        return part.rounded({"ms": 1e3 * taken, "tflops": 2 * size**3 / taken / 1e12})

    def copy() -> dict[str, float]:
        numbers = jnp.zeros(1 << (16 if dry else 30), jnp.float32)
        add = jax.jit(lambda x: x + 1)
        taken = part.seconds(lambda: add(numbers), wait, 4)
        return part.rounded({"gb": numbers.nbytes / 1e9, "gb_per_second": 2 * numbers.nbytes / taken / 1e9})

    def small_arrays() -> dict[str, float]:
        host = [np.full(64, number, np.int32) for number in range(14)]
        there = part.seconds(lambda: jax.device_put(host), wait, 1, 50)
        add = jax.jit(lambda arrays: [array + 1 for array in arrays])  # new ones: JAX keeps copies of those it has read
        on_device = jax.device_put(host)

        def back() -> object:
            return jax.device_get(wait(add(on_device)))

        with_sum = part.seconds(back, lambda result: result, 1, 50)
        computed = part.seconds(lambda: add(on_device), wait, 1, 50)
        return part.rounded({"to_device_ms": 1e3 * there, "to_host_ms": 1e3 * (with_sum - computed)})

    def empty_call() -> dict[str, float]:
        number, call = jnp.zeros(()), jax.jit(lambda x: x)
        started = part.seconds(lambda: call(number), wait, 1000)
        waited = part.seconds(lambda: call(number), wait, 1, 100)
        return part.rounded({"started_us": 1e6 * started, "waited_us": 1e6 * waited})

    for measured in (product, copy, small_arrays, empty_call):
        figures.attempt(measured.__name__, measured)


def _capability(device: object) -> str:
    return str(getattr(device, "compute_capability", ""))


if __name__ == "__main__":
    sys.exit(part.main(measure, __doc__))
