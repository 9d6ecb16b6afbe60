"""Generates greedily on the embedded engine, in a process of its own: run by `benchmarks/generate.py`.

This process samples the weights, and writes them as a Hugging Face folder for the peer.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import numpy as np
from common import Channel, peak_rss_mib

import models
from models.inputs import ModelInput
from models.registry import read_config
from rollout.engine import GenerateRequest, SamplingParams
from rollout.jax_engine import JaxEngine


def prompt(ids: np.ndarray) -> ModelInput:
    positions = np.broadcast_to(np.arange(len(ids), dtype=np.int32), (3, len(ids)))
    return ModelInput(ids, positions, np.full(len(ids), -1, np.int32), len(ids))


async def generate(engine: JaxEngine, prompts: np.ndarray, new_tokens: int, number: int) -> tuple[float, list[Any]]:
    """Seconds from queueing the first request to receiving the last token, and the tokens for each prompt."""
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0)
    requests = [GenerateRequest(f"{number}-{i}", prompt(ids), sampling) for i, ids in enumerate(prompts)]

    async def collect(stream: Any) -> list[int]:
        return [token async for chunk in stream for token in chunk.token_ids]

    await engine.pause()  # all requests are queued before the first is served
    started = time.perf_counter()
    streams = [engine.generate(request) for request in requests]
    await engine.resume()
    tokens = list(await asyncio.gather(*map(collect, streams)))
    return time.perf_counter() - started, tokens


def main(settings: Mapping[str, Any]) -> None:
    channel = Channel()
    config = read_config({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
                          "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
                          "max_position_embeddings": 4096, **settings["shape"]})  # fmt: skip
    model = models.create(config, seed=0)
    models.save(model, settings["folder"])
    prompt_tokens, new_tokens = settings["prompt_tokens"], settings["new_tokens"]
    slots = max(settings["batches"])
    engine = JaxEngine(model, slots=slots, max_sequence_tokens=prompt_tokens + new_tokens)
    del model
    channel.say(versions={name: importlib.metadata.version(name) for name in ("jax", "flax")})
    for request in channel.requests():
        batch, number = request["batch"], request["number"]
        rng = np.random.default_rng([batch, number])
        prompts = rng.integers(0, config.text.vocab_size, (batch, prompt_tokens), dtype=np.int32)
        seconds, tokens = asyncio.run(generate(engine, prompts, new_tokens, number))
        channel.say(seconds=seconds, tokens=tokens)
    channel.say(peak_rss_mib=peak_rss_mib())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
