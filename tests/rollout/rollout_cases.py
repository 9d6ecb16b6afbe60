"""Tiny real models for the engine's tests, prompts for them, and what the full forward pass says about a response."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import models
from models import decoder
from models.config import DecoderConfig, DeepVisionConfig, RopeConfig, TextConfig, VisionConfig
from models.inputs import ModelInput, PackedTokens
from models.processing.processor import pack_patches
from models.qwen2_5_vl.positions import rope_index
from rollout.engine import FinishReason, GenerateRequest, SamplingParams
from rollout.jax_engine import JaxEngine
from sharding.kernels.delta_heads import DeltaHeads
from sharding.walk import Walk

VOCAB = 40
IMAGE, VIDEO, START, END = 36, 37, 38, 39
LONGEST = 64
TOLERANCE = 1e-5  # absolute, float32 log-probs
HANG = 300  # seconds after which a test is taken for hung; nothing here takes more than a few, compilation included


def _text(**changes: Any) -> TextConfig:
    settings = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return TextConfig(vocab_size=VOCAB, head_dim=8, **{**settings, **changes})


TEXT = DecoderConfig("qwen2", _text(tie_word_embeddings=True))
QWEN3 = DecoderConfig("qwen3", dataclasses.replace(TEXT.text, head_norm=True, qkv_bias=False, head_dim=12))
VL = DecoderConfig("qwen2_5_vl", 
    _text(rope=RopeConfig(mrope_section=(2, 1, 1))),
    VisionConfig(
        hidden_size=16, intermediate_size=24, depth=2, num_heads=2, out_hidden_size=32,
        full_attention_layers=(1,), patch_size=4, window_size=16,
    ),
    image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
)  # fmt: skip


# Its prompts may be in VL's window order: a tower without windows reads patches in any order.
QWEN3_VL = DecoderConfig("qwen3_vl",
    dataclasses.replace(QWEN3.text, num_layers=3, rope=RopeConfig(mrope_section=(2, 2, 2), interleaved=True)),
    DeepVisionConfig(
        hidden_size=16, intermediate_size=24, depth=3, num_heads=2, out_hidden_size=32,
        patch_size=4, position_grid=5, deepstack_layers=(0, 1),
    ),
    image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
)  # fmt: skip


# Layers 1 and 3 attend, layers 0 and 2 have states.
QWEN3_5 = DecoderConfig("qwen3_5", dataclasses.replace(
        QWEN3.text, num_layers=4, delta=DeltaHeads(2, 4, 8, 6), attention_interval=2,
        output_gate=True, zero_centred_norms=True, rotated=0.5,
        rope=RopeConfig(mrope_section=(1, 1, 1), interleaved=True),
    ),
    DeepVisionConfig(
        hidden_size=16, intermediate_size=24, depth=3, num_heads=2, out_hidden_size=32,
        patch_size=4, position_grid=5, deepstack_layers=(),
    ),
    image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
)  # fmt: skip


@functools.cache
def build(config: Any, seed: int = 0) -> Any:
    """A model whose next-token distributions are far from uniform, so that errors show."""
    model = models.create(config, seed)
    graphdef, params = models.split(model)
    rng = np.random.default_rng(seed)

    def peaked(x: Any) -> Any:
        gain = 0.7 if x.ndim > 1 else 0.2
        noise = gain * rng.normal(size=x.shape).astype(np.float32) / np.sqrt(x.shape[-1] if x.ndim > 1 else 1)
        return jax.numpy.asarray(np.asarray(x) + noise, dtype=x.dtype)

    return models.merge(graphdef, jax.tree.map(peaked, params))


def prompt_of(ids: Sequence[int]) -> ModelInput:
    positions = np.broadcast_to(np.arange(len(ids), dtype=np.int32), (3, len(ids)))
    return ModelInput(np.asarray(ids, np.int32), positions, np.full(len(ids), -1, np.int32), len(ids))


def text_prompt(length: int, seed: int = 0) -> ModelInput:
    return prompt_of(np.random.default_rng(seed).integers(0, IMAGE, length).tolist())


def media_prompt(*parts: Any, seed: int = 0) -> ModelInput:
    """`parts`: a number of text tokens, ("image", grid) or ("video", grid)."""
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    media = [part for part in parts if not isinstance(part, int)]
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(0, IMAGE, part).tolist()
        else:
            ids += [START, *[IMAGE if part[0] == "image" else VIDEO] * (int(np.prod(part[1])) // 4), END]
    tokens = np.asarray(ids, np.int32)
    assert VL.vision is not None
    patches = rng.normal(size=(sum(int(np.prod(grid)) for _, grid in media), VL.vision.patch_values))
    vision, order = pack_patches(patches.astype(np.float32), [grid for _, grid in media], VL.vision)
    videos = [grid for kind, grid in media if kind == "video"]
    positions, following = rope_index(
        tokens,
        [grid for kind, grid in media if kind == "image"],
        videos,
        [0.5] * len(videos),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        spatial_merge_size=2,
        tokens_per_second=VL.vision.tokens_per_second,
    )
    index = np.full(len(tokens), -1, np.int32)
    index[(tokens == IMAGE) | (tokens == VIDEO)] = order
    return ModelInput(tokens, positions, index, following, vision)


def request(
    rid: str, prompt: ModelInput, *, n: int = 1, seed: int = 0, prefix: Any = (), **how: Any
) -> GenerateRequest:
    return GenerateRequest(rid, prompt, SamplingParams(**how), n, seed, prefix)


def engine(model: Any, **changes: Any) -> JaxEngine:
    return JaxEngine(model, **{"slots": 16, "max_sequence_tokens": LONGEST, "steps_per_sync": 3, **changes})


@dataclasses.dataclass
class Answer:
    """All chunks of one sample, joined."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    finish: FinishReason | None = None
    chunks: int = 0

    def add(self, chunk: Any) -> None:
        assert self.finish is None, "a chunk after the last one"
        assert len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.versions)
        self.ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.versions += chunk.versions
        self.finish = chunk.finish
        self.chunks += 1


