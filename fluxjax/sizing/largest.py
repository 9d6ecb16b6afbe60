"""The largest batches that a configuration allows, as shapes: composed from made-up prompts as a run composes.

If sequences are spread over devices, the sizes of some buffers depend on the lengths of a step. The largest sizes of a
few steps of made-up lengths are taken. Buffers of tokens and patches are as long as `packing` allows. Under `fsdp`, the
tables of layers with Gated DeltaNet (`PackedRuns`) have room for a step's prompts and responses in one row.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np

from models.config import DecoderConfig
from models.inputs import ModelInput, common_bound
from models.processing.processor import pack_patches
from sharding.spread.shapes import ShapeBook

from ..base.types import Group, PreparedPrompt, Prompt, Response, Reward, Sample, TrainBatch
from ..batch.composer import Composer
from ..batch.part import Room
from ..batch.rows import Budget
from ..batch.share import Outline, Piece, Share, TrainGroup, most_chunks
from ..config import FSDP, Config, ConfigError

STEPS = 3  # steps of made-up lengths
TEXT_TOKENS = 16  # the least number of a prompt's tokens beside its image


def prompt(config: Config, model: DecoderConfig, tokens: int = 0, image: bool = True) -> ModelInput:
    """Returns a prompt of `tokens` tokens (0: as many as the rollout allows). With `image`, a vision model's prompt has
    one image, as large as tokens, settings and a device's patches allow. Raises ConfigError if none fits."""
    tokens = tokens or config.rollout.max_sequence_tokens - config.rollout.max_new_tokens
    token_ids, positions = np.zeros(tokens, np.int32), np.zeros((3, tokens), np.int32)
    features, vision_input = np.full(tokens, -1, np.int32), None
    vision = model.vision
    if vision is not None and image:
        most = min(max(tokens - TEXT_TOKENS, 1), config.packing.patches_per_device // vision.merge_unit)
        if config.data.max_pixels:
            most = min(most, config.data.max_pixels // (vision.patch_size**2 * vision.merge_unit))
        if most < 1:
            raise ConfigError("data.max_pixels and packing.patches_per_device leave no room for an image")
        rows = math.isqrt(most)
        columns = most // rows
        merge = vision.spatial_merge_size
        grid = (1, rows * merge, columns * merge)
        patches = np.zeros((grid[1] * grid[2], vision.patch_values), np.float32)
        vision_input, order = pack_patches(patches, [grid], vision)
        features[: len(order)] = order
    return ModelInput(token_ids, positions, features, tokens, vision_input)


def largest_batch(config: Config, model: DecoderConfig, num_devices: int) -> TrainBatch:
    """Returns the largest microbatch on `num_devices` devices, as shapes."""
    compose = _largest_rows if isinstance(config.sharding.strategy, FSDP) else _largest_spread
    batch = compose(config, model, num_devices)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), batch)


def _largest_rows(config: Config, model: DecoderConfig, num_devices: int) -> TrainBatch:
    vision = model.vision
    budget = Budget.of(config, num_devices, vision)
    group = Group(Prompt("largest", "", "", ""), (_sample(0, 0, config.rollout.max_new_tokens),))
    to_train = TrainGroup("largest", prompt(config, model), group.columns, np.ones(1))
    sizes = {"rows": budget.rows[-1], "columns": budget.tokens_per_row, "patches": budget.patches[-1]}
    row = (Piece(0, (0,)),)
    if model.text.delta is not None:
        sizes["chunks"] = most_chunks(config)
    outline = Outline(((row,), *[()] * (num_devices - 1)), sizes | {"frame": common_bound([to_train.inputs])})
    share = Share.of_all([outline], [to_train], num_devices, version=0)
    return Composer(config, num_devices, vision, model.text).lay_out(share).microbatches[0].batch


def _largest_spread(config: Config, model: DecoderConfig, num_devices: int) -> TrainBatch:
    vision = model.vision
    shapes = ShapeBook(most=1 << 20)  # never full
    composer = Composer(config, num_devices, vision, model.text, shapes)
    composer.check()
    room = composer.room
    steps = [composer.outline(*_made_up_step(config, model, room, num_devices, step)) for step in range(STEPS)]
    entries = shapes.entries[num_devices]
    sizes = {name: max(entry.get(name, 0) for entry in entries) for name in sorted({n for e in entries for n in e})}
    sizes["columns"] = room.tokens
    if vision is not None:
        sizes["patches"] = room.whole_patches
    largest = dataclasses.replace(steps[-1].micros[0], sizes=sizes)
    return composer.lay_out(dataclasses.replace(steps[-1], micros=(largest,))).microbatches[0].batch


def _made_up_step(
    config: Config, model: DecoderConfig, room: Room, num_devices: int, step: int
) -> tuple[list[Group], dict[int, PreparedPrompt]]:
    """Returns groups that fill nine tenths of the devices' rows, and their prompts by draw. Many groups are short and
    few long; in step 0 all prompts are as long as allowed."""
    rollout, dice = config.rollout, np.random.default_rng(step)
    left = int(0.9 * room.tokens * num_devices)
    patches_left = int(0.8 * room.whole_patches * num_devices)
    groups, prepared = [], {}
    longest = rollout.max_sequence_tokens - rollout.max_new_tokens
    while True:
        scale = 1.0 if step == 0 else float(dice.beta(1.0, 2.0))
        size = max(int(scale * longest), min(longest, 4 * TEXT_TOKENS))
        inputs = prompt(config, model, size)
        lengths = np.maximum(rollout.max_new_tokens * scale * dice.uniform(0.5, 1.0, rollout.group_size), 1).astype(int)
        copies = 1 if config.packing.share_prompts else rollout.group_size
        patches = copies * inputs.vision.num_patches if inputs.vision is not None else 0
        if patches > patches_left:
            inputs, patches = prompt(config, model, size, image=False), 0
        tokens = copies * len(inputs) + int(lengths.sum())
        if groups and tokens > left:
            return groups, prepared
        left, patches_left = left - tokens, patches_left - patches
        draw = len(groups)
        described = Prompt(f"made up {draw}", "", "", "", draw=draw)
        groups.append(Group(described, tuple(_sample(draw, k, int(n)) for k, n in enumerate(lengths))))
        prepared[draw] = PreparedPrompt(described, inputs)


def _sample(draw: int, index: int, tokens: int) -> Sample:
    response = Response(f"{draw}/{index}", draw, index, (0,) * tokens, (0.0,) * tokens, (0,) * tokens, "length", 1.0)
    return Sample(response, Reward(float(index % 2), False), advantage=1.0)
