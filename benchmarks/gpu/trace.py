"""Traces two training steps and eight rounds of decoding of a random 1.5B model, and names the largest kernels.

The programs are those of the parts `train` (16,384 tokens, layers computed again) and `engine` (64 prompts): after
these parts, the cache of compiled programs has them. Times are milliseconds of all steps, or rounds, together; a gap is
a time of more than 20 microseconds in which the GPU was idle. A kernel's kind is read off its name.

Predicted: training: matrix products 60-65 %, attention 10-15, element-wise 15-20, head 13; decoding: 525 kernels and 3
copies to the host a token.
"""

from __future__ import annotations

import asyncio
import functools
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import part

sys.path.remove(str(pathlib.Path(__file__).resolve().parent))  # Python has a module called `trace`, too

STEPS, ROUNDS = 2, 8


def measure(figures: part.Figures, dry: bool) -> None:
    if dry:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from fluxjax.base.process import use_compile_cache

    use_compile_cache()
    for name, traced in (("training", _training), ("decoding", _decoding)):
        with tempfile.TemporaryDirectory(prefix="trace-") as folder:
            figures.attempt(name, functools.partial(traced, dry, pathlib.Path(folder)))


def _training(dry: bool, folder: pathlib.Path) -> dict[str, Any]:
    import jax
    from gpu import kernel_times, random_qwen

    from fluxjax.config import Remat

    config = random_qwen.config(256 if dry else 16384, Remat.LAYER)
    learner = random_qwen.learner(config, random_qwen.sizes(dry))
    microbatches = random_qwen.microbatches(config, learner.text, 8)
    learner.gradients.compile_ahead(learner.params, [microbatches[0].batch], scores=False)
    for _ in range(2):
        learner.step(microbatches)
    with jax.profiler.trace(folder, profiler_options=_options()):
        for _ in range(STEPS):
            learner.step(microbatches)
    return {"steps": STEPS, **kernel_times.summary(kernel_times.read(folder))}


def _decoding(dry: bool, folder: pathlib.Path) -> dict[str, Any]:
    from gpu import engine_turns, kernel_times

    samples, prompt, new = (8, 16, 13) if dry else (64, 512, 128)
    rounds = Rounds(folder, samples)
    engine = engine_turns.engine(dry, samples, 29 if dry else 768)
    engine_turns.Calls(engine, rounds)
    vocabulary = engine._limits.vocabulary
    turn = functools.partial(engine_turns.generate, engine, vocabulary, samples, prompt, new)
    asyncio.run(turn())
    rounds.left = asked = 2 if dry else ROUNDS
    asyncio.run(turn())
    found = kernel_times.summary(kernel_times.read(folder))
    tokens = rounds.tokens
    per_token = {
        "kernels_per_token": round(found["kernels"] / tokens, 1),
        "copies_to_host_per_token": round(found["copies_to_host"]["count"] / tokens, 2),
    }
    return {"rounds": asked, "tokens": tokens, **per_token, **found}


def _options() -> Any:
    """Settings of the profiler. They leave out Python's calls: these would fill the trace and slow down the host."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    return options


class Rounds:
    """Traces the next rounds that decode all samples, `left` of them, with what the host does in between."""

    def __init__(self, folder: pathlib.Path, samples: int) -> None:
        self._folder, self._samples, self.left, self._tracing = str(folder), samples, 0, False
        self.tokens = 0  # of a sample, in all traced rounds

    def __call__(self, decode: Callable[[], Any], plan: Any) -> Any:
        import jax

        if not self.left or len(plan[0]) < self._samples:
            return decode()
        if not self._tracing:
            jax.profiler.start_trace(self._folder, profiler_options=_options())
            self._tracing = True
        new = decode()
        self.tokens += int(plan[1].steps)
        self.left -= 1
        if not self.left:
            new.read()  # the device has ended all rounds
            jax.profiler.stop_trace()
            self._tracing = False
        return new


if __name__ == "__main__":
    sys.exit(part.main(measure, __doc__))
