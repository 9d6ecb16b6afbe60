"""Small groups with real patch and position layouts, and a tiny Qwen2.5-VL configuration, for packing tests."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fluxjax.base.scored import numbers_of
from fluxjax.base.types import Group, PreparedPrompt, Prompt, Response, Reward, Sample
from fluxjax.batch.composer import Composer
from fluxjax.batch.composition import Composition
from fluxjax.batch.rows import Budget
from fluxjax.config import Config
from models.config import DecoderConfig, DeepVisionConfig, RopeConfig, TextConfig, VisionConfig
from models.inputs import ModelInput
from models.processing.processor import pack_patches
from models.qwen2_5_vl.positions import rope_index
from sharding.kernels.delta_heads import DeltaHeads

IMAGE, VIDEO, START, END = 60, 61, 62, 63  # token ids; text has the ids below
MEDIA_IDS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
TEXT_VOCABULARY = 60

MODEL = DecoderConfig(
    "qwen2_5_vl",
    text=TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope=RopeConfig(mrope_section=(2, 3, 3)),
    ),
    vision=VisionConfig(
        hidden_size=32,
        intermediate_size=48,
        depth=2,
        num_heads=2,
        out_hidden_size=32,
        full_attention_layers=(1,),
        patch_size=4,
        window_size=16,
    ),
    **MEDIA_IDS,
)

TEXT = DecoderConfig(
    "qwen2", text=dataclasses.replace(MODEL.text, rope=dataclasses.replace(MODEL.text.rope, mrope_section=()))
)
QWEN3 = DecoderConfig("qwen3", text=dataclasses.replace(TEXT.text, head_norm=True, qkv_bias=False, head_dim=10))

# Its inputs may be in MODEL's window order: a tower without windows reads patches in any order.
DEEP_TOWER = DeepVisionConfig(
    hidden_size=32,
    intermediate_size=48,
    depth=3,
    num_heads=2,
    out_hidden_size=32,
    patch_size=4,
    position_grid=5,
    deepstack_layers=(0, 1),
)
QWEN3_VL = DecoderConfig(
    "qwen3_vl",
    text=dataclasses.replace(QWEN3.text, num_layers=3, rope=RopeConfig(mrope_section=(2, 2, 1), interleaved=True)),
    vision=DEEP_TOWER,
    **MEDIA_IDS,
)

# Its layers are d d a d: no multiple of the period. With an epsilon of 1e-6, the norms of what small heads read of a
# state now and then divide by float32 errors.
QWEN3_5 = DecoderConfig(
    "qwen3_5",
    text=dataclasses.replace(
        QWEN3_VL.text,
        num_layers=4,
        rms_norm_eps=1e-3,
        rope=RopeConfig(mrope_section=(1, 1, 1), interleaved=True),
        rotated=0.5,
        head_dim=12,
        output_gate=True,
        zero_centred_norms=True,
        delta=DeltaHeads(2, 4, 16, 12),
        attention_interval=3,
    ),
    vision=dataclasses.replace(DEEP_TOWER, deepstack_layers=()),
    **MEDIA_IDS,
)

# What a prompt is made of: numbers are runs of text tokens, tuples are media of a grid (frame pairs, rows, columns).
Content = list[int | tuple[int, int, int]]


def model_input(content: Content, rng: np.random.Generator) -> ModelInput:
    """A prompt of these parts with random text and pixels. A grid of one frame pair is an image."""
    vision = MODEL.vision
    assert vision is not None
    grids = [part for part in content if isinstance(part, tuple)]
    tokens: list[int] = []
    for part in content:
        if isinstance(part, tuple):
            mark = IMAGE if part[0] == 1 else VIDEO
            tokens += [START, *[mark] * (part[0] * part[1] * part[2] // vision.merge_unit), END]
        else:
            tokens += rng.integers(0, TEXT_VOCABULARY, part).tolist()
    token_ids = np.array(tokens, np.int32)
    videos = [grid for grid in grids if grid[0] > 1]
    positions, next_position = rope_index(
        token_ids,
        [grid for grid in grids if grid[0] == 1],
        videos,
        [0.5] * len(videos),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        spatial_merge_size=vision.spatial_merge_size,
        tokens_per_second=vision.tokens_per_second,
    )
    feature_index = np.full(len(token_ids), -1, np.int32)
    if not grids:
        return ModelInput(token_ids, positions, feature_index, next_position)
    patches = rng.normal(size=(sum(t * h * w for t, h, w in grids), vision.patch_values)).astype(np.float32)
    packed, order = pack_patches(patches, grids, vision)
    feature_index[(token_ids == IMAGE) | (token_ids == VIDEO)] = order
    return ModelInput(token_ids, positions, feature_index, next_position, packed)


def make_groups(
    contents: list[Content], lengths: list[list[int]], seed: int = 0, vocabulary: int = TEXT_VOCABULARY
) -> tuple[list[Group], dict[int, PreparedPrompt]]:
    """One group for each prompt content, with responses of these lengths and random everything else."""
    rng = np.random.default_rng(seed)
    groups, prepared = [], {}
    for index, (content, sizes) in enumerate(zip(contents, lengths, strict=True)):
        draw = 100 + 3 * index
        prompt = Prompt(f"prompt-{draw}", "test", "?", "!", draw=draw)
        prepared[draw] = PreparedPrompt(prompt, model_input(content, rng))
        groups.append(random_group(prompt, sizes, rng, vocabulary))
    return groups, prepared


def random_group(
    prompt: Prompt, sizes: Iterable[int], rng: np.random.Generator, vocabulary: int = TEXT_VOCABULARY
) -> Group:
    """Random responses of these lengths, each with a reward and an advantage."""
    samples = []
    for sample, size in enumerate(sizes):
        ids = tuple(rng.integers(0, vocabulary, size).tolist())
        logprobs = tuple((-rng.uniform(0.1, 5.0, size)).astype(np.float32).tolist())
        versions = tuple(rng.integers(0, 9, size).tolist())
        response = Response(f"{prompt.draw}/{sample}", prompt.draw, sample, ids, logprobs, versions, "stop")
        samples.append(Sample(response, Reward(float(rng.normal()), False), float(np.float32(rng.normal()))))
    return Group(prompt, tuple(samples))


def answered(prompt: Prompt, answers: Iterable[tuple[Sequence[int], Sequence[float]]], version: int = 0) -> Group:
    """These responses, their token ids and log-probs, each with an advantage of 1."""
    samples = []
    for sample, (ids, logprobs) in enumerate(answers):
        versions, rid = (version,) * len(ids), f"{prompt.draw}/{sample}"
        response = Response(rid, prompt.draw, sample, tuple(ids), tuple(logprobs), versions, "stop")
        samples.append(Sample(response, Reward(0.0, False), 1.0))
    return Group(prompt, tuple(samples))


def response_of(draw: int, data: bytes) -> Response:
    """The response to a draw whose numbers these bytes are."""
    sample, temperature, *columns = numbers_of(data)
    tokens, logprobs, versions = (tuple(values.tolist()) for values in columns)
    return Response("", draw, sample, tokens, logprobs, versions, "stop", temperature)


def make_config(tokens_per_row: int = 48, rows: int = 4, patches: int = 128, share: bool = True) -> Config:
    config = Config()
    config.packing.tokens_per_row = tokens_per_row
    config.packing.rows_per_device = rows
    config.packing.patches_per_device = patches
    config.packing.share_prompts = share
    return config


def compose(groups, prepared, config: Config, devices: int = 1, *, vision=None, text=None, shapes=None, **options):
    """The composition of one step, by a composer of its own."""
    return Composer(config, devices, vision, text, shapes).compose(groups, prepared, **options)


def owners(composition: Composition) -> tuple[Any, ...]:
    """The device of each microbatch, None for one of all devices."""
    return tuple(microbatch.owner for microbatch in composition.microbatches)


def works(composition: Composition) -> tuple[Any, ...]:
    """The predicted work of each microbatch, None where nothing predicts it."""
    return tuple(microbatch.work for microbatch in composition.microbatches)


def shapes_of(budget: Budget) -> set[tuple[int, int, int]]:
    """All (rows, tokens a row, patches) that a microbatch may have: the bound on compiled shapes."""
    shards = budget.num_shards
    return {
        (rows * shards, budget.tokens_per_row, patches * shards) for rows in budget.rows for patches in budget.patches
    }
