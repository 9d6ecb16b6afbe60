"""Conversations of several turns, with images and videos in several turns, as engines get them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from rollout_cases import VL, Answer, collect

from models.config import DecoderConfig
from models.inputs import ModelInput
from models.processing.processor import pack_patches
from models.qwen2_5_vl.positions import rope_index
from rollout.engine import Engine, GenerateRequest, SamplingParams

Part = tuple[Any, ...]  # ("text", ids), or ("image" or "video", grid, seed of the pixels)


def text(length: int, seed: int) -> Part:
    """Random text without special tokens."""
    return "text", tuple(np.random.default_rng(seed).integers(8, 36, length).tolist())


def conversation(parts: Sequence[Part], config: DecoderConfig = VL) -> ModelInput:
    """The prompt of these parts. Equal media have equal pixels in all prompts."""
    ids: list[int] = []
    media = [part for part in parts if part[0] != "text"]
    pads = {"image": config.image_token_id, "video": config.video_token_id}
    for kind, what, *_ in parts:
        if kind == "text":
            ids += what
        else:
            ids += [config.vision_start_token_id, *[pads[kind]] * (int(np.prod(what)) // 4), config.vision_end_token_id]
    tokens, vision = np.asarray(ids, np.int32), None
    grids = {kind: [grid for name, grid, _ in media if name == kind] for kind in pads}
    positions, following = rope_index(
        tokens,
        grids["image"],
        grids["video"],
        [0.5] * len(grids["video"]),
        image_token_id=pads["image"],
        video_token_id=pads["video"],
        spatial_merge_size=2,
        tokens_per_second=2,
    )
    index = np.full(len(tokens), -1, np.int32)
    if media:
        assert config.vision is not None
        width = config.vision.patch_values
        pixels = [np.random.default_rng(seed).normal(size=(int(np.prod(grid)), width)) for _, grid, seed in media]
        vision, order = pack_patches(
            np.concatenate(pixels).astype(np.float32), [grid for _, grid, _ in media], config.vision
        )
        index[np.isin(tokens, list(pads.values()))] = order
    return ModelInput(tokens, positions, index, following, vision)


@dataclasses.dataclass
class Episode:
    """A conversation with an engine: the model's answers and what was said in between."""

    session: str
    number: int
    parts: list[Part]
    seed: int = 0
    config: DecoderConfig = VL
    turns: int = 0

    def request(self, rid: str, n: int = 1, session: bool = True, **how: Any) -> GenerateRequest:
        """The request for the next turn; without a session, the whole history is computed."""
        config = self.config
        never = config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id
        sampling = SamplingParams(**{"max_new_tokens": 9, "temperature": 0.0, "forbidden_ids": never, **how})
        samples = tuple(range(n)) if n > 1 else (self.number,)
        prompt, name = conversation(self.parts, config), self.session if session else ""
        return GenerateRequest(rid, prompt, sampling, n, self.seed, (), samples, 0, name)

    def add(self, answer: Answer, *observation: Part) -> None:
        self.parts += [("text", answer.ids), *observation]
        self.turns += 1


async def ask(engine: Engine, request: GenerateRequest) -> list[Answer]:
    return await collect(engine.generate(request), request.n)
