"""Measures the embedded engine with a random model of Qwen2.5-1.5B's shape in bfloat16: 64 prompts at once, and 8.

Each prompt has 512 tokens and gets 256 new ones; a first turn compiles. Most rounds of decoding give each sample
`steps` tokens; figures are of these rounds. `round_ms` is from the begin of one round to the begin of the next;
`call_ms` is the time from handing the plan to the device until the tokens are on the host, which is longer if the next
round is handed over in between; `program_ms` the program of the same round alone, many times in a row. `host_gap_ms` =
round_ms - program_ms. `floor_ms` is the time a token that reading all weights, and the keys and values of half-finished
responses, would take at the memory's full speed (H100: 3.35 TB/s).

Measured with gathered pages (`results/gpu_h100.json`): 64 prompts 4.7 ms a token, 8 prompts 3.06. Predicted for
decoding in place: 4.1-4.6 ms and 2.8-3.1. Attention reads each entry once and the gathering of a round falls away, but
a layer still launches as many kernels.
"""

from __future__ import annotations

import asyncio
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import part

if TYPE_CHECKING:
    from gpu.engine_turns import Calls

    from rollout.jax_engine import JaxEngine

TURNS = 2  # timed turns, after one that compiles


def measure(figures: part.Figures, dry: bool) -> None:
    if dry:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    from gpu import engine_turns, random_qwen

    from fluxjax.base.process import use_compile_cache

    use_compile_cache()
    most, few, prompt, new = (8, 2, 16, 13) if dry else (64, 8, 512, 256)
    began = time.perf_counter()
    engine = engine_turns.engine(dry, most, prompt + new)
    calls = engine_turns.Calls(engine)
    figures.add(device=jax.devices()[0].device_kind, prompt_tokens=prompt, new_tokens=new, slots=most)
    figures.add(start_seconds=round(time.perf_counter() - began, 1))

    for samples in (most, few):
        turn = functools.partial(_turn, engine, calls, samples, prompt, new)
        figures.attempt(f"{samples} prompts, first turn", turn)
        figures.attempt(f"{samples} prompts", functools.partial(_case, turn, engine, calls, samples, prompt, new))
    figures.add(programs=len(engine.compiled_shapes), memory=random_qwen.memory(jax.devices()[0]))


def _turn(engine: JaxEngine, calls: Calls, samples: int, prompt: int, new: int) -> dict[str, float]:
    """The seconds until all responses have a token, and until they are complete."""
    from gpu import engine_turns

    calls.clear()
    vocabulary = engine._limits.vocabulary
    first, all_tokens = asyncio.run(engine_turns.generate(engine, vocabulary, samples, prompt, new))
    return part.rounded({"prefill_seconds": first, "seconds": all_tokens})


def _case(
    turn: Callable[[], dict[str, float]], engine: JaxEngine, calls: Calls, samples: int, prompt: int, new: int
) -> dict[str, Any]:
    """The figures of the quickest of some turns."""
    import jax
    from gpu import random_qwen

    turns = [(turn(), calls.full_rounds(samples), calls.calls) for _ in range(TURNS)]
    taken, rounds, calls_of_turn = min(turns, key=lambda found: found[0]["seconds"])
    widths = [int(call.plan[1].steps) for call, _ in rounds]
    steps = max(set(widths), key=lambda width: width * widths.count(width))
    same = [found for found, width in zip(rounds, widths, strict=True) if width == steps]
    whole = [(call, seconds) for call, seconds in same if call.plan[1].remaining_B[0] >= steps]
    round_ms = 1e3 * statistics.median(seconds for _, seconds in whole)
    middle = whole[len(whole) // 2][0].plan
    program_ms = 1e3 * calls.program_seconds(middle)
    weights = sum(x.nbytes for x in jax.tree.leaves(engine._device.params))
    text = random_qwen.sizes(dry=jax.default_backend() == "cpu").text
    read = weights + 2 * 2 * text.num_layers * text.num_kv_heads * text.head_dim * samples * (prompt + new // 2)
    floor_ms = 1e3 * read / random_qwen.bandwidth()
    return {
        **taken,
        "tokens_per_second": round(samples * new / taken["seconds"]),
        "starts": sum(call.plan is None for call in calls_of_turn),
        "rounds": len(calls_of_turn) - sum(call.plan is None for call in calls_of_turn),
        "steps": steps,
        "rows_computed": len(middle[1].slot_B),
        "longest": int(middle[1].length_B.max()),
        **part.rounded(
            {
                "round_ms": round_ms,
                "call_ms": 1e3 * statistics.median(call.ended - call.began for call, _ in whole),
                "program_ms": program_ms,
                "host_gap_ms": round_ms - program_ms,
                "ms_per_token": round_ms / steps,
                "decode_tokens_per_second": 1e3 * samples * steps / round_ms,
                "floor_ms": floor_ms,
                "share_of_floor": floor_ms * steps / round_ms,
            }
        ),
    }


if __name__ == "__main__":
    sys.exit(part.main(measure, __doc__))