async def collect(stream: Any, n: int) -> list[Answer]:
    answers = [Answer() for _ in range(n)]
    async for chunk in stream:
        answers[chunk.sample].add(chunk)
    assert all(answer.finish is not None for answer in answers), "the stream closed before its samples"
    return answers


async def serve(serving: JaxEngine, requests: Sequence[GenerateRequest], lossy: bool = False) -> list[Any]:
    """Submits all at once, as the runtime does: paused, in order, then resumed. Returns the answers to each, or, where
    some may be lost, the error that it was lost with."""
    await serving.pause()
    streams = [collect(serving.generate(each), each.n) for each in requests]
    await serving.resume()
    return await asyncio.gather(*streams, return_exceptions=lossy)


async def until(holds: Callable[[], Any]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def run(serving: JaxEngine, *requests: GenerateRequest) -> list[list[Answer]]:
    return asyncio.run(asyncio.wait_for(serve(serving, requests), HANG))


def _packed(model: Any, prompt: ModelInput, response: Sequence[int]) -> PackedTokens:
    P, R = len(prompt), len(response)
    T = LONGEST * -(-(P + R) // LONGEST)
    tokens, segments = np.zeros((1, T), np.int32), np.zeros((1, T), np.int32)
    positions, index = np.zeros((3, 1, T), np.int32), np.full((1, T), -1, np.int32)
    tokens[0, : P + R] = [*prompt.token_ids_T, *response]
    segments[0, : P + R] = 1
    positions[:, 0, :P] = prompt.positions_3T
    positions[:, 0, P : P + R] = prompt.next_position + np.arange(R)
    index[0, :P] = prompt.feature_index_T
    predecessor = np.maximum(np.arange(T, dtype=np.int32) - 1, 0)[None]
    inputs = PackedTokens(tokens, segments, np.zeros_like(tokens), positions, predecessor, index, prompt.vision)
    return inputs if model.config.text.delta is None else inputs.with_runs()


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef: Any, params: Any, inputs: PackedTokens) -> Any:
    model = models.merge(graphdef, params)
    return jnp.einsum("TD,VD->TV", decoder.hidden_states(model, inputs, Walk())[0], model.head_weight(Walk()))


@functools.partial(jax.jit, static_argnums=(0, 3))
def _logprobs(graphdef: Any, params: Any, inputs: PackedTokens, never: tuple[int, ...]) -> Any:
    return decoder.logprobs(models.merge(graphdef, params), inputs, Walk(), never_sampled=never)[0][0]


def full_logits(model: Any, prompt: ModelInput, response: Sequence[int]) -> np.ndarray:
    """The logits that each token of the response is drawn from, by the training forward pass, unpacked."""
    logits = _logits(*models.split(model), _packed(model, prompt, response))
    return np.array(logits[len(prompt) - 1 : len(prompt) + len(response) - 1])


def full_logprobs(
    model: Any, prompt: ModelInput, response: Sequence[int], temperature: float = 1.0, never: tuple[int, ...] = ()
) -> np.ndarray:
    """The trainer's log-probs (`models.decoder.logprobs`) of the tokens of the response."""
    inputs = _packed(model, prompt, response)
    inputs = dataclasses.replace(inputs, temperatures_BT=np.full(inputs.tokens_BT.shape, temperature, np.float32))
    logprobs = _logprobs(*models.split(model), inputs, never)
    return np.array(logprobs[len(prompt) : len(prompt) + len(response)])


def assert_logprobs(
    model: Any, prompt: ModelInput, answer: Answer, temperature: float = 1.0, never: tuple[int, ...] = ()
) -> None:
    expected = full_logprobs(model, prompt, answer.ids, temperature, never)
    np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=TOLERANCE)


def assert_equal(answers: Iterable[Any], expected: Iterable[Any]) -> None:
    """The same tokens and ends, and log-probs up to rounding."""
    for group, alone in zip(answers, expected, strict=True):
        assert [(a.ids, a.finish) for a in group] == [(e.ids, e.finish) for e in alone]
        for answer, other in zip(group, alone, strict=True):
            np.testing.assert_allclose(answer.logprobs, other.logprobs, rtol=0, atol=TOLERANCE)
