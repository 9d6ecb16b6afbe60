"""Groups whose sequences are dealt to devices that keep their own pace (`sharding.strategy` `odc`), then laid out.

Devices wait for one another at the end of a minibatch only, so what has to be even is the work of each over all of its
microbatches, not the number or the size of these (ODC paper, section 4). A microbatch is one row of one device, laid
out like any other that `spreading` makes, by a plan of a single device; the device computes its own media, too.
What one device can't hold is computed by all together, before: see `collective`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models.config import TextConfig, VisionConfig
from sharding.cost import CostError
from sharding.planner import Limits
from sharding.planner.packing import SCHEDULERS, MicrobatchSchedule, makespan
from sharding.planner.plan import ShardPlan, rounds
from sharding.spread.shapes import ShapeBook

from ..config import Config, ConfigError
from .collective import Estimate, parted, together
from .fill import COLLECTIVE, Composition, TrainGroup
from .rows import Piece
from .spreading import (
    Part,
    calibrated,
    forward_seconds,
    joined,
    model_sizes,
    pieces_of,
    squares_of,
    tokens_of,
    tokens_per_device,
)

VERL_LINEAR = 24576.0  # verl's work of a token where that of attention is length**2
CUTS = 3  # further sizes of pieces that are tried where prompts are shared
WORTH = 0.01  # of the time that a step is predicted to take: what must be saved to compute prompts more than once


def compose_decoupled(
    entries: Sequence[TrainGroup],
    config: Config,
    num_devices: int,
    vision: VisionConfig | None,
    text: TextConfig | None,
    book: ShapeBook,
) -> Composition:
    """Microbatches of all devices together, for what no single one holds; then those of one device each, device after
    device, the heaviest of each first; `sharding.balance` deals.

    With `packing.share_prompts` a group is one sequence, its responses are branches behind one copy of the prompt, as
    long as a device's row holds it and devices do not wait for it; otherwise each response is a sequence of its own.
    A device may have no microbatch of its own. `book` keeps the shapes few.

    Raises ConfigError, naming prompt and field, for a sequence or media that the devices of a sequence do not hold, and
    for a calibration that can't be read.
    """
    work_of = estimate(config, text, vision)
    large, rest = parted(entries, config, num_devices, vision, text)
    parts: list[Part] = []
    work: list[float] = []
    if large:
        parts, work, rest = together(large, rest, config, num_devices, vision, text, work_of)
    devices = [COLLECTIVE] * len(parts)
    for device, part, load in _alone(rest, config, num_devices, vision, work_of) if rest else ():
        parts.append(part)
        devices.append(device)
        work.append(load)
    return joined([part.fill(book) for part in parts], tuple(devices), tuple(work))


def _alone(
    entries: Sequence[TrainGroup], config: Config, num_devices: int, vision: VisionConfig | None, work_of: Estimate
) -> list[tuple[int, Part, float]]:
    """(device, microbatch, its work) of everything that a device computes alone."""
    pieces, schedule = _dealt(entries, config, num_devices, work_of)
    work = np.array(schedule.work)
    owners, media = [piece.item for piece in pieces], [entry.item.patches for entry in entries]
    found: list[tuple[int, Part, float]] = []
    for device, own in enumerate(schedule.microbatches):
        made = [part for members in own for part in _within(members, owners, media, config.packing.patches_per_device)]
        for members in sorted(made, key=lambda members: (-work[members].sum(), members)):
            part = Part(entries, [pieces[i] for i in members], _on_one, config, vision)
            found.append((device, part, float(work[members].sum())))
    return found


def _dealt(
    entries: Sequence[TrainGroup], config: Config, num_devices: int, work_of: Estimate
) -> tuple[list[Piece], MicrobatchSchedule]:
    """The pieces, and which device computes them in which microbatch.

    Fewer groups than devices, or a few more, can't be even. So smaller pieces are tried, too: groups whose responses
    are cut at a device's share of all tokens, a half or a quarter of it, at the cost of further copies of the prompts.
    """
    room, share = tokens_per_device(config), config.packing.share_prompts
    whole = pieces_of(entries, room, share)
    mean = -(-sum(tokens_of(entries, piece) for piece in whole) // num_devices)
    choices = [whole, *(pieces_of(entries, room, True, max(mean >> k, 1)) for k in range(CUTS) if share)]
    deal, limits = SCHEDULERS[config.sharding.balance.value], Limits(tokens_per_device=room)
    best: tuple[list[Piece], MicrobatchSchedule] | None = None
    for pieces in choices:
        tokens = [tokens_of(entries, piece) for piece in pieces]
        squares = np.array([squares_of(entries, piece) for piece in pieces])
        patches = np.array([entries[piece.item].item.patches for piece in pieces], float)
        made = deal(tokens, num_devices, limits, work=work_of(np.array(tokens, float), squares, patches))
        if best is None or makespan(made, "minibatch") < (1 - WORTH) * makespan(best[1], "minibatch"):
            best = pieces, made
    assert best is not None
    return best


def estimate(config: Config, text: TextConfig | None, vision: VisionConfig | None) -> Estimate:
    """What a sequence costs beside others: seconds where `sharding.calibration` is given, else FLOPs; without `text`,
    the decoder's sizes, verl's formula.

    `squares` are twice the (query, key) pairs of attention, and the media count for each sequence that shows them.
    Raises ConfigError for a calibration that can't be read.
    """
    if config.sharding.calibration:
        try:
            cost = calibrated(config, text, vision)
        except CostError as error:
            raise ConfigError(f"sharding.calibration: {error}") from error
        return lambda tokens, squares, patches: (
            forward_seconds(cost, tokens, squares) + (cost.vision_seconds(patches) if vision is not None else 0.0)
        )
    if text is None:
        return lambda tokens, squares, patches: VERL_LINEAR * tokens + squares
    # Of a forward pass; a backward pass takes about twice as much of either. Matrix products cost two FLOPs a token and
    # weight. A pair costs two for its score and two for its value, in each channel of all heads of each layer, and
    # `squares` count a pair twice. So in units of `squares` a token costs
    #     weights / (layers * heads * head_size),    weights = those of all matrices, the output head's among them,
    # which is 70,000 for Qwen2.5-VL-7B. ODC's fit to measured times of a 7B model has 64,500; verl's 24,576 counts the
    # pairs behind the mask, too.
    sizes = model_sizes(config, text, vision)
    token, square = sizes.linear_flops(), 2.0 * sizes.layers * sizes.heads * sizes.head_size
    patch = sizes.vision_flops() if vision is not None else 0.0
    return lambda tokens, squares, patches: token * tokens + square * squares + patch * patches


def _on_one(lengths: Sequence[int], work: Sequence[float]) -> ShardPlan:
    """All of it on one device."""
    degrees, firsts = (1,) * len(lengths), (0,) * len(lengths)
    return ShardPlan(1, tuple(lengths), tuple(map(float, work)), degrees, firsts, rounds(1, lengths, degrees, firsts))


def _within(members: Sequence[int], item: Sequence[int], patches: Sequence[int], cap: int) -> list[list[int]]:
    """The members of a microbatch in as few parts of at most `cap` patches as first-fit-decreasing finds.

    `item[i]` is that of piece `i`; its `patches` stand once in a microbatch, so its pieces stay together.
    """
    parts: list[set[int]] = []
    used: list[int] = []
    for one in sorted({item[i] for i in members}, key=lambda one: (-patches[one], one)):
        place = next((k for k, n in enumerate(used) if n + patches[one] <= cap), len(parts))
        if place == len(parts):
            parts.append(set())
            used.append(0)
        parts[place].add(one)
        used[place] += patches[one]
    return [sorted(i for i in members if item[i] in part) for part in parts]
