"""Answers one prompt on an engine that is made for it, as the command line and notebooks need it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from models.decoder import Decoder
from models.inputs import ModelInput

from .buckets import doubling
from .engine import FinishReason, GenerateRequest, SamplingParams, TokenChunk
from .jax_engine import JaxEngine

LEAST_CACHE = 256  # tokens; doubled from here on, so that prompts of similar length share their compiled programs


@dataclasses.dataclass(frozen=True)
class Generation:
    """A response: ids and log-probs as sampled (`SamplingParams`), and why it ended; ABORT: the caller ended it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason


async def generate_once(
    model: Decoder,
    prompt: ModelInput,
    sampling: SamplingParams,
    *,
    seed: int = 0,
    on_chunk: Callable[[TokenChunk], bool] | None = None,
) -> Generation:
    """The response to one prompt. The engine copies the weights: keep no `model` where memory is short.

    `on_chunk` gets each chunk as it comes and ends the response by returning True; the chunk still counts. Raises
    EngineError for a request that the engine refuses, or a model that computes no finite log-probs.
    """
    room = doubling(len(prompt) + sampling.max_new_tokens, LEAST_CACHE)
    engine = JaxEngine(model, slots=1, max_sequence_tokens=room)
    del model
    stream = engine.generate(GenerateRequest("single", prompt, sampling, seed=seed))
    chunks: list[TokenChunk] = []
    try:
        async for chunk in stream:
            chunks.append(chunk)
            if on_chunk is not None and on_chunk(chunk):
                break
    finally:
        await stream.aclose()
        await engine.close()
    return Generation(
        tuple(token for chunk in chunks for token in chunk.token_ids),
        tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        chunks[-1].finish or FinishReason.ABORT,
    )
