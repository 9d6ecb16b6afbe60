"""Spreads sequences over devices (`sharding.strategy` `ulysses`, `flex_ulysses`).

A planner chooses the devices of each sequence in each microbatch. `fill` then lays the microbatches out.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from models.config import TextConfig
from models.inputs import common_bound
from sharding.cost import CostError, CostModel
from sharding.mesh import replica_size
from sharding.planner.flex import Limits, flex_ulysses, ulysses
from sharding.planner.plan import PlanError, ShardPlan
from sharding.spread.buffers import size_cost
from sharding.spread.shapes import ShapeBook, Sizes, round_up

from ..config import Config, ConfigError, Ulysses
from .part import Part, Room, outlines_of
from .share import Outline, Piece, TrainGroup, pieces_of
from .work import calibrated, forward_seconds, mixing_work

# (tokens of each sequence, squares of each sequence, the most tokens of a device) -> plan
Planner = Callable[[Sequence[int], Sequence[float], int], ShardPlan]

TIGHT = 1.02  # length of a new program's rows, as a multiple of a device's mean tokens
LOOSE = 1.12  # longest rows of a compiled program that is used again, as a multiple of a device's mean tokens
TRIES = 2  # lengths of rows of compiled programs that are tried
# Largest `ShardPlan.balance` of a plan that counts as even, and of one that is used only if it saves a program.
EVEN, NEARLY_EVEN = 1.03, 1.06


class Spreading:
    """Plans microbatches in which one device, or several together, compute each sequence. The heads of `text` bound the
    degrees (None: no bound). Raises ConfigError for a degree that the devices or the heads do not allow, and for a
    calibration that is unreadable or lacks a degree."""

    def __init__(
        self, config: Config, num_devices: int, room: Room, text: TextConfig | None, shapes: ShapeBook
    ) -> None:
        self._num_devices, self._shapes = num_devices, shapes
        self._by_cost = bool(config.sharding.calibration)
        self.degree, self._plan = planner(config, text, num_devices, room.tokens)
        self._room = dataclasses.replace(room, degree=self.degree)

    def outline(self, groups: Sequence[TrainGroup]) -> tuple[list[Outline], Sequence[TrainGroup]]:
        """Returns the microbatches of `parts`, and `groups`."""
        return outlines_of(self.parts(groups), self._shapes), groups

    def parts(self, groups: Sequence[TrainGroup]) -> list[Part]:
        """Returns as few microbatches as the devices' memory allows, each with one row a device. A step that fits no
        compiled program gets a new program. But once `ShapeBook.settled` is True, the step gets one more microbatch
        instead, if its parts then fit compiled programs. Raises ConfigError if no plan exists."""
        room, frame = self._room, common_bound(shown for group in groups for shown in group.shown)
        # A group that exceeds `degree` devices is cut into pieces, and each piece computes the group's prompt again.
        longest, patches = room.tokens * self.degree, room.whole_patches * replica_size(self._num_devices)
        pieces = pieces_of([group.item for group in groups], longest, room.share_prompts, patches=patches)
        least = math.ceil(sum(piece.tokens for piece in pieces) / (room.tokens * self._num_devices))
        counts = range(min(max(least, 1), len(pieces)), len(pieces) + 1)

        def dealt(count: int) -> list[Part]:
            return [self._part(groups, members, frame) for members in _deal(pieces, count)]

        failures: list[PlanError] = []
        for count in counts:
            try:
                parts = dealt(count)
            except PlanError as error:
                failures.append(error)
                continue
            if count + 1 not in counts or not self._shapes.settled(self._num_devices) or all(map(self._held, parts)):
                return parts
            with contextlib.suppress(PlanError):
                more = dealt(count + 1)
                if all(self._compiled(part) is not None for part in more):
                    self._shapes.divide(self._num_devices)
                    return more
            return parts
        raise ConfigError(_explained(failures[0])) from failures[0]

    def _part(self, groups: Sequence[TrainGroup], pieces: Sequence[Piece], frame: int) -> Part:
        """Returns the microbatch of these pieces. Plans are tried for the rows of compiled programs, then for rows
        slightly longer than a device's mean tokens. If no such plan is even, the planner chooses freely, unless a
        nearly even plan saves a program. With measured costs (`sharding.calibration`) the planner always chooses
        freely, because given rows would overrule the costs."""
        tokens, squares = [piece.tokens for piece in pieces], [piece.squares for piece in pieces]
        room, mean = self._room.tokens, sum(tokens) / self._num_devices
        known = self._shapes.columns(self._num_devices, int(TIGHT * mean), min(int(LOOSE * mean), room))[:TRIES]
        tried = [] if self._by_cost else [*known, min(round_up(int(TIGHT * mean)), room)]
        fallback: Part | None = None
        for columns in tried:
            try:
                plan = self._plan(tokens, squares, columns)
                if plan.balance > NEARLY_EVEN:
                    continue
                part = Part(groups, pieces, plan, self._room, frame, shaped=True)
            except PlanError:
                continue
            compiled = self._compiled(part) is not None
            if plan.balance <= EVEN and (compiled or columns not in known):
                return part
            fallback = fallback or (part if compiled else None)
        free = Part(groups, pieces, self._plan(tokens, squares, room), self._room, frame)
        return fallback or free if self._compiled(free) is None else free

    def _held(self, part: Part) -> bool:
        return bool(self._shapes.holding(part.needs, part.caps, self._num_devices))

    def _compiled(self, part: Part) -> Sizes | None:
        return self._shapes.found(part.needs, part.caps, size_cost, self._num_devices)


def planner(config: Config, text: TextConfig | None, num_devices: int, room: int) -> tuple[int, Planner]:
    """Returns the largest number of devices of a sequence, and the planner for `config.sharding`. A device holds `room`
    tokens. Raises ConfigError as `Spreading` does."""
    settings, strategy = config.sharding, config.sharding.strategy
    heads = [] if text is None else [text.num_heads, *([text.delta.value_heads] if text.delta else [])]
    most_devices = strategy.max_degree if isinstance(strategy, Ulysses) else 0
    try:
        limits = Limits(most_devices, min(heads, default=0), tokens_per_device=room, tau=settings.devices_per_host)
        degree = limits.degree(num_devices)
    except PlanError as error:
        raise ConfigError(_explained(error)) from error
    cost: CostModel | None = None
    if settings.calibration and strategy.name != "ulysses":
        try:
            cost = calibrated(config, text)
            for k in range(1, degree.bit_length()):
                cost.all_to_all_seconds(1, 1 << k)
        except CostError as error:
            raise ConfigError(f"sharding.calibration: {error}; or lower sharding.strategy.max_degree") from error

    def plan(lengths: Sequence[int], squares: Sequence[float], most: int) -> ShardPlan:
        within = dataclasses.replace(limits, tokens_per_device=most)
        if cost is not None:
            work = forward_seconds(cost, lengths, squares)
            measured = functools.partial(cost.step_seconds, squares=squares)
            return flex_ulysses(lengths, num_devices, within, work=work, cost=measured)
        work = mixing_work(text, lengths, squares)
        if strategy.name == "ulysses":
            return ulysses(lengths, num_devices, within, work=work, degree=degree)
        return flex_ulysses(lengths, num_devices, within, work=work)

    return degree, plan


def _explained(error: PlanError) -> str:
    words = str(error).replace("limits.tokens_per_device", "packing.tokens_per_row * packing.rows_per_device")
    return words.replace("limits.max_degree", "sharding.strategy.max_degree").replace("limits.num_heads", "the model's")


def _deal(pieces: Sequence[Piece], count: int) -> list[list[Piece]]:
    """Deals each piece, the longest first, to the microbatch with the fewest tokens. Its pieces keep their order."""
    if count == 1:
        return [list(pieces)]
    totals, members = [0] * count, [[] for _ in range(count)]
    for index in sorted(range(len(pieces)), key=lambda i: (-pieces[i].tokens, i)):
        target = totals.index(min(totals))
        totals[target] += pieces[index].tokens
        members[target].append(index)
    return [[pieces[i] for i in sorted(indices)] for indices in members if indices]
