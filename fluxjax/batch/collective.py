"""Under `sharding.strategy` `odc`, what no single device holds: sequences that all devices compute together.

They are spread over devices as under `flex_ulysses`. Meanwhile all devices wait for one another at every layer, so
those that the plan leaves idle compute shorter sequences, as long as none of it takes longer for that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from models.config import TextConfig, VisionConfig
from sharding.mesh import binary_axes
from sharding.planner.limits import row_tokens
from sharding.planner.plan import ShardPlan, rounds
from sharding.planner.vision_units import surely_hold

from ..config import Config
from .fill import TrainGroup, frame_bound_of
from .rows import Budget, Piece, check
from .spreading import Part, largest_degree, pieces_of, planned, squares_of, tokens_of, tokens_per_device

Floats = np.ndarray  # f64, one for each sequence
Estimate = Callable[[Floats, Floats, Floats], Floats]  # (tokens, squares, patches) of each sequence -> work

EVEN = 0.95  # of the most tokens of a device: where devices have that on average, none is idle


def parted(
    entries: Sequence[TrainGroup],
    config: Config,
    num_devices: int,
    vision: VisionConfig | None,
    text: TextConfig | None,
) -> tuple[list[TrainGroup], list[TrainGroup]]:
    """(what takes several devices, what one device holds): of each group some responses, all or none.

    With `packing.share_prompts` what a device could hold follows the rest of its group, if further copies of the prompt
    would be more than it is itself. Raises ConfigError, naming prompt and field, for what all devices can't hold.
    """
    room, share = tokens_per_device(config), config.packing.share_prompts
    patches = _patches_per_device(config, vision)
    degree, replica = largest_degree(config, text, num_devices), _replica(num_devices)
    check(
        [entry.item for entry in entries],
        Budget(degree * room, (1,), (replica * patches,)),
        "packing.tokens_per_row * packing.rows_per_device" + (f" * {degree} devices" if degree > 1 else ""),
        "packing.patches_per_device" + (f" * {replica} devices" if replica > 1 else ""),
    )
    large: list[TrainGroup] = []
    rest: list[TrainGroup] = []
    for entry in entries:
        item = entry.item
        beyond = {k for k, n in enumerate(item.responses) if item.prompt + n > room or item.patches > patches}
        if share and 0 < len(beyond) < len(item.responses):
            beyond = _followed(entry, beyond, room, degree * room)
        large += [entry.only(sorted(beyond))] if beyond else []
        held = [k for k in range(len(item.responses)) if k not in beyond]
        rest += [entry.only(held)] if held else []
    return large, rest


def _followed(entry: TrainGroup, beyond: set[int], room: int, all_room: int) -> set[int]:
    """The responses `beyond` a device, and those that would stand behind the same prompt, if that saves more than they
    are."""
    responses = set(range(len(entry.samples)))

    def copies(own: set[int]) -> int:
        """Of the prompt, if these are computed together and the others are not."""
        kinds = (own, all_room), (responses - own, room)
        return sum(len(pieces_of([entry.only(sorted(some))], longest, True)) for some, longest in kinds if some)

    shared = pieces_of([entry], all_room, True)
    followed = {k for piece in shared if tokens_of([entry], piece) > room for k in piece.responses}
    item = entry.item
    saved = (copies(beyond) - copies(followed)) * item.prompt
    return followed if saved > sum(item.responses[k] for k in followed - beyond) else beyond


def together(
    large: Sequence[TrainGroup],
    rest: Sequence[TrainGroup],
    config: Config,
    num_devices: int,
    vision: VisionConfig | None,
    text: TextConfig | None,
    work_of: Estimate,
) -> tuple[list[Part], list[float], list[TrainGroup]]:
    """(microbatches of `large`, what each is predicted to cost the busiest device, what they leave of `rest`).

    Raises ConfigError where no plan exists, and for a calibration that can't be read.
    """
    entries = [*large, *rest]
    shorter = pieces_of(rest, tokens_per_device(config), config.packing.share_prompts)
    shorter = [Piece(len(large) + piece.item, piece.responses) for piece in shorter]
    shorter.sort(key=lambda piece: (-tokens_of(entries, piece), piece.item, piece.responses))
    parts: list[Part] = []
    work: list[float] = []
    for part in planned(large, config, num_devices, vision, text):
        plan, taken = _filled(part, shorter, entries, config, vision)
        shorter = [piece for piece in shorter if piece not in taken]
        pieces = [*part.pieces, *taken]
        plan, seconds = _estimated(plan, pieces, entries, work_of)
        parts.append(Part(entries, pieces, lambda *_, plan=plan: plan, config, vision))
        work.append(seconds)
    left: dict[int, list[int]] = {}
    for piece in shorter:
        left.setdefault(piece.item, []).extend(piece.responses)
    return parts, work, [entries[item].only(sorted(own)) for item, own in sorted(left.items())]


def _filled(
    part: Part, shorter: Sequence[Piece], entries: Sequence[TrainGroup], config: Config, vision: VisionConfig | None
) -> tuple[ShardPlan, list[Piece]]:
    """The plan of `part` with some of the `shorter` sequences, longest first, on devices that it leaves idle; which.

    All rows of a microbatch are as long as the longest one, and attention takes as long as that of the busiest device.
    So no device gets more tokens or more attention than some device has anyway. Media are spread evenly wherever their
    sequence is, so they only have to fit.
    """
    plan, patches = part.plan, _patches_per_device(config, vision)
    squares = dataclasses.replace(plan, work=tuple(squares_of(entries, piece) for piece in part.pieces)).compute()
    loads_D2 = np.stack([row_tokens(plan.num_devices, plan.lengths, plan.rounds), squares], axis=1)
    most_2 = loads_D2.max(axis=0)
    if loads_D2[:, 0].mean() > EVEN * most_2[0]:
        return plan, []
    replica, frame = _replica(plan.num_devices), frame_bound_of(entries)
    media_R: list[set[int]] = [set() for _ in range(plan.num_devices // replica)]  # whose are in each replica
    for piece, first in zip(part.pieces, plan.firsts, strict=True):
        media_R[first // replica].add(piece.item)

    def fits(device: int, piece: Piece) -> bool:
        items = media_R[device // replica] | {piece.item}
        return surely_hold(sum(entries[item].item.patches for item in items), frame, replica, patches)

    taken: list[Piece] = []
    firsts: list[int] = []
    for piece in shorter:
        own_2 = np.array([tokens_of(entries, piece), squares_of(entries, piece)])
        free = [d for d in np.flatnonzero((loads_D2 + own_2 <= most_2).all(axis=1)).tolist() if fits(d, piece)]
        if free:
            device = min(free, key=lambda d: (loads_D2[d, 0], d))
            loads_D2[device] += own_2
            media_R[device // replica].add(piece.item)
            taken.append(piece)
            firsts.append(device)
    lengths = (*plan.lengths, *(tokens_of(entries, piece) for piece in taken))
    degrees, all_firsts = (*plan.degrees, *(1 for _ in taken)), (*plan.firsts, *firsts)
    settings = config.packing
    packing = {"short": settings.short, "cap": settings.group_cap, "most": settings.rounds_per_degree}
    made = rounds(plan.num_devices, lengths, degrees, all_firsts, **packing)
    return ShardPlan(plan.num_devices, lengths, (0.0,) * len(lengths), degrees, all_firsts, made), taken


def _estimated(
    plan: ShardPlan, pieces: Sequence[Piece], entries: Sequence[TrainGroup], work_of: Estimate
) -> tuple[ShardPlan, float]:
    """The plan with the work of its sequences without their media, and that of the busiest device with its media."""
    tokens = np.array(plan.lengths, float)
    squares = np.array([squares_of(entries, piece) for piece in pieces])
    patches = np.array([entries[piece.item].item.patches for piece in pieces], float)
    work = work_of(tokens, squares, np.zeros(len(pieces)))
    media = float((work_of(tokens, squares, patches) - work).sum()) / plan.num_devices
    plan = dataclasses.replace(plan, work=tuple(work.tolist()))
    return plan, float(plan.compute().max()) + media


def _patches_per_device(config: Config, vision: VisionConfig | None) -> int:
    return config.packing.patches_per_device // vision.merge_unit * vision.merge_unit if vision is not None else 0


def _replica(num_devices: int) -> int:
    """Devices over which a microbatch's media are spread."""
    return 1 << len(binary_axes(num_devices))
