"""Measures the speed of attention over packed rows: FlexRL's Table 3, and text, vision windows and frames of
Qwen2.5-VL-7B.

    python benchmarks/attention.py                    on a GPU: 65,536 tokens in all, in bfloat16
    python benchmarks/attention.py --tokens 16384     shorter rows
    python benchmarks/attention.py --only vision      cases whose name contains a word

Prints one JSON line. For every case: `forward_ms` and `backward_ms` (output and gradients, less the forward pass),
medians of `--repeats`, and `forward_tflops`, `backward_tflops`: floating-point operations of the allowed pairs of
queries and keys only (4 and 10 for each number of a head), over the times. `paper_ms` is FlexRL's forward pass on one
H800. If PyTorch is installed and sees the same device, `torch_forward_ms` and `torch_backward_ms` are its
`scaled_dot_product_attention` over the same sequences as a batch, under the causal mask alone; ours and PyTorch's
alternate in one run. `kernel` says which of our kernels ran.

Without a GPU the portable kernel is measured at tiny shapes, only to see that the command works.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

    from sharding.kernels.attention import Mask

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation

TINY_TOKENS = 512


@dataclasses.dataclass(frozen=True)
class Case:
    """`sequences` of `length` tokens each, packed into one row. Each is followed by its `branches`, of `branch_length`
    tokens; a branch sees its sequence and itself."""

    name: str
    sequences: int
    length: int
    heads: int
    kv_heads: int
    head_size: int = 128
    causal: bool = True
    branches: int = 0
    branch_length: int = 0

    @property
    def segment(self) -> int:
        """The tokens of a sequence and its branches."""
        return self.length + self.branches * self.branch_length

    @property
    def flops(self) -> float:
        """Floating-point operations of a forward pass."""
        pairs = self.length * (self.length + 1) / 2 if self.causal else self.length**2
        pairs += self.branches * self.branch_length * (self.length + (self.branch_length + 1) / 2)
        return 4.0 * self.sequences * pairs * self.heads * self.head_size


def cases(tokens: int) -> list[Case]:
    counts = [n for n in (1, 4, 8, 16, 32, 64) if tokens // n >= 64]
    text = [Case(f"table 3, {n} x {tokens // n}", n, tokens // n, 64, 8) for n in counts]
    text += [Case(f"7B, {n} x {tokens // n}", n, tokens // n, 28, 4) for n in counts]
    vision = [Case("vision windows", tokens // 64, 64, 16, 16, 80, False)]
    frame = min(4096, tokens)
    return [*text, *vision, Case("vision frames", tokens // frame, frame, 16, 16, 80, False)]


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 2 with one line on standard error for settings that cannot work."""
    options = _parser().parse_args(argv)
    if options.tokens < 64 or options.repeats < 1:
        print("error: --tokens must be at least 64 and --repeats at least 1", file=sys.stderr)
        return 2
    import jax

    gpu = jax.default_backend() == "gpu"
    if not gpu:
        print(f"no GPU: the portable kernel on the CPU, {TINY_TOKENS} tokens, for a look only", file=sys.stderr)
    chosen = [case for case in cases(options.tokens if gpu else TINY_TOKENS) if options.only in case.name]
    if not chosen:
        print(f"error: no case is called {options.only!r}", file=sys.stderr)
        return 2
    result: dict[str, Any] = {
        "benchmark": "attention",
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "measured": gpu,
        "cases": [measure(case, options.repeats) for case in chosen],
    }
    print(json.dumps(result))
    return 0


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """The figures of one case."""
    import jax

    from benchmarks.cost_fit import TABLE3_MS

    runs, kernel = ours(case, "bfloat16" if jax.default_backend() == "gpu" else "float32")
    figures: dict[str, Any] = {"name": case.name, "heads": f"{case.heads}/{case.kv_heads}", "kernel": kernel}
    figures |= rates(case, runs | torch_runs(case), repeats)
    if (paper := TABLE3_MS.get((case.sequences, case.length))) and case.heads == 64:
        figures["paper_ms"] = paper
    return figures


