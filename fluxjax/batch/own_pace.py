"""Deals sequences to devices that keep their own pace (`sharding.strategy` `odc`).

Devices wait for one another only at the end of a minibatch. All devices should therefore get equal work in a minibatch,
in any number of microbatches of any size (ODC paper, section 4). A microbatch is one row of one device, laid out by a
plan of a single device. The same device computes the row's media.

Sequences that one device can't hold are computed first, by all devices together, spread as under `flex_ulysses`. In
these microbatches all devices wait for one another at every layer. Devices that the plan leaves idle therefore compute
shorter sequences, as long as the microbatch takes no more time.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from models.config import TextConfig
from models.inputs import common_bound
from sharding.mesh import replica_size
from sharding.planner.packing import Microbatches, busiest, lb_mini
from sharding.planner.plan import ShardPlan, rounds
from sharding.planner.vision_units import surely_hold
from sharding.spread.shapes import ShapeBook

from ..config import Config
from .part import Part, Room, outlines_of
from .share import Item, Outline, Piece, TrainGroup, check, first_fit, patches_of, pieces_of
from .spreading import Spreading
from .work import Estimate, estimate

EVEN_TOKENS = 0.95  # mean of the devices' tokens, divided by the maximum; above this ratio, no device counts as idle
CUTS = 3  # bounds on a piece's responses that are tried with shared prompts; each is half of the previous bound
WORTH = 0.01  # share of a step's predicted time that further copies of prompts must save


class OwnPace:
    """Deals sequences to devices by LB-Mini (ODC paper), which makes the work of a minibatch even. Raises ConfigError
    for a degree that the devices or the heads of `text` do not allow, and for an unreadable calibration."""

    def __init__(
        self, config: Config, num_devices: int, room: Room, text: TextConfig | None, shapes: ShapeBook
    ) -> None:
        self._num_devices, self._shapes, self._room = num_devices, shapes, room
        self._work_of = estimate(config, text, room.vision)
        self._spreading = Spreading(config, num_devices, room, text, shapes)
        self.degree = self._spreading.degree
        self._replica = replica_size(num_devices)  # devices over which a microbatch's media are spread

    def outline(self, groups: Sequence[TrainGroup]) -> tuple[list[Outline], Sequence[TrainGroup]]:
        """Returns the microbatches, and the groups to which `Piece.item` refers. First come microbatches of all devices
        together, then microbatches of single devices. Microbatches of single devices are sorted by device, then by
        decreasing work. A device may have no microbatch of its own. A group that exceeds a device's row, or makes the
        work uneven, is cut into several pieces (`pieces_of`).

        Raises ConfigError, naming prompt and field, for a sequence or media that the devices of a sequence cannot hold.
        """
        parts, together, rest = self._together(groups)
        groups = [*together, *rest]
        return outlines_of([*parts, *(self._alone(groups, len(together)) if rest else ())], self._shapes), groups

    def _alone(self, groups: Sequence[TrainGroup], first: int) -> list[Part]:
        pieces, work, devices = self._deal([group.item for group in groups[first:]])
        pieces = [piece._replace(item=first + piece.item) for piece in pieces]
        patches, frame = self._room.patches, common_bound(shown for group in groups[first:] for shown in group.shown)
        found: list[Part] = []
        for device, microbatches in enumerate(devices):
            fitting = [part for members in microbatches for part in _within(members, pieces, patches)]
            for members in sorted(fitting, key=lambda members: (-work[members].sum(), members)):
                chosen, load = [pieces[i] for i in members], float(work[members].sum())
                lengths, squares = tuple(piece.tokens for piece in chosen), tuple(piece.squares for piece in chosen)
                degrees, firsts = (1,) * len(chosen), (0,) * len(chosen)
                plan = ShardPlan(1, lengths, squares, degrees, firsts, rounds(1, degrees, firsts))
                found.append(Part(groups, chosen, plan, self._room, frame, device, load))
        return found

    def _deal(self, items: Sequence[Item]) -> tuple[list[Piece], np.ndarray, list[Microbatches]]:
        """Returns the pieces, their work, and the microbatches of each device. The work of few groups can't be even.
        With shared prompts, smaller pieces are therefore tried, which need more copies of the prompts. The responses of
        a smaller piece have at most a device's share of all tokens, or a half or a quarter of this share."""
        room, share, patches = self._room.tokens, self._room.share_prompts, self._room.whole_patches
        whole = pieces_of(items, room, share, patches=patches)
        mean = -(-sum(piece.tokens for piece in whole) // self._num_devices)
        choices = [whole, *(pieces_of(items, room, True, max(mean >> k, 1), patches) for k in range(CUTS) if share)]
        best: tuple[list[Piece], np.ndarray, list[Microbatches]] | None = None
        least = 0.0
        for pieces in choices:
            tokens, work = np.array([piece.tokens for piece in pieces]), work_of(self._work_of, pieces)
            devices = lb_mini(tokens, work, self._num_devices, room)
            longest = busiest(devices, work)
            if best is None or longest < (1 - WORTH) * least:
                best, least = (pieces, work, devices), longest
        assert best is not None
        return best

    def _together(self, groups: Sequence[TrainGroup]) -> tuple[list[Part], list[TrainGroup], list[TrainGroup]]:
        """Returns the microbatches that all devices compute together, the groups to which `Piece.item` refers in these
        microbatches, and the groups of all remaining responses. Raises ConfigError, naming prompt and field, for a
        sequence too long for `degree` devices, and if no plan exists."""
        large, rest = self._split(groups)
        if not large:
            return [], [], rest
        groups = [*large, *rest]
        frame, room = common_bound(shown for group in groups for shown in group.shown), self._room
        shorter = pieces_of([group.item for group in rest], room.tokens, room.share_prompts, patches=room.whole_patches)
        shorter = [piece._replace(item=len(large) + piece.item) for piece in shorter]
        shorter.sort(key=lambda piece: (-piece.tokens, piece))
        parts: list[Part] = []
        for part in self._spreading.parts(large):
            plan, taken = self._filled(part, shorter, frame)
            shorter = [piece for piece in shorter if piece not in taken]
            pieces = [*part.pieces, *taken]
            work = work_of(self._work_of, [piece._replace(patches=0, observed=0) for piece in pieces])
            media = float((work_of(self._work_of, pieces) - work).sum()) / plan.num_devices
            plan = dataclasses.replace(plan, work=tuple(work.tolist()))
            parts.append(Part(groups, pieces, plan, self._room, frame, work=float(plan.compute().max()) + media))
        left: dict[int, list[int]] = {}
        for piece in shorter:
            left.setdefault(piece.item, []).extend(piece.responses)
        return parts, groups, [groups[item].only(sorted(left[item])) for item in sorted(left)]

    def _split(self, groups: Sequence[TrainGroup]) -> tuple[list[TrainGroup], list[TrainGroup]]:
        """Returns the groups of responses that need several devices, and the groups of responses that one device holds.
        A group may be in both lists, with different responses. With `packing.share_prompts`, a response that one device
        could hold may stay with the longer responses of its group (see `_followed`)."""
        room, share, patches = self._room.tokens, self._room.share_prompts, self._room.whole_patches
        degree, replica = self.degree, self._replica
        check(
            [group.item for group in groups],
            degree * room,
            replica * patches,
            "packing.tokens_per_row * packing.rows_per_device" + (f" * {degree} devices" if degree > 1 else ""),
            "packing.patches_per_device" + (f" * {replica} devices" if replica > 1 else ""),
        )
        large: list[TrainGroup] = []
        rest: list[TrainGroup] = []
        for group in groups:
            item = group.item
            beyond = {
                k
                for k, n in enumerate(item.responses)
                if item.prompt + n > room or item.patches + item.observed_by([k]) > patches
            }
            if share and 0 < len(beyond) < len(item.responses):
                beyond = _followed(item, beyond, room, degree * room)
            large += [group.only(sorted(beyond))] if beyond else []
            held = [k for k in range(len(item.responses)) if k not in beyond]
            rest += [group.only(held)] if held else []
        return large, rest

    def _filled(self, part: Part, shorter: Sequence[Piece], frame: int) -> tuple[ShardPlan, list[Piece]]:
        """Adds some of the `shorter` sequences, longest first, to idle devices of the plan of `part`. Returns the new
        plan, and the added sequences. No device gets more tokens or attention work than the fullest device has, so that
        the microbatch takes no more time. Media, spread evenly over a replica's devices, only have to fit."""
        plan, patches, replica = part.plan, self._room.whole_patches, self._replica
        squares = dataclasses.replace(plan, work=tuple(piece.squares for piece in part.pieces)).compute()
        loads_D2 = np.stack([plan.rows(), squares], axis=1)
        most_2 = loads_D2.max(axis=0)
        if loads_D2[:, 0].mean() > EVEN_TOKENS * most_2[0]:
            return plan, []
        pieces_R: list[list[Piece]] = [[] for _ in range(plan.num_devices // replica)]  # by replica
        for piece, first in zip(part.pieces, plan.firsts, strict=True):
            pieces_R[first // replica].append(piece)

        def fits(device: int, piece: Piece) -> bool:
            return surely_hold(patches_of([*pieces_R[device // replica], piece]), frame, replica, patches)

        taken: list[Piece] = []
        firsts: list[int] = []
        for piece in shorter:
            load_2 = np.array([piece.tokens, piece.squares])
            free = [d for d in np.flatnonzero((loads_D2 + load_2 <= most_2).all(axis=1)).tolist() if fits(d, piece)]
            if free:
                device = min(free, key=lambda d: (loads_D2[d, 0], d))
                loads_D2[device] += load_2
                pieces_R[device // replica].append(piece)
                taken.append(piece)
                firsts.append(device)
        lengths = (*plan.lengths, *(piece.tokens for piece in taken))
        degrees, all_firsts = (*plan.degrees, *(1 for _ in taken)), (*plan.firsts, *firsts)
        packed = rounds(plan.num_devices, degrees, all_firsts)
        return ShardPlan(plan.num_devices, lengths, (0.0,) * len(lengths), degrees, all_firsts, packed), taken


def _within(members: Sequence[int], pieces: Sequence[Piece], cap: int) -> list[list[int]]:
    """Splits the members of a microbatch by first-fit-decreasing into parts of at most `cap` patches. The pieces of an
    item stay together, since a microbatch has a prompt's patches once, unless its responses observed media."""
    units: dict[tuple[int, int], list[int]] = {}
    for i in members:
        units.setdefault((pieces[i].item, i if pieces[i].observed else -1), []).append(i)
    together = [units[unit] for unit in sorted(units)]
    sizes = [patches_of(pieces[i] for i in unit) for unit in together]
    return [sorted(i for k in part for i in together[k]) for part in first_fit(sizes, cap)]


def work_of(estimate: Estimate, pieces: Sequence[Piece]) -> np.ndarray:
    """Returns the estimated work of each piece, with its media."""
    sizes = np.array([(p.tokens, p.squares, p.patches + p.observed) for p in pieces], float).reshape(-1, 3)
    return np.asarray(estimate(*sizes.T), float)


def _followed(item: Item, beyond: set[int], room: int, all_room: int) -> set[int]:
    """Returns the responses to compute on several devices: `beyond`, which are too long for one device, and perhaps
    further responses, which then need no other copy of the prompt. These are added if the copies that this saves have
    more tokens than the added responses."""
    responses = set(range(len(item.responses)))

    def copies(together: set[int]) -> int:
        kinds = (together, all_room), (responses - together, room)
        return sum(len(pieces_of([item.only(sorted(some))], longest, True)) for some, longest in kinds if some)

    shared = pieces_of([item], all_room, True)
    followed = {k for piece in shared if piece.tokens > room for k in piece.responses}
    saved = (copies(beyond) - copies(followed)) * item.prompt
    return followed if saved > sum(item.responses[k] for k in followed - beyond) else beyond
