"""Conversations of several turns, with images and videos in several turns, as engines get them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from rollout_cases import END, IMAGE, START, VIDEO, VL, Answer, collect

from models.inputs import ModelInput
from models.processing.processor import pack_patches
from models.qwen2_5_vl.positions import rope_index
from rollout.engine import Engine, GenerateRequest, SamplingParams

WORDS: dict[str, Any] = {"forbidden_ids": (IMAGE, VIDEO, START, END)}
Part = tuple[Any, ...]  # ("text", ids), or ("image" or "video", grid, seed of the pixels)


def text(length: int, seed: int) -> Part:
    return "text", tuple(np.random.default_rng(seed).integers(0, IMAGE, length).tolist())


def conversation(parts: Sequence[Part]) -> ModelInput:
    """The prompt of these parts. Equal media have equal pixels in all prompts."""
    ids: list[int] = []
    media = [part for part in parts if part[0] != "text"]
    for kind, what, *_ in parts:
        if kind == "text":
            ids += what
        else:
            ids += [START, *[IMAGE if kind == "image" else VIDEO] * (int(np.prod(what)) // 4), END]
    tokens, vision = np.asarray(ids, np.int32), None
    grids = {kind: [grid for name, grid, _ in media if name == kind] for kind in ("image", "video")}
    assert VL.vision is not None
    positions, following = rope_index(
        tokens,
        grids["image"],
        grids["video"],
        [0.5] * len(grids["video"]),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        spatial_merge_size=2,
        tokens_per_second=VL.vision.tokens_per_second,
    )
    index = np.full(len(tokens), -1, np.int32)
    if media:
        pixels = [
            np.random.default_rng(seed).normal(size=(int(np.prod(grid)), VL.vision.patch_values))
            for _, grid, seed in media
        ]
        vision, order = pack_patches(
            np.concatenate(pixels).astype(np.float32), [grid for _, grid, _ in media], VL.vision
        )
        index[(tokens == IMAGE) | (tokens == VIDEO)] = order
    return ModelInput(tokens, positions, index, following, vision)


@dataclasses.dataclass
class Episode:
    """A conversation with an engine: the model's answers and what was said in between."""

    session: str
    number: int
    parts: list[Part]
    seed: int = 0
    turns: int = 0
    prefilled: int = 0  # tokens of all prompts so far

    def request(self, rid: str, n: int = 1, session: bool = True, **how: Any) -> GenerateRequest:
        """The request for the next turn; without a session, the whole history is computed."""
        sampling = SamplingParams(**{"max_new_tokens": 9, "temperature": 0.0, **WORDS, **how})
        samples = tuple(range(n)) if n > 1 else (self.number,)
        name = self.session if session else ""
        return GenerateRequest(rid, conversation(self.parts), sampling, n, self.seed, (), samples, 0, name)

    def add(self, answer: Answer, *observation: Part) -> None:
        self.parts += [("text", answer.ids), *observation]
        self.turns += 1


async def ask(engine: Engine, request: GenerateRequest) -> list[Answer]:
    return await collect(engine.generate(request), request.n)