def rates(case: Case, runs: Mapping[str, Callable[[int], object]], repeats: int, calls: int = 1) -> dict[str, float]:
    """The milliseconds and rates of functions `{PREFIX}forward` and `{PREFIX}both`, which alternate. Each starts
    `calls` passes before it waits; use several if starting a pass takes about as long as the pass."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run(1)  # compiles
    for _ in range(repeats):
        for name, run in runs.items():
            started = time.perf_counter()
            run(calls)
            seconds[name].append((time.perf_counter() - started) / calls)
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    figures = {}
    for prefix in [name.removesuffix("forward") for name in runs if name.endswith("forward")]:
        forward = middle[f"{prefix}forward"]
        figures[f"{prefix}forward_ms"] = round(1e3 * forward, 3)
        figures[f"{prefix}forward_tflops"] = round(case.flops / forward / 1e12, 3)
        if f"{prefix}both" in middle:
            backward = max(middle[f"{prefix}both"] - forward, 1e-9)
            figures[f"{prefix}backward_ms"] = round(1e3 * backward, 3)
            figures[f"{prefix}backward_tflops"] = round(2.5 * case.flops / backward / 1e12, 3)
    return figures


def row(case: Case, dtype: str) -> tuple[tuple[jax.Array, ...], Mask]:
    """Returns random queries, keys, values and gradients of the output, and the mask of the row."""
    import jax
    import jax.numpy as jnp

    from sharding.kernels.attention import Mask

    keys = jax.random.split(jax.random.key(0), 4)
    arrays = tuple(
        jax.random.normal(key, (1, case.sequences * case.segment, heads, case.head_size), dtype)
        for key, heads in zip(keys, (case.heads, case.kv_heads, case.kv_heads, case.heads), strict=True)
    )
    segments = jnp.repeat(jnp.arange(1, case.sequences + 1, dtype=jnp.int32), case.segment)[None]
    if not case.branches:
        return arrays, Mask(segments, causal=case.causal)
    lengths = jnp.asarray([case.length, *[case.branch_length] * case.branches])
    branches = jnp.tile(jnp.repeat(jnp.arange(case.branches + 1, dtype=jnp.int32), lengths), case.sequences)[None]
    return arrays, Mask(segments, branches, case.causal)


def ours(case: Case, dtype: str) -> tuple[dict[str, Callable[[int], object]], str]:
    """Returns functions that run the forward pass, or forward and backward pass, of `sharding.kernels.attention`, and
    the name of the kernel that it chooses."""

    from sharding.kernels import flash
    from sharding.kernels.attention import Mask, attention

    arrays, mask = row(case, dtype)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, branches: jax.Array | None) -> jax.Array:
        return attention(q, k, v, Mask(segments, branches, case.causal))

    kernel = "portable" if not flash.chosen(*arrays) else "mosaic" if flash.for_hopper(arrays[0]) else "triton"
    return jax_runs(attend, arrays, mask.segments, mask.branches), kernel


def jax_runs(
    attend: Callable[..., jax.Array], arrays: Sequence[jax.Array], *rest: jax.Array | None
) -> dict[str, Callable[[int], object]]:
    """Returns functions that run the forward pass, or forward and backward pass, of `attend(q, k, v, *rest)`; the
    arrays are q, k, v and the gradient of the output. No array is a constant of a program: XLA would fold it."""
    import jax

    def forward_and_backward(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array, *rest: jax.Array | None):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, *rest), q, k, v)
        return out, *pull(dout)

    def repeated(function: Callable[..., object], *arrays: jax.Array) -> Callable[[int], object]:
        compiled = jax.jit(function)

        def run(calls: int) -> object:
            result = None
            for _ in range(calls):
                result = compiled(*arrays)
            return jax.block_until_ready(result)

        return run

    return {
        "forward": repeated(attend, *arrays[:3], *rest),
        "both": repeated(forward_and_backward, *arrays, *rest),
    }


def torch_runs(case: Case) -> dict[str, Callable[[int], object]]:
    """Returns functions that run the forward pass, or forward and backward pass, of PyTorch's attention; none if
    PyTorch is not installed, or sees no GPU where JAX does."""
    import jax

    try:
        import torch
    except ImportError:
        return {}
    gpu = jax.default_backend() == "gpu"
    if gpu and not torch.cuda.is_available():
        return {}
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    shapes = [(case.sequences, heads, case.length, case.head_size) for heads in (case.heads, *[case.kv_heads] * 2)]
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)
    dout = torch.randn(shapes[0], device=device, dtype=dtype)

    def attend() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=True)

    def wait() -> None:
        if gpu:
            torch.cuda.synchronize()

    def forward(calls: int) -> None:
        with torch.no_grad():
            for _ in range(calls):
                attend()
        wait()

    def forward_and_backward(calls: int) -> None:
        for _ in range(calls):
            torch.autograd.grad(attend(), (q, k, v), dout)
        wait()

    return {"torch_forward": forward, "torch_both": forward_and_backward}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens in all, on a GPU (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=10, help="of each measurement (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name contains WORD")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
