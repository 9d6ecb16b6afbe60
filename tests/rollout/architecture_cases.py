"""Tiny random checkpoints of architectures that SGLang and `transformers` have, prompts for them, and all sides.

`TransformersModel` says what log-probs are right, and so does `TrainerModel` for architectures that the trainer has.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from protocol_cases import client_at, command
from rollout_cases import full_logprobs, prompt_of

import models
from models.config import Grid, PatchLayout
from models.hf import SINGLE
from models.inputs import ModelInput
from models.processing import Processor
from models.processing.processor import PADS
from models.processing.tiny import SPECIAL_TOKENS
from models.processing.tiny import build as build_processor
from models.registry import ARCHITECTURES, read_config, write_config
from rollout import wire
from rollout.engine import EngineError
from rollout.local_server import LocalServer
from rollout.sglang import ServerClient
from rollout.weights.published import Checksums

PATCH_VALUES = 3 * 2 * 16 * 16  # channels, frames, rows, columns
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 16,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "initializer_range": 0.15,
}
FLAGS: Mapping[str, Sequence[str]] = {
    "Qwen3VL": (),
    # The form of the prefix cache that a CPU has for recurrent states, and few of the states, which are large
    "Qwen3_5": (
        *("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule", "--max-mamba-cache-size", "32"),
    ),
}


@functools.cache
def processor() -> Processor:
    return build_processor(
        ["abcdefghijklmnopqrstuvwxyz 0123456789.?"], layout=PatchLayout(patch_size=16, window_size=64)
    )


def token_ids() -> dict[str, int]:
    """The token ids of media, by their names in config.json."""
    names = {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>", **PADS}
    return {f"{name}_token_id": SPECIAL_TOKENS.index(token) for name, token in names.items()}


def config_of(architecture: str) -> Any:
    """The sizes of a tiny model, as a configuration of `transformers`."""
    import transformers

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 100.0, "mrope_interleaved": True}
    text = {**TEXT, "vocab_size": processor().tokenizer.get_vocab_size(), "eos_token_id": 0, "pad_token_id": 0}
    if architecture == "Qwen3VL":
        text |= {"num_hidden_layers": 3, "rope_parameters": rope | {"mrope_section": [4, 2, 2]}}
    else:
        text |= {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "rope_parameters": rope | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
        }
    vision = VISION | ({"deepstack_visual_indexes": [0, 1]} if architecture == "Qwen3VL" else {})
    kind = getattr(transformers, f"{architecture}Config")
    return kind(text_config=text, vision_config=vision, **token_ids())


def random_model(architecture: str, seed: int) -> Any:
    """A model of `transformers` in float32. Norms, biases and decays are random, too: at their first values, which are
    constants, a wrong formula could hide."""
    import torch
    import transformers

    config = config_of(architecture)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{architecture}ForConditionalGeneration")(config).float().eval()
    rng = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        drawn = torch.randn(weight.shape, generator=rng)
        if name.endswith("A_log"):
            weight.data = torch.log(0.5 + 3 * torch.rand(weight.shape, generator=rng))
        elif name.endswith("dt_bias"):
            weight.data = 0.5 * drawn - 1
        elif "conv1d" in name:
            weight.data = 0.4 * drawn
        elif "norm" in name or name.endswith("bias"):
            weight.data += 0.1 * drawn
    return model


def save(model: Any, folder: pathlib.Path) -> pathlib.Path:
    """Writes a checkpoint that SGLang starts from."""
    model.save_pretrained(folder)
    processor().save(folder)
    # An export has the fields that SGLang reads of Qwen3.5 and transformers does not write
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(write_config(read_config(config))))
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "tokenizer_config.json"):
        settings = json.loads((folder / name).read_text()) | {"processor_class": "Qwen3VLProcessor"}
        if name.startswith("video"):
            settings["video_processor_type"] = "Qwen3VLVideoProcessor"
        (folder / name).write_text(json.dumps(settings))
    return folder


# --- prompts --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PromptArrays:
    """Token ids with expanded placeholders, and for each kind of media its patches and grids, all in raster order."""

    ids: tuple[int, ...]
    patches: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    grids: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def __add__(self, other: PromptArrays) -> PromptArrays:
        def joined(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            kinds = ours.keys() | theirs.keys()
            return {kind: np.concatenate([part[kind] for part in (ours, theirs) if kind in part]) for kind in kinds}

        return PromptArrays(self.ids + other.ids, joined(self.patches, other.patches), joined(self.grids, other.grids))


def prompt(*parts: int | tuple[str, tuple[int, int, int]], seed: int = 0) -> PromptArrays:
    """`parts`: a number of text tokens, ("image", grid) or ("video", grid). Before each frame pair of a video stand
    five tokens in the place of its time."""
    rng, special = np.random.default_rng(seed), token_ids()
    first = max(*special.values(), 2) + 1
    ids: list[int] = []
    patches: dict[str, list[np.ndarray]] = {}
    grids: dict[str, list[tuple[int, int, int]]] = {}

    def words(count: int) -> list[int]:
        return rng.integers(first, processor().tokenizer.get_vocab_size(), count).tolist()

    for part in parts:
        if isinstance(part, int):
            ids += words(part)
            continue
        kind, (frames, rows, columns) = part
        for _ in range(frames):
            shown = [special[f"{kind}_token_id"]] * (rows * columns // 4)
            ids += words(5 * (kind == "video"))
            ids += [special["vision_start_token_id"], *shown, special["vision_end_token_id"]]
        patches.setdefault(kind, []).append(rng.normal(size=(frames * rows * columns, PATCH_VALUES)))
        grids.setdefault(kind, []).append((frames, rows, columns))
    return PromptArrays(
        tuple(ids),
        {kind: np.concatenate(values).astype(np.float32) for kind, values in patches.items()},
        {kind: np.asarray(values, np.int32) for kind, values in grids.items()},
    )


PROMPTS = {
    "text": prompt(70),
    "images": prompt(3, ("image", (1, 4, 6)), 2, ("image", (1, 6, 2)), 5, seed=1),
    "video": prompt(4, ("video", (3, 4, 4)), 3, seed=2),
    "mixed": prompt(("video", (2, 2, 6)), 1, ("image", (1, 4, 4)), 2, ("video", (2, 4, 2)), 9, seed=3),
}


# --- the sides that are right ---------------------------------------------------------------------


class TransformersModel:
    """A model of `transformers`."""

    def __init__(self, architecture: str, seed: int) -> None:
        import torch

        self._torch, self._model = torch, random_model(architecture, seed)

    def save(self, folder: pathlib.Path) -> pathlib.Path:
        return save(self._model, folder)

    def _inputs(self, prompt: PromptArrays) -> dict[str, Any]:
        ids, special = self._torch.tensor([prompt.ids]), token_ids()
        kinds = (ids == special["image_token_id"]).int() + 2 * (ids == special["video_token_id"]).int()
        found = {"input_ids": ids, "mm_token_type_ids": kinds}
        for kind, grids in prompt.grids.items():
            found[f"{kind}_grid_thw"] = self._torch.as_tensor(grids).long()
        return found

    def positions(self, prompt: PromptArrays) -> tuple[np.ndarray, int]:
        """(the rotary positions of the tokens by axis, i32 [3, T], and what to add to later tokens' numbers)."""
        positions, delta = self._model.model.get_rope_index(**self._inputs(prompt))
        return positions[:, 0].numpy().astype(np.int32), int(delta)

    def logits(self, prompt: PromptArrays, response: Sequence[int]) -> np.ndarray:
        """The logits from which the tokens of a response are sampled, f32 [R, V]; media tokens are never sampled."""
        inputs = self._inputs(prompt + PromptArrays(tuple(response)))
        pixels = {"image": "pixel_values", "video": "pixel_values_videos"}
        inputs |= {pixels[kind]: self._torch.as_tensor(values) for kind, values in prompt.patches.items()}
        with self._torch.no_grad():
            logits = self._model(**inputs, use_cache=False).logits[0, len(prompt.ids) - 1 : -1].numpy()
        logits[:, list(token_ids().values())] = -np.inf
        return logits

    def logprobs(self, prompt: PromptArrays, response: Sequence[int]) -> np.ndarray:
        """f32 [R]."""
        logits = self._torch.as_tensor(self.logits(prompt, response))
        return self._torch.log_softmax(logits, -1)[range(len(response)), list(response)].numpy()


class TrainerModel:
    """The trainer's model of a checkpoint, whose videos are single frame pairs."""

    def __init__(self, checkpoint: pathlib.Path) -> None:
        self._model = models.load(checkpoint, "float32")

    def positions(self, prompt: PromptArrays) -> tuple[np.ndarray, int]:
        """See `TransformersModel.positions`."""
        pairs, config = {kind: frame_pairs(grids) for kind, grids in prompt.grids.items()}, self._model.config
        rope_index = ARCHITECTURES[config.architecture].rope_index
        assert rope_index is not None and config.vision is not None
        positions, following = rope_index(
            np.asarray(prompt.ids, np.int32),
            pairs.get("image", []),
            pairs.get("video", []),
            [0.0] * len(pairs.get("video", [])),
            image_token_id=config.image_token_id,
            video_token_id=config.video_token_id,
            spatial_merge_size=config.vision.spatial_merge_size,
            tokens_per_second=config.vision.tokens_per_second,
        )
        return positions, following - len(prompt.ids)

    def logprobs(self, prompt: PromptArrays, response: Sequence[int]) -> np.ndarray:
        """See `TransformersModel.logprobs`."""
        never = tuple(token_ids().values())
        return full_logprobs(self._model, self._input(prompt), response, never=never)

    def _input(self, prompt: PromptArrays) -> ModelInput:
        """The prompt that `rollout.serve` would read of a request."""
        if not prompt.patches:
            return prompt_of(prompt.ids)
        positions, delta = self.positions(prompt)
        media = {
            f"{kind}_data": {
                "patches": wire.array_json(patches),
                "grid_thw": wire.array_json(np.asarray(frame_pairs(prompt.grids[kind]), np.int32)),
                "positions": wire.array_json(positions),
                "position_delta": delta,
            }
            for kind, patches in prompt.patches.items()
        }
        return wire.given_prompt(prompt.ids, 0, media, self._model.config)


def frame_pairs(grids: np.ndarray) -> list[Grid]:
    """The grids of the single frame pairs of media."""
    return [(1, rows, columns) for frames, rows, columns in grids.tolist() for _ in range(frames)]


# --- the server -----------------------------------------------------------------------------------


def body(rid: str, reference: TransformersModel, prompt: PromptArrays, **how: Any) -> dict[str, Any]:
    """The body of a request that never ends early; `rollout.wire` writes media in this form."""
    never = {str(id): wire.NEVER for id in token_ids().values()}
    sampling = {"temperature": 1.0, "ignore_eos": True, "logit_bias": never, **how}
    found = {"rid": rid, "input_ids": list(prompt.ids), "return_logprob": True, "sampling_params": sampling}
    positions, delta = reference.positions(prompt)
    for kind, patches in prompt.patches.items():
        places = np.flatnonzero(np.asarray(prompt.ids) == token_ids()[f"{kind}_token_id"])
        runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
        media = {
            "key": hashlib.sha256(patches.tobytes()).hexdigest(),
            "patches": wire.array_json(patches),
            "grid_thw": wire.array_json(prompt.grids[kind]),
            "offsets": wire.array_json(np.asarray([(run[0], run[-1]) for run in runs], np.int32)),
            "positions": wire.array_json(positions),
            "position_delta": delta,
        }
        found[f"{kind}_data"] = [wire.FORMAT + json.dumps(media)]
    return found


@dataclasses.dataclass(frozen=True)
class Reply:
    """The end of a request."""

    ids: list[int]
    logprobs: np.ndarray
    meta: Mapping[str, Any]


@dataclasses.dataclass
class Serving:
    """A real SGLang server of an architecture. It has the weights of `reference`, which are in `checkpoint`."""

    architecture: str
    address: str
    folder: pathlib.Path
    reference: TransformersModel
    checkpoint: pathlib.Path

    async def ask(self, client: ServerClient, rid: str, prompt: PromptArrays, **how: Any) -> Reply:
        """A greedy answer. Sampled ones would be others each time, and of 23,000 sampled tokens of this model two
        differed from `transformers` by 1e-4 or more (the largest of 120 tokens by 1e-5 in the median)."""
        asked = body(rid, self.reference, prompt, **({"temperature": 0.0} | how))
        answer = await client._order("/generate", asked, seconds=60.0)
        logprobs = np.asarray([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
        return Reply(answer["output_ids"], logprobs, answer["meta_info"])

    async def update(self, client: ServerClient, seed: int) -> None:
        """Brings the server to other weights, as `SharedMemory` does to a server that is paused."""
        self.reference = TransformersModel(self.architecture, seed)
        self.checkpoint = self.reference.save(self.folder / f"seed-{seed}")
        await client.update_from_disk(str(self.checkpoint), seed)
        sums_of(self.checkpoint).check(await client.checksums(), self.address)


def sums_of(checkpoint: pathlib.Path) -> Checksums:
    return Checksums(checkpoint / SINGLE, TEXT["num_key_value_heads"])


@contextlib.contextmanager
def serving(architecture: str, folder: pathlib.Path) -> Iterator[Serving]:
    reference = TransformersModel(architecture, 0)
    checkpoint = reference.save(folder / "seed-0")
    plain = command("sglang", checkpoint)
    server = LocalServer(dataclasses.replace(plain, flags=(*plain.flags, *FLAGS[architecture])), folder / "server.log")
    server.start()
    try:
        asyncio.run(up(server))
        yield Serving(architecture, server.address, folder, reference, checkpoint)
    finally:
        server.kill()


async def up(server: LocalServer, seconds: float = 300.0) -> None:
    async with client_at(server.address) as client, asyncio.timeout(seconds):
        while True:
            assert server.ended() is None, server.last_words(30)
            with contextlib.suppress(EngineError):
                await client.load(5.0)
                return
            await asyncio.sleep(0.25)
