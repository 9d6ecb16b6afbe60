"""Checks the Triton kernels of attention and head on a GPU: errors, unwritten results, equal bits, 64-bit offsets.

The cases of the tests are compared with the portable form in float32 on the CPU; rows of many tokens with the portable
form in float32 on the GPU. Memory is filled with the bits of NaN first: results that a kernel does not write are NaN.
Errors are the largest error over the largest value, of the output and of each gradient (`largest`), and the norm of all
errors over the norm of all values (`norm`). A check that fails is an error of this part.
"""

from __future__ import annotations

import concurrent.futures
import functools
import sys
from collections.abc import Callable, Iterable, Mapping

import part

MOST = {"bfloat16": 0.012, "float32": 2e-5}  # errors
MOST_OF_VALUES = 2e-5  # log-probabilities and entropies: products of bfloat16 are exact in float32, too


def measure(figures: part.Figures, dry: bool) -> None:
    import jax

    figures.add(device=jax.devices()[0].device_kind)
    if not dry:
        figures.attempt("kernels", _kernels)
    _poison()
    figures.attempt("attention cases", functools.partial(_attention_cases, dry))
    figures.attempt("head cases", functools.partial(_head_cases, dry))
    figures.attempt("long row", functools.partial(_long_row, dry))
    figures.attempt("large head", functools.partial(_large_head, dry))
    figures.attempt("many numbers", functools.partial(_many_numbers, dry))


def _kernels() -> str:
    import jax.numpy as jnp

    from sharding import vocab
    from sharding.kernels import flash

    array = jnp.zeros((1, 8, 2, 64), jnp.bfloat16)
    if not flash.chosen(array, array, array) or not vocab.chosen(array, array):
        raise AssertionError("this GPU computes portably: see the warnings")
    return "triton"


