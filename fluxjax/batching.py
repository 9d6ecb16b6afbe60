"""Scored groups become packed microbatches of a few fixed shapes, and per-token results find their responses again.

One composer serves RL, supervised warm starts and the scoring of log-probs: what differs is in the groups.
`packing` decides what goes where, `layout` writes it there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from models.config import TextConfig, VisionConfig
from sharding.shapes import ShapeBook

from .algorithms.loss import response_weights
from .config import Config, ConfigError, Strategy
from .decoupled import compose_decoupled, estimate
from .layout import Composition, Entry, lay_out
from .packing import Budget, grid, pack
from .spreading import compose_spread, planner, shape_book
from .types import Group, PreparedPrompt, Response, Reward, Sample


def compose(
    groups: Sequence[Group],
    prepared: Mapping[int, PreparedPrompt],
    config: Config,
    num_shards: int = 1,
    *,
    vision: VisionConfig | None = None,
    text: TextConfig | None = None,
    shapes: ShapeBook | None = None,
    skip_idle: bool = False,
) -> Composition:
    """Packs all responses of a step, with the loss weights, advantages and log-probs that belong to them.

    `prepared` maps the draw of each group to its prompt; `vision` is the model's (None: a text model, whose
    batches have no vision buffer). Groups are laid out by draw and responses by sample, whatever order they
    arrive in. Rows and patches of a shard are the cap of `config.packing`, or a half or quarter of it; `row_shapes`
    lists what may come out. Strategies that spread sequences over devices plan and lay them out in `spreading`;
    `text`, the decoder's sizes, bounds the degrees (None: nothing does); `shapes` remembers earlier sizes (made by
    `spreading.shape_book`). Under `odc` a microbatch is one device's wherever one can hold it, see `decoupled`.

    `skip_idle` leaves out groups without any advantage: their gradient is zero unless there is a KL term. Loss
    weights still count them. If there are no others, the first group stays.

    Raises ConfigError, naming prompt and field, for a sequence or media that fit no buffer, and ValueError for
    groups that contradict each other or `prepared`, or of which none has a token.
    """
    ordered = sorted(groups, key=lambda group: group.prompt.draw)
    for one, other in pairwise(ordered):
        if one.prompt.draw == other.prompt.draw:
            raise ValueError(f"prompts {one.prompt.id} and {other.prompt.id} have the same draw {one.prompt.draw}")
    members = [sorted(group.samples, key=lambda sample: sample.response.sample) for group in ordered]
    lengths = np.array([len(sample.response.token_ids) for samples in members for sample in samples])
    weights = response_weights(lengths, config.algorithm.loss_aggregation, config.rollout.max_new_tokens)

    entries: list[Entry] = []
    first = 0
    for group, samples in zip(ordered, members, strict=True):
        own = slice(first, first + len(samples))
        first = own.stop
        if lengths[own].any():
            speaking = tuple(sample for sample in samples if sample.response.token_ids)
            entries.append(_entry(group, prepared, speaking, weights[own][lengths[own] > 0], vision))
    if skip_idle:
        entries = [e for e in entries if any(sample.advantage != 0.0 for sample in e.samples)] or entries[:1]

    if config.sharding.strategy is not Strategy.FSDP:
        book = shape_book(config) if shapes is None else shapes
        laid_out = compose_decoupled if config.sharding.strategy is Strategy.ODC else compose_spread
        return laid_out(entries, config, num_shards, vision, text, book)
    packing = config.packing
    sizes = budget(config, num_shards, vision)
    plan = pack([entry.item for entry in entries], sizes, share_prompts=packing.share_prompts)
    return lay_out(plan, entries, packing.tokens_per_row, packing.share_prompts, vision)


def _entry(
    group: Group,
    prepared: Mapping[int, PreparedPrompt],
    samples: tuple[Sample, ...],
    weights: np.ndarray,
    vision: VisionConfig | None,
) -> Entry:
    prompt = group.prompt
    if prompt.draw not in prepared:
        raise ValueError(f"prompt {prompt.id}, draw {prompt.draw}, is not among the prepared prompts")
    inputs = prepared[prompt.draw].inputs
    if len(inputs) == 0:
        raise ValueError(f"prompt {prompt.id} has no token that could predict the first one of a response")
    if inputs.vision is not None and vision is None:
        raise ValueError(f"prompt {prompt.id} has media, but the model has no vision tower")
    return Entry(prompt.id, inputs, samples, weights)


def budget(config: Config, num_shards: int, vision: VisionConfig | None) -> Budget:
    """The buffer sizes that `config.packing` allows; ConfigError if they can hold nothing."""
    packing = config.packing
    unit = vision.merge_unit if vision is not None else 0
    for field, least in (("tokens_per_row", 2), ("rows_per_device", 1), ("patches_per_device", unit)):
        if getattr(packing, field) < least:
            raise ConfigError(f"packing.{field} = {getattr(packing, field)} must be at least {least}")
    patches = grid(packing.patches_per_device, unit) if unit else (0,)
    return Budget(packing.tokens_per_row, grid(packing.rows_per_device), patches, num_shards)


def check_strategy(config: Config, num_devices: int, text: TextConfig, vision: VisionConfig | None) -> None:
    """Raises ConfigError for degrees that can't be on so many devices, for rollouts longer than the devices of one
    sequence hold, and for a calibration that can't be read."""
    if config.sharding.strategy.spreads:
        planner(config, text, num_devices)
    if config.sharding.strategy is Strategy.ODC:
        estimate(config, text, vision)


