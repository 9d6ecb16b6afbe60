"""Groups whose sequences are spread over devices (`sharding.strategy` other than `fsdp`): planned, then laid out.

Everything is first laid out as one long row, as if there were one device; the plan's layout then says to which
device and column each token of that row goes. The vision tower's frames are dealt out by a plan of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np

from models.config import VisionConfig
from models.inputs import VisionInput
from models.processing.vision_input import concatenate
from sharding.cost import CostError, CostModel
from sharding.mesh import binary_axes
from sharding.plan import PlanError, ShardPlan
from sharding.planner import Limits, flex_ulysses, spread_vision, ulysses
from sharding.route import Route, route
from sharding.shapes import ShapeBook, Sizes
from sharding.spread import SizedLayout, lay, size_weights

from .config import Config, ConfigError, Strategy
from .layout import Composition, Entry, Spans, blank, fill, frame_bound_of, side_by_side, train_batch
from .packing import Budget, Piece, cut
from .types import TrainBatch

Planner = Callable[[Sequence[int], Sequence[float]], ShardPlan]  # (tokens, work) of each sequence -> plan


def planner(config: Config, num_heads: int, num_devices: int) -> Planner:
    """The planner that `config.sharding` asks for; `num_heads` query heads bound the degrees (0: no bound).

    Raises ConfigError for degrees that the devices or the heads do not allow.
    """
    settings, packing = config.sharding, config.packing
    try:
        limits = Limits(
            max_degree=settings.max_degree,
            num_heads=num_heads,
            alpha=settings.alpha,
            tolerance=settings.tolerance,
            tokens_per_device=tokens_per_device(config),
            short=packing.short,
            cap=packing.group_cap,
            rounds_per_degree=packing.rounds_per_degree,
        )
        degree = limits.degree(num_devices)
    except PlanError as error:
        raise ConfigError(_explained(error)) from error
    if settings.strategy is Strategy.ULYSSES:
        return lambda lengths, work: ulysses(lengths, num_devices, limits, work=work, degree=degree)
    if not settings.calibration:
        return lambda lengths, work: flex_ulysses(lengths, num_devices, limits, work=work)
    try:
        cost = _calibration(settings.calibration)
    except CostError as error:
        raise ConfigError(f"sharding.calibration: {error}") from error

    def calibrated(lengths: Sequence[int], squares: Sequence[float]) -> ShardPlan:
        # Attention over a shared prompt is not quadratic in the length: the model is asked for that of equal work.
        work = cost.attention_seconds(np.sqrt(squares)) + cost.linear_seconds(np.array(lengths, float))
        try:
            return flex_ulysses(lengths, num_devices, limits, work=work, cost=_Squares(cost, squares))
        except CostError as error:
            raise ConfigError(f"sharding.calibration {settings.calibration}: {error}") from error

    return calibrated


@dataclasses.dataclass(frozen=True)
class _Squares:
    """A cost model for sequences of which attention is quadratic in something else than their lengths."""

    cost: CostModel
    squares: Sequence[float]

    def step_seconds(self, plan: ShardPlan) -> float:
        return self.cost.step_seconds(plan, squares=self.squares)


def _explained(error: PlanError) -> str:
    return (
        f"{error} (in the configuration: sharding.max_degree, and packing.tokens_per_row * packing.rows_per_device for "
        "tokens_per_device)"
    )


@functools.cache
def _calibration(path: str) -> CostModel:
    return CostModel.load(path)


def tokens_per_device(config: Config) -> int:
    """The row of a device: as many tokens as its packed rows would have together."""
    return config.packing.tokens_per_row * config.packing.rows_per_device


def compose_spread(
    entries: Sequence[Entry],
    config: Config,
    num_devices: int,
    vision: VisionConfig | None,
    num_heads: int,
    book: ShapeBook,
) -> Composition:
    """As few microbatches as the devices' memory allows, each with one row a device.

    With `packing.share_prompts` a group is one sequence, its responses are branches behind one copy of the prompt;
    otherwise each response is a sequence of its own. `book` keeps the shapes few. Raises ConfigError where no plan
    exists.
    """
    plan = planner(config, num_heads, num_devices)
    pieces = _pieces(entries, config, num_devices, num_heads)
    least = math.ceil(sum(_tokens(entries, piece) for piece in pieces) / (tokens_per_device(config) * num_devices))
    failure: PlanError | None = None
    for count in range(min(max(least, 1), len(pieces)), len(pieces) + 1):
        try:
            parts = [_Part(entries, members, plan, config, vision) for members in _deal(entries, pieces, count)]
        except PlanError as error:
            failure = failure or error
        else:
            return _joined([part.fill(book) for part in parts])
    assert failure is not None
    raise ConfigError(_explained(failure)) from failure


def _pieces(entries: Sequence[Entry], config: Config, num_devices: int, num_heads: int) -> list[Piece]:
    items = [entry.item for entry in entries]
    if not config.packing.share_prompts:
        return [Piece(i, (k,)) for i, item in enumerate(items) for k in range(len(item.responses))]
    # A group that not even all devices of a sharded sequence could hold is cut, its prompt computed twice.
    degree = Limits(max_degree=config.sharding.max_degree, num_heads=num_heads).degree(num_devices)
    longest = Budget(tokens_per_device(config) * degree, (), ())
    return [
        piece
        for i, item in enumerate(items)
        for piece in (
            cut(items, i, longest)
            if item.prompt + max(item.responses) <= longest.tokens_per_row
            else [Piece(i, (k,)) for k in range(len(item.responses))]
        )
    ]


def _tokens(entries: Sequence[Entry], piece: Piece) -> int:
    item = entries[piece.item].item
    return item.prompt + sum(item.responses[k] for k in piece.responses)


def _work(entries: Sequence[Entry], piece: Piece) -> float:
    """Twice the (query, key) pairs that attention looks at: `length**2` for a prompt with one response."""
    item = entries[piece.item].item
    return float(item.prompt**2) + sum(r**2 + 2 * item.prompt * r for r in (item.responses[k] for k in piece.responses))


def _deal(entries: Sequence[Entry], pieces: Sequence[Piece], count: int) -> list[list[Piece]]:
    """Longest first into the microbatch with the fewest tokens; order within a microbatch is that of `pieces`."""
    if count == 1:
        return [list(pieces)]
    totals, members = [0] * count, [[] for _ in range(count)]
    for index in sorted(range(len(pieces)), key=lambda i: (-_tokens(entries, pieces[i]), i)):
        target = totals.index(min(totals))
        totals[target] += _tokens(entries, pieces[index])
        members[target].append(index)
    return [[pieces[i] for i in sorted(indices)] for indices in members if indices]


class _Part:
    """One microbatch: planned when it is made, which may fail; then filled."""

    layout: SizedLayout
    spans: Spans
    batch: TrainBatch

    def __init__(
        self,
        entries: Sequence[Entry],
        pieces: Sequence[Piece],
        plan: Planner,
        config: Config,
        vision: VisionConfig | None,
    ) -> None:
        self._entries, self._pieces = entries, pieces
        self._cap, self._share = tokens_per_device(config), config.packing.share_prompts
        shard_plan = plan([_tokens(entries, p) for p in pieces], [_work(entries, p) for p in pieces])
        self._bare = lay(shard_plan, self._cap)
        patches = config.packing.patches_per_device
        self._media = None if vision is None else _Media(entries, pieces, shard_plan, patches, vision)

    def fill(self, book: ShapeBook) -> _Part:
        """Lays everything out in buffers of sizes that `book` chooses."""
        bare, media = self._bare, self._media
        self.spans = Spans(total=sum(bare.plan.lengths))
        features = media.first_feature if media else {}
        self.spans.place(tuple(self._pieces), 0, self._entries, features, self._share)
        line = {
            name: array.reshape(*array.shape[:-2], -1) for name, array in fill(self.spans, self.spans.total).items()
        }
        feature_index, predecessor = line["feature_index"], line["predecessor"]

        needs = bare.needs() | bare.imports(predecessor).needs()
        caps, weights = {"columns": self._cap}, size_weights(needs)
        if media is not None:
            needs |= media.needs(feature_index, bare.device)
            caps["patches"] = media.cap
            weights |= {name: 0.25 for name in needs if name == "patches" or name.startswith("send/")}
        sizes = book.fit(needs, caps, weights)

        self.layout = bare.sized(sizes)
        line["predecessor"], spread = self.layout.spread(predecessor)
        buffer = None
        if media is not None:
            line["feature_index"], buffer = media.buffers(feature_index, bare.device, sizes)
        self.batch = train_batch(_onto_rows(line, self.layout), buffer, spread)
        return self

    def response_cells(self) -> np.ndarray:
        """The cells of all response tokens, response after response."""
        return self.layout.cells[self.spans.response_cells()]


_PADDING = {"feature_index": -1, "versions": -1}  # 0 elsewhere


def _onto_rows(line: dict[str, np.ndarray], layout: SizedLayout) -> dict[str, np.ndarray]:
    """`[..., tokens]` -> `[..., devices, columns]`."""
    devices, columns = layout.plan.num_devices, layout.columns
    rows = {}
    for name, values in line.items():
        flat = np.full((*values.shape[:-1], devices * columns), _PADDING.get(name, 0), values.dtype)
        flat[..., layout.cells] = values
        rows[name] = flat.reshape(*values.shape[:-1], devices, columns)
    return rows


class _Media:
    """The frame pairs of a microbatch on the devices that compute them, and the route of their features."""

    def __init__(
        self, entries: Sequence[Entry], pieces: Sequence[Piece], plan: ShardPlan, cap: int, vision: VisionConfig
    ) -> None:
        self._vision, self._num_devices = vision, plan.num_devices
        self.cap = cap // vision.merge_unit * vision.merge_unit
        owners = {piece.item: i for i, piece in reversed(list(enumerate(pieces)))}  # the first piece of each item
        self._bound = frame_bound_of(entries)
        self.first_feature: dict[int, int] = {}
        self._units: list[tuple[VisionInput, int, int]] = []  # part, first patch, end
        home: list[int] = []  # the piece of each unit
        used = 0
        for item in sorted(owners):
            part = entries[item].inputs.vision
            if part is None:
                continue
            self.first_feature[item] = used // vision.merge_unit
            used += part.num_patches
            edges = [0, *(np.flatnonzero(np.diff(part.frame_segments_P)) + 1).tolist(), part.num_patches]
            self._units += [(part, start, stop) for start, stop in pairwise(edges)]
            home += [owners[item]] * (len(edges) - 1)
        self._sizes = np.array([stop - start for _, start, stop in self._units], np.int64)
        self.plan = spread_vision(
            self._sizes.tolist(),
            [plan.firsts[i] for i in home],
            [plan.degrees[i] for i in home],
            plan.num_devices,
            replica=1 << len(binary_axes(plan.num_devices)),
        )
        self._fullest = int(self.plan.loads().max())
        if self._fullest > self.cap:
            raise PlanError(
                f"a device would get {self._fullest} patches, more than packing.patches_per_device = {cap}; raise it"
            )

    def needs(self, feature_index: np.ndarray, device: np.ndarray) -> Sizes:
        """Least sizes; `device` is that of each token."""
        _, way, _ = self._way(feature_index, device, self._fullest // self._vision.merge_unit, None)
        return {"patches": max(self._fullest, self._vision.merge_unit)} | way.needs()

    def buffers(self, feature_index: np.ndarray, device: np.ndarray, sizes: Sizes) -> tuple[np.ndarray, VisionInput]:
        """(where each token finds its feature after routing, the patches of all devices side by side)."""
        patches = -(-sizes["patches"] // self._vision.merge_unit) * self._vision.merge_unit
        tokens, way, found = self._way(feature_index, device, patches // self._vision.merge_unit, sizes)
        result = feature_index.copy()
        result[tokens] = found
        return result, self._side_by_side(patches, way)

    def _way(
        self, feature_index: np.ndarray, device: np.ndarray, rows: int, sizes: Sizes | None
    ) -> tuple[np.ndarray, Route, np.ndarray]:
        """(the tokens that show features, the route, the row where each of these tokens finds its feature)."""
        owners = np.array(self.plan.devices, np.int64)
        order = np.argsort(owners, kind="stable")
        ends = np.cumsum(self._sizes[order])
        begun = np.concatenate([[0], ends])[np.searchsorted(owners[order], owners[order])]
        placed = np.zeros(len(owners), np.int64)  # first patch of each unit in its device's buffer
        placed[order] = ends - self._sizes[order] - begun
        merged = self._sizes // self._vision.merge_unit
        within = np.arange(merged.sum()) - np.repeat(np.cumsum(merged) - merged, merged)
        row = np.repeat(placed // self._vision.merge_unit, merged) + within  # of each feature, unit after unit
        tokens = np.flatnonzero(feature_index >= 0)
        wanted = feature_index[tokens]
        source = np.repeat(owners, merged)[wanted]
        return tokens, *route(source, row[wanted], device[tokens], self._num_devices, rows, sizes)

    def _side_by_side(self, patches: int, way: Route) -> VisionInput:
        members: list[list[tuple[VisionInput, int, int]]] = [[] for _ in range(self._num_devices)]
        for unit, device in zip(self._units, self.plan.devices, strict=True):
            members[device].append(unit)
        buffers: list[VisionInput] = []
        for units in members:
            runs = [_slice(*run) for run in _runs(units)]
            used = sum(run.num_patches for run in runs)
            buffers.append(concatenate([*runs, blank(patches - used, self._vision)]))
        return side_by_side(buffers, self._bound, way)


def _runs(units: Iterable[tuple[VisionInput, int, int]]) -> list[tuple[VisionInput, int, int]]:
    """Units that follow each other in one input, joined."""
    runs: list[tuple[VisionInput, int, int]] = []
    for part, start, stop in units:
        if runs and runs[-1][0] is part and runs[-1][2] == start:
            runs[-1] = (part, runs[-1][1], stop)
        else:
            runs.append((part, start, stop))
    return runs


def _slice(part: VisionInput, start: int, stop: int) -> VisionInput:
    return VisionInput(
        part.patches_PX[start:stop],
        part.positions_P2[start:stop],
        part.frame_segments_P[start:stop],
        part.window_segments_P[start:stop],
        part.frame_bound,
    )


def _joined(parts: Sequence[_Part]) -> Composition:
    cells, first = [], 0
    for part in parts:
        cells.append(first + part.response_cells())
        first += part.layout.plan.num_devices * part.layout.columns
    samples = [sample for part in parts for sample in part.spans.samples]
    return Composition(
        tuple(part.batch for part in parts),
        tuple((sample.response.draw, sample.response.sample) for sample in samples),
        np.concatenate(cells),
        np.concatenate([part.spans.response_lengths() for part in parts]),
        tuple(part.layout for part in parts),
    )