def _poison() -> None:
    """Fills most of the free memory of a GPU with the bits of NaN, and frees it again."""
    import jax
    import jax.numpy as jnp

    memory = jax.devices()[0].memory_stats() or {}
    free = memory.get("bytes_limit", 0) - memory.get("bytes_in_use", 0)
    held = [jnp.full(free // 20 // 4, 0xFFFFFFFF, jnp.uint32) for _ in range(17 if free > 0 else 0)]
    jax.block_until_ready(held)


def _attention_cases(dry: bool) -> dict[str, list[float]]:
    import flash_program

    cases = {"branches": flash_program.CASES["branches"]} if dry else flash_program.CASES
    found = _errors(flash_program.errors, cases)
    for name, (dtype, *_) in cases.items():
        _check(_all_within(found[name], MOST[dtype]), f"{name}: errors above {MOST[dtype]}", found)
    return found


def _head_cases(dry: bool) -> dict[str, list[float]]:
    import head_program

    cases = {"odd": head_program.CASES["odd"]} if dry else head_program.CASES | head_program.LARGE
    found = _errors(head_program.errors, cases)
    for name, (dtype, *_) in cases.items():
        logprobs, entropies, *grads = found[name]
        _check(
            _all_within((logprobs, entropies), MOST_OF_VALUES), f"{name}: values' errors above {MOST_OF_VALUES}", found
        )
        _check(_all_within(grads, MOST[dtype]), f"{name}: gradients' errors above {MOST[dtype]}", found)
    return found


def _errors(errors: Callable[..., list[float]], cases: Mapping[str, tuple]) -> dict[str, list[float]]:
    """The errors of each case. The kernels of several cases are compiled at the same time."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        futures = {name: pool.submit(errors, *case) for name, case in cases.items()}
        return {name: [float(f"{error:.3g}") for error in future.result()] for name, future in futures.items()}


def _long_row(dry: bool) -> dict[str, object]:
    """Prompts with branches, a long segment, and padding at the end, in one row of 16,384 tokens."""
    import flash_program
    import jax
    import jax.numpy as jnp

    from sharding.kernels.attention import Mask, attention

    unit, tokens = (2, 64) if dry else (512, 16384)
    lengths = [[2 * unit, *[unit] * 6]] * 3 + [8 * unit - unit // 2 - 1]
    *qkvd, segments, branches, _ = flash_program.case("bfloat16", 28, 4, 128, True, [lengths], tokens)

    @functools.partial(jax.jit, static_argnums=0)
    def passes(portable: bool, q, k, v, dout, segments, branches):
        mask = Mask(segments, branches)
        with jax.default_matmul_precision("highest"):  # a GPU would multiply float32 as TF32
            out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, mask.dense() if portable else mask), q, k, v)
            return out, *pull(dout)

    want = passes(True, *[x.astype(jnp.float32) for x in qkvd], segments, branches)
    return _compare(lambda: passes(False, *qkvd, segments, branches), want, MOST["bfloat16"])


def _large_head(dry: bool) -> dict[str, object]:
    """The vocabulary and the width of Qwen2.5-7B."""
    import jax
    import jax.numpy as jnp

    from sharding.mesh import Target, compiling_for
    from sharding.vocab import token_logprobs

    tokens, vocabulary, width = (16, 64, 32) if dry else (2048, 152064, 3584)
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (1, tokens, width), "bfloat16")
    head = jax.random.normal(keys[1], (vocabulary, width), "bfloat16") * width**-0.5
    targets = jax.random.randint(keys[2], (1, tokens), 0, vocabulary)

    def values_and_grads(hidden, head, targets):
        with jax.default_matmul_precision("highest"):
            values, pull = jax.vjp(lambda *arrays: token_logprobs(*arrays, targets), hidden, head)
            return *values, *pull(jax.tree.map(jnp.ones_like, values))

    with compiling_for(Target("cpu")):  # portably
        want = jax.jit(values_and_grads)(hidden.astype(jnp.float32), head.astype(jnp.float32), targets)
    fused = jax.jit(lambda *arrays: values_and_grads(*arrays))
    return _compare(lambda: fused(hidden, head, targets), want, MOST["bfloat16"])


def _many_numbers(dry: bool) -> dict[str, object]:
    """Two rows of 2**17 tokens and 64 heads: 2**31 numbers. All segments are equal, so their results must be equal."""
    import jax
    import jax.numpy as jnp

    from sharding.kernels.attention import Mask, attention

    rows, segments, length, heads, size = (2, 4, 16, 4, 16) if dry else (2, 128, 1024, 64, 128)
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(1, length, count, size) for count in (heads, heads // 4, heads // 4, heads)]
    small = [jax.random.normal(key, shape, "bfloat16") for key, shape in zip(keys, shapes, strict=True)]
    numbers = jnp.tile(jnp.repeat(jnp.arange(1, segments + 1, dtype=jnp.int32), length), (rows, 1))

    @jax.jit
    def passes(q, k, v, dout, numbers):
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, Mask(numbers)), q, k, v)
        return out, *pull(dout)

    @jax.jit
    def differences(large, small):
        return jnp.stack([jnp.sum(x.reshape(-1, *y.shape[1:]) != y) for x, y in zip(large, small, strict=True)])

    want = passes(*small, jnp.ones((1, length), jnp.int32))
    _poison()
    large = passes(*[jnp.tile(x, (rows, segments, 1, 1)) for x in small], numbers)
    different = [int(count) for count in differences(large, want)]
    found = {"numbers": large[0].size, "different": different}
    _check(dry or not any(different), "equal segments have different results", found)  # portably, sums may differ
    return found


def _compare(run: Callable[[], tuple], want: tuple, most: float) -> dict[str, object]:
    """The errors of a run in poisoned memory against results in float32. A second run must have the same bits."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def errors(got, want):
        pairs = [(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in zip(got, want, strict=True)]
        largest = [jnp.abs(x - y).max() / jnp.abs(y).max() for x, y in pairs]
        return jnp.stack(largest), jnp.stack([jnp.linalg.norm(x - y) / jnp.linalg.norm(y) for x, y in pairs])

    _poison()
    first = jax.block_until_ready(run())
    _poison()
    equal = all(bool(jnp.array_equal(x, y)) for x, y in zip(first, run(), strict=True))  # NaN equals nothing
    largest, norm = ([float(f"{float(error):.3g}") for error in row] for row in errors(first, want))
    found = {"largest": largest, "norm": norm, "equal bits": equal}
    _check(_all_within(largest, most), f"errors above {most}", found)
    _check(equal, "two runs have different bits", found)
    return found


def _all_within(errors: Iterable[float], most: float) -> bool:
    return all(error <= most for error in errors)  # NaN is not


def _check(holds: bool, why: str, found: Mapping[str, object]) -> None:
    if not holds:
        raise part.CheckError(why, found)


if __name__ == "__main__":
    sys.exit(part.main(measure, __doc__))