def row_shapes(config: Config, num_shards: int, vision: VisionConfig | None) -> list[tuple[int, int, int]]:
    """All (rows, tokens a row, patches) that a microbatch may have: the bound on compiled shapes."""
    sizes = budget(config, num_shards, vision)
    return [(r * num_shards, sizes.tokens_per_row, p * num_shards) for r in sizes.rows for p in sizes.patches]


def unpack(composition: Composition, arrays_BT: Sequence[Any]) -> dict[tuple[int, int], np.ndarray]:
    """Per-token results of each response by (draw, sample), from one array `[B, T]` for each microbatch."""
    shapes_BT = [batch.loss_weights_BT.shape for batch in composition.batches]
    if [np.shape(array) for array in arrays_BT] != shapes_BT:
        raise ValueError(f"arrays of shapes {[np.shape(a) for a in arrays_BT]} for batches of {shapes_BT}")
    flat = np.concatenate([np.asarray(array).reshape(-1) for array in arrays_BT])
    parts = np.split(flat[composition.cells], np.cumsum(composition.lengths)[:-1])
    return dict(zip(composition.keys, parts, strict=True))


def with_reference(composition: Composition, logprobs_BT: Sequence[Any]) -> Composition:
    """The composition with these log-probs, one array `[B, T]` for each microbatch, as the reference model's."""
    batches = tuple(
        dataclasses.replace(
            batch,
            reference_logprobs_BT=np.where(batch.loss_weights_BT != 0, np.asarray(array, np.float32), np.float32(0)),
        )
        for batch, array in zip(composition.batches, logprobs_BT, strict=True)
    )
    return dataclasses.replace(composition, batches=batches)


def sft_groups(prompts: Sequence[PreparedPrompt], answer_ids: Sequence[Sequence[int]]) -> list[Group]:
    """One group for each prompt, with the given answer (stop id included) as its only response.

    Log-probs are 0 and versions -1: no engine produced these tokens.
    """
    groups = []
    for one, ids in zip(prompts, answer_ids, strict=True):
        draw, token_ids = one.prompt.draw, tuple(int(token) for token in ids)
        response = Response(
            rid=f"sft-{draw}/0",
            draw=draw,
            sample=0,
            token_ids=token_ids,
            logprobs=(0.0,) * len(token_ids),
            versions=(-1,) * len(token_ids),
            finish="stop",
        )
        groups.append(Group(one.prompt, (Sample(response, Reward(1.0, True, "given answer"), advantage=1.0),)))
    return groups


__all__ = ["Composition", "budget", "compose", "row_shapes", "sft_groups", "unpack", "with_reference"]
