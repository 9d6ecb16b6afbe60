"""Compares rounds of 4 and 64 tokens: the embedded engine, 8 prompts of 512 tokens that get 256 new ones.

With more tokens a round, the device waits less often for the host, but a prompt waits longer for the slot of an ended
sample. Rounds are dispatched ahead, but for those of the case `4, read first`; in the case `adapting` the engine
chooses their lengths. The model is that of the part `engine`; `gpu_suite.py` runs this part a second time with command
buffers (CUDA graphs) for loops and conditions. Each engine compiles in a first turn; then the engines alternate, and
medians are compared.
"""

from __future__ import annotations

import asyncio
import functools
import os
import statistics
import sys
from typing import TYPE_CHECKING, Any

import part

if TYPE_CHECKING:
    from rollout.jax_engine import JaxEngine

# Tokens a round, and whether rounds are dispatched ahead; the first case is what others are compared with.
CASES = {"4, read first": (4, False), "4": (4, True), "64": (64, True), "adapting": (0, True)}
TURNS = 3


def measure(figures: part.Figures, dry: bool) -> None:
    if dry:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    from gpu import random_qwen

    from fluxjax.base.process import use_compile_cache
    from rollout.jax_engine import JaxEngine

    use_compile_cache()
    samples, prompt, new = (2, 16, 13) if dry else (8, 512, 256)
    figures.add(device=jax.devices()[0].device_kind, samples=samples, prompt_tokens=prompt, new_tokens=new)
    model = random_qwen.drawn(random_qwen.sizes(dry), "bfloat16")
    engines: dict[str, JaxEngine] = {}
    for case, (steps, ahead) in CASES.items():
        engine = JaxEngine(
            model,
            slots=samples,
            max_sequence_tokens=prompt + new,
            compute_dtype="bfloat16",
            steps_per_sync=steps,
            ahead=ahead,
        )
        name = f"rounds of {case}, first turn"
        figures.attempt(name, functools.partial(_first, engines, engine, case, samples, prompt, new))
    figures.attempt("ms_per_token", functools.partial(_compared, engines, samples, prompt, new))


def _first(engines: dict[str, JaxEngine], engine: JaxEngine, case: str, *sizes: int) -> dict[str, float]:
    """The seconds of a turn that compiles. Adds the engine to `engines` if the turn ends well."""
    seconds = _decoding_seconds(engine, *sizes)
    engines[case] = engine
    return part.rounded({"decoding_seconds": seconds})


def _compared(engines: dict[str, JaxEngine], samples: int, prompt: int, new: int) -> dict[str, Any]:
    """Milliseconds a token from the first token on: the medians, and the ratios to the first case."""
    taken: dict[str, list[float]] = {case: [] for case in engines}
    for _ in range(TURNS):
        for case, engine in engines.items():
            taken[case].append(1e3 * _decoding_seconds(engine, samples, prompt, new) / (new - 1))
    medians = {case: statistics.median(times) for case, times in taken.items()}
    first = next(iter(medians.values()))
    return {f"rounds of {case}": part.rounded({"ms": ms, "ratio": ms / first}) for case, ms in medians.items()}


def _decoding_seconds(engine: JaxEngine, samples: int, prompt: int, new: int) -> float:
    """The seconds from the first token of all samples until all are complete."""
    from gpu import engine_turns

    vocabulary = engine._limits.vocabulary
    first, complete = asyncio.run(engine_turns.generate(engine, vocabulary, samples, prompt, new))
    return complete - first


if __name__ == "__main__":
    sys.exit(part.main(measure, __doc__))
