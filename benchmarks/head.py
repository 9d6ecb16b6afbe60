"""Measures the speed of log-probs over the vocabulary: the head of Qwen2.5-7B, forward and backward, in bfloat16.

    python benchmarks/head.py                                          on a GPU: 16,384 tokens
    python benchmarks/head.py --tokens 4096 --vocabulary 151936 --width 2048

Prints one JSON line. For the fused kernels (`sharding/vocab.py`) and the portable form, which alternate in one
run: `forward_ms` and `backward_ms` (values and gradients, less the forward pass), medians of `--repeats`, and
`forward_tflops`, `backward_tflops`: two operations of each token, id and number of the width forward, four backward,
over these times; recomputation in the backward pass is not counted. Without a GPU nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 2 with one line on standard error for settings that cannot work."""
    options = _parser().parse_args(argv)
    sizes = (options.tokens, options.vocabulary, options.width)
    if min(*sizes, options.repeats) < 1:
        print("error: --tokens, --vocabulary, --width and --repeats must be at least 1", file=sys.stderr)
        return 2
    import jax

    gpu = jax.default_backend() == "gpu"
    if not gpu:
        print("no GPU: nothing is measured", file=sys.stderr)
    figures = measure(*sizes, options.repeats) if gpu else {}
    about = {"benchmark": "head", "device": jax.devices()[0].device_kind, "jax": jax.__version__, "measured": gpu}
    print(json.dumps(about | dict(zip(("tokens", "vocabulary", "width"), sizes, strict=True)) | figures))
    return 0


def measure(tokens: int, vocabulary: int, width: int, repeats: int) -> dict[str, dict[str, float]]:
    """The figures of each form that the device has."""
    runs = {form: _runs(form, tokens, vocabulary, width) for form in ("fused", "portable")}
    seconds: dict[tuple[str, str], list[float]] = {(form, name): [] for form in runs for name in ("forward", "both")}
    for turn in range(repeats + 1):
        for (form, name), times in seconds.items():
            started = time.perf_counter()
            runs[form][name]()
            if turn:  # the first one compiles
                times.append(time.perf_counter() - started)
    figures = {}
    for form in runs:
        forward, whole = (statistics.median(seconds[form, name]) for name in ("forward", "both"))
        backward, flops = max(whole - forward, 1e-9), 2.0 * tokens * vocabulary * width
        figures[form] = {
            "forward_ms": round(1e3 * forward, 3),
            "backward_ms": round(1e3 * backward, 3),
            "forward_tflops": round(flops / forward / 1e12, 1),
            "backward_tflops": round(2 * flops / backward / 1e12, 1),
        }
    return figures


def _runs(form: str, tokens: int, vocabulary: int, width: int) -> dict[str, Callable[[], object]]:
    """Returns functions that run the forward pass, or forward and backward pass, of one form. A device without our
    kernels computes both forms portably."""
    import jax

    from sharding.mesh import Target, compiling_for, target
    from sharding.vocab import token_logprobs

    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (1, tokens, width), "bfloat16")
    head = jax.random.normal(keys[1], (vocabulary, width), "bfloat16") * width**-0.5
    targets = jax.random.randint(keys[2], (1, tokens), 0, vocabulary)
    chosen_for = target() if form == "fused" else Target("cpu")  # portable

    def forward(hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        return token_logprobs(hidden, head, targets)

    def forward_and_backward(hidden: jax.Array, head: jax.Array) -> tuple[object, object]:
        values, pull = jax.vjp(forward, hidden, head)
        return values, pull(values)

    def run(function: Callable[..., object]) -> Callable[[], object]:
        compiled = jax.jit(function)

        def wait() -> object:
            with compiling_for(chosen_for):
                return jax.block_until_ready(compiled(hidden, head))

        return wait

    return {"forward": run(forward), "both": run(forward_and_backward)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 16384), ("vocabulary", 152064), ("width", 3584), ("repeats", 10)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
