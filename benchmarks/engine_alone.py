"""Measures speed and memory of the embedded engine alone, with random weights: decoding, prefill, the paged cache.

    python benchmarks/engine_alone.py                       a small shape, one, eight and a group of eight samples
    python benchmarks/engine_alone.py --shape 0.5b          Qwen2.5-0.5B's shape
    python benchmarks/engine_alone.py --kv-tokens 640       a cache without room for all samples: some are preempted
    python benchmarks/engine_alone.py --shape tiny --repeats 1 --new-tokens 4      whether it runs

Prints one JSON line on standard output and its progress on standard error. What is measured and how:
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import numpy as np
from common import cores, peak_rss_mib, spread

import models
from models.inputs import ModelInput
from models.registry import read_config
from rollout.engine import EngineError, GenerateRequest, SamplingParams
from rollout.jax_engine import JaxEngine

SHAPES = {
    "0.5b": {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2},
    "small": {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
              "num_attention_heads": 4, "num_key_value_heads": 2},
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip
CASES = {"one": (1, 1), "eight": (8, 1), "group of eight": (1, 8)}  # prompts, and samples of each


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 2 with one line on standard error for settings that cannot work."""
    options = _parser().parse_args(argv)
    if min(options.repeats, options.prompt_tokens) < 1 or options.new_tokens < 2:
        print("error: --repeats and --prompt-tokens must be at least 1, --new-tokens 2", file=sys.stderr)
        return 2
    try:
        print(json.dumps(asyncio.run(measure(options))))
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the whole benchmark. Raises EngineError for a cache that has no room for a single sample."""
    load_before = os.getloadavg()[0]
    shape = SHAPES[options.shape]
    config = read_config({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
                          "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
                          "max_position_embeddings": 32768, **shape})  # fmt: skip
    model = models.create(config, seed=0)
    length = options.prompt_tokens + options.new_tokens
    engine = JaxEngine(
        model, slots=8, max_sequence_tokens=length, compute_dtype=options.dtype, kv_tokens=options.kv_tokens
    )
    del model
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    for turn in range(1 + options.repeats):  # the first one compiles
        for name, (prompts, samples) in CASES.items():
            rng = np.random.default_rng([turn, prompts])
            ids = rng.integers(0, shape["vocab_size"], (prompts, options.prompt_tokens), dtype=np.int32)
            measured = await _generate(engine, ids, samples, options.new_tokens)
            seconds[name] += [measured] if turn else []
            print(f"{name}, round {turn}: {measured[0]:.3f} + {measured[1]:.3f} s", file=sys.stderr)
    usage, device = engine.cache_usage, jax.local_devices()[0]
    memory = device.memory_stats() or {}
    return {
        "benchmark": "engine_alone",
        "device": device.device_kind,
        "shape": shape,
        "dtype": options.dtype,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "cores": cores(),
        "load_average_before": round(load_before, 2),
        "repeats": options.repeats,
        "cases": {name: _case(seconds[name], prompts, samples, options) for name, (prompts, samples) in CASES.items()},
        "cache": {"bytes": usage.bytes, "pages": usage.pages, "peak_pages": usage.peak_pages},
        "preemptions": engine.stats().preemptions,
        "programs": len(engine.compiled_shapes),
        "peak_rss_mib": peak_rss_mib(),
        "peak_device_mib": round(memory.get("peak_bytes_in_use", 0) / 2**20, 1),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "flax")},
    }


def _case(
    seconds: list[tuple[float, float]], prompts: int, samples: int, options: argparse.Namespace
) -> dict[str, Any]:
    prefill, decode = zip(*seconds, strict=True)
    decoded = prompts * samples * (options.new_tokens - 1)
    return {
        "prefill_seconds": spread(prefill),
        "decode_seconds": spread(decode),
        "prefill_tokens_per_second": round(prompts * options.prompt_tokens / statistics.median(prefill), 1),
        "decode_tokens_per_second": round(decoded / statistics.median(decode), 1),
    }


async def _generate(engine: JaxEngine, ids: np.ndarray, samples: int, new_tokens: int) -> tuple[float, float]:
    """Seconds until every sample has its first token, and from then until every sample is complete."""
    tokens = ids.shape[1]
    positions = np.broadcast_to(np.arange(tokens, dtype=np.int32), (3, tokens))
    sampling = SamplingParams(max_new_tokens=new_tokens)
    first: dict[tuple[int, int], float] = {}

    async def read(number: int, stream: Any) -> None:
        async for chunk in stream:
            first.setdefault((number, chunk.sample), time.perf_counter())

    await engine.pause()  # all requests are queued before the first is served
    streams = []
    for number, row in enumerate(ids):
        prompt = ModelInput(row, positions, np.full(tokens, -1, np.int32), tokens)
        streams.append(engine.generate(GenerateRequest(f"{number}", prompt, sampling, n=samples, seed=number)))
    begin = time.perf_counter()
    await engine.resume()
    await asyncio.gather(*(read(number, stream) for number, stream in enumerate(streams)))
    return max(first.values()) - begin, time.perf_counter() - max(first.values())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument(
        "--kv-tokens", type=int, default=0, help="tokens in the cache (default: all slots at full length)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds of all cases (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
