"""Measures the training step of a random model of Qwen2.5-1.5B's shape on one GPU: speed, and memory beside the
pre-flight's.

Weights are float32 and computed with in bfloat16; a step is one microbatch, a packed row of 8 segments, and the update.
A first case computes layers again in the backward pass. A second case keeps the products with weights, a third one has
four microbatches for each update, as steps of RL have several. The last case keeps all activations of a shorter row,
with moments in bfloat16.

MFU = (6 N T + A) / (seconds * 989e12) with N weights (the embedding counts once, as the head), T tokens and
A = 12 * layers * heads * head_dim * pairs: two products forward and four backward, 2 FLOPs each, over the pairs of
tokens that see each other. Recomputation does not count.

An H100 took 398 and 374 ms for the first two cases with attention by Mosaic's kernels, 412 and 391 by Triton's (MFU
40.7 and 43.4 %, 39.4 and 41.5 %), and 216 ms for the last by Triton's. The update reads and writes about 50 GB, 15 to
20 ms. Predicted for four microbatches: 1,420-1,450 ms, MFU 44.7-45.7 %.
"""

from __future__ import annotations

import functools
import os
import re
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import part

if TYPE_CHECKING:
    from fluxjax.learner.learner import Learner

SEGMENTS, STEPS = 8, 5


def measure(figures: part.Figures, dry: bool) -> None:
    if dry:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    from gpu import random_qwen

    from fluxjax.base.process import use_compile_cache
    from fluxjax.config import Remat
    from models.decoder import parameter_count

    use_compile_cache()
    tokens = 256 if dry else 16384
    cases = {
        "layers computed again": (tokens, Remat.LAYER, 1),
        "products kept": (tokens, Remat.DOTS, 1),
        "products kept, 4 microbatches": (tokens, Remat.DOTS, 4),
        "all kept": (tokens // 2, Remat.NONE, 1),
    }
    model = random_qwen.sizes(dry)
    began = time.perf_counter()
    learner = random_qwen.learner(random_qwen.config(tokens, Remat.LAYER), model)
    figures.add(
        device=jax.devices()[0].device_kind,
        weights=parameter_count(random_qwen.models.abstract(model)),
        draw_seconds=round(time.perf_counter() - began, 1),
    )
    for name, case in cases.items():
        figures.attempt(name, functools.partial(_case, learner, *case))


def _case(learner: Learner, tokens: int, remat: Any, microbatches: int) -> dict[str, Any]:
    from gpu import random_qwen

    from fluxjax.algorithms import find_algorithm
    from fluxjax.config import DType, Remat
    from sharding.mesh import Target

    config, device = learner.config, learner.mesh.devices.flat[0]
    config.packing.tokens_per_row, config.sharding.remat = tokens, remat
    if remat is Remat.NONE:
        config.optim.moments_dtype = DType.BFLOAT16
    learner.opt_state = None  # frees its memory for the new state
    learner.reset(find_algorithm(config.algorithm).token_loss)  # other settings: other programs
    steps = random_qwen.microbatches(config, learner.text, SEGMENTS) * microbatches
    before = random_qwen.memory(device)
    began = time.perf_counter()
    learner.gradients.compile_ahead(learner.params, [steps[0].batch], scores=False)
    (program,) = (future.result() for future in learner.gradients._ahead.values())
    compiled = time.perf_counter()
    print(f"remat={remat.value}: compiled in {compiled - began:.1f} s", file=sys.stderr, flush=True)
    predicted = _predicted(learner, program, steps[0].batch)
    first = learner.step(steps)
    first_seconds = time.perf_counter() - compiled
    learner.step(steps)
    seconds = [_timed(learner, steps) for _ in range(STEPS)]
    median = statistics.median(seconds)
    flops = microbatches * _flops(learner, tokens)
    found = random_qwen.memory(device)
    return {
        "tokens": tokens,
        "segments": SEGMENTS,
        "microbatch_shape": list(steps[0].batch.inputs.tokens_BT.shape),
        "kernels": sorted(_kernels(program)),
        "compile_seconds": round(compiled - began, 1),
        "first_step_seconds": round(first_seconds, 1),
        "ms": round(1e3 * median, 2),
        "ms_all": [round(1e3 * taken, 2) for taken in seconds],
        "tokens_per_second": round(microbatches * tokens / median),
        "tflops": round(flops / median / 1e12, 1),
        "mfu": round(flops / median / random_qwen.PEAK, 4) if Target.of(device).is_gpu else None,
        "loss": first["loss"],
        "grad_norm": first["grad_norm"],
        "memory": found,
        # The device remembers the highest peak so far, which may be an earlier case's.
        "peak_is_of_this_case": found.get("peak_gib", 0) > before.get("peak_gib", 0),
        "predicted_gib": predicted,
    }


def _timed(learner: Learner, steps: Any) -> float:
    """The seconds of a step. It fetches its metrics, so that it is computed completely."""
    began = time.perf_counter()
    learner.step(steps)
    return time.perf_counter() - began


def _predicted(learner: Learner, program: Any, batch: Any) -> dict[str, float]:
    """The pre-flight's sum for the very program that computes the gradients, by kind, in GiB."""

    from fluxjax.sizing.account import GIB
    from fluxjax.sizing.run_programs import bytes_on_device
    from sharding.weights import like

    memory = program.memory_analysis()
    trained = bytes_on_device(learner.trained(learner.params))
    kinds = {
        "master weights": bytes_on_device(learner.params),
        "moments": bytes_on_device(learner.opt_state),
        "gradients": trained,
        "cast weights": bytes_on_device(learner.gradients.copies(like(learner.params))),
        "batches": 2 * bytes_on_device(learner.gradients.strategy.place(batch)),  # the next batch is placed meanwhile
        "temporaries": memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
    }
    return {name: round(size / GIB, 3) for name, size in {**kinds, "sum": sum(kinds.values())}.items()}


def _kernels(program: Any) -> set[str]:
    """The kernels of this project that a program calls; none on a CPU."""
    return set(re.findall(r"(?:(?:flash|head)_kernels|hopper)_\w+", program.as_text() or ""))


def _flops(learner: Learner, tokens: int) -> float:
    """The FLOPs of a step; the module gives the formula."""
    import jax

    text, length = learner.text, tokens // SEGMENTS
    pairs = SEGMENTS * length * (length + 1) / 2
    weights = sum(weight.size for weight in jax.tree.leaves(learner.params))
    return 6 * weights * tokens + 12 * text.num_layers * text.num_heads * text.head_dim * pairs


if __name__ == "__main__":
    sys.exit(part.main(measure, __doc__))
