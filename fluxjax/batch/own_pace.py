"""Deals sequences to devices that keep their own pace (`sharding.strategy` `odc`).

Devices wait for one another only at the end of a minibatch. So each device's work over all of its microbatches has to
be even, not the number or the size of its microbatches (ODC paper, section 4). A microbatch is one row of one device,
laid out like any spread one, by a plan of a single device; the device computes its own media, too. Sequences that one
device can't hold are computed by all devices together, before the others: see `collective`.
"""

from collections.abc import Sequence

import numpy as np

from models.config import TextConfig, VisionConfig
from models.processing.vision_input import common_bound
from sharding.planner.packing import Microbatches, busiest, lb_mini
from sharding.planner.plan import ShardPlan, rounds
from sharding.spread.shapes import ShapeBook

from ..config import Config
from .collective import Collective, work_of
from .part import Part, outlines_of
from .share import Item, Outline, Piece, TrainGroup, pieces_of
from .work import estimate

CUTS = 3  # smaller sizes of pieces that are tried with shared prompts
WORTH = 0.01  # share of a step's predicted time that further copies of prompts must save


class OwnPace:
    """Deals sequences to devices by LB-Mini, after those that no single device holds.

    Raises ConfigError for degrees that the devices or the heads of `text` do not allow, and for a calibration that
    can't be read.
    """

    def __init__(
        self, config: Config, num_devices: int, vision: VisionConfig | None, text: TextConfig | None, shapes: ShapeBook
    ) -> None:
        self._num_devices, self._shapes = num_devices, shapes
        self._work_of = estimate(config, text, vision)
        self._collective = Collective(config, num_devices, vision, text, shapes, self._work_of)
        self._room = self._collective.spreading.room

    def check(self) -> None:
        """Raises ConfigError for rollouts that are longer than the devices of one sequence can hold."""
        self._collective.spreading.check()

    def outline(self, groups: Sequence[TrainGroup]) -> tuple[list[Outline], Sequence[TrainGroup]]:
        """Returns the microbatches and their groups: first those of all devices together, for sequences that no single
        device holds; then those of one device each, device after device, each device's heaviest first.

        With `packing.share_prompts` a group is one sequence, and its responses are branches behind one copy of the
        prompt, unless it exceeds a device's row or would make devices wait; otherwise each response is a sequence. A
        device may have no microbatch of its own.

        Raises ConfigError, naming prompt and field, for a sequence or media that the devices of a sequence do not hold.
        """
        parts, together, rest = self._collective.parts(groups)
        groups = [*together, *rest]
        return outlines_of([*parts, *(self._alone(groups, len(together)) if rest else ())], self._shapes), groups

    def _alone(self, groups: Sequence[TrainGroup], first: int) -> list[Part]:
        """Returns the microbatches of single devices, of the groups from number `first` on."""
        pieces, work, devices = self._deal([group.item for group in groups[first:]])
        pieces = [piece._replace(item=first + piece.item) for piece in pieces]
        patches, frame = self._room.patches, common_bound(group.inputs for group in groups[first:])
        found: list[Part] = []
        for device, microbatches in enumerate(devices):
            fitting = [part for members in microbatches for part in _within(members, pieces, patches)]
            for members in sorted(fitting, key=lambda members: (-work[members].sum(), members)):
                chosen, load = [pieces[i] for i in members], float(work[members].sum())
                found.append(Part(groups, chosen, _on_one_device(chosen), self._room, frame, device, load))
        return found

    def _deal(self, items: Sequence[Item]) -> tuple[list[Piece], np.ndarray, list[Microbatches]]:
        """Returns the pieces, their work, and the microbatches of each device.

        With about as many groups as devices, or fewer, the work can't be even. So smaller pieces are tried, too: the
        responses of a group are cut at a device's share of all tokens, or at a half or a quarter of it, at the cost of
        further copies of the prompts.
        """
        room, share = self._room.tokens, self._room.share_prompts
        whole = pieces_of(items, room, share)
        mean = -(-sum(piece.tokens for piece in whole) // self._num_devices)
        choices = [whole, *(pieces_of(items, room, True, max(mean >> k, 1)) for k in range(CUTS) if share)]
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


def _on_one_device(pieces: Sequence[Piece]) -> ShardPlan:
    lengths = tuple(piece.tokens for piece in pieces)
    degrees, firsts = (1,) * len(lengths), (0,) * len(lengths)
    work = tuple(piece.squares for piece in pieces)
    return ShardPlan(1, lengths, work, degrees, firsts, rounds(1, lengths, degrees, firsts))


def _within(members: Sequence[int], pieces: Sequence[Piece], cap: int) -> list[list[int]]:
    """Splits the members of a microbatch into parts of at most `cap` patches, as few as first-fit-decreasing finds. An
    item's patches stand once in a microbatch, so its pieces stay together."""
    parts: list[set[int]] = []
    used: list[int] = []
    media = {pieces[i].item: pieces[i].patches for i in members}
    for item, patches in sorted(media.items(), key=lambda pair: (-pair[1], pair[0])):
        place = next((k for k, n in enumerate(used) if n + patches <= cap), len(parts))
        if place == len(parts):
            parts.append(set())
            used.append(0)
        parts[place].add(item)
        used[place] += patches
    return [sorted(i for i in members if pieces[i].item in part) for part in parts]
