"""Groups with sequences spread over devices (`sharding.strategy` `ulysses`, `flex_ulysses`): planned, then laid out.

Everything is first laid out as one long row, as if there were one device; the plan's layout then says to which
device and column each token of that row goes. The vision tower's frames are dealt out by a plan of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from models.config import TextConfig, VisionConfig
from sharding.cost import CostError, CostModel, ModelSizes
from sharding.planner import Limits, flex_ulysses, ulysses
from sharding.planner.plan import PlanError, ShardPlan
from sharding.spread.buffers import SizedLayout, lay, size_weight
from sharding.spread.shapes import ShapeBook

from ..base.types import TrainBatch
from ..config import Config, ConfigError, DType, Strategy
from .fill import Composition, Spans, TrainGroup, fill, train_batch
from .frames import SpreadMedia
from .rows import Budget, Piece, cut

Planner = Callable[[Sequence[int], Sequence[float]], ShardPlan]  # (tokens, work) of each sequence -> plan
Numbers = Sequence[int] | Sequence[float] | np.ndarray


def planner(config: Config, text: TextConfig | None, num_devices: int) -> Planner:
    """The planner that `config.sharding` asks for; the query heads of `text` bound the degrees (None: nothing does).

    Raises ConfigError for degrees that the devices or the heads do not allow, for rollouts longer than the devices of
    one sequence hold, and for a calibration that can't be read or has not measured groups of these degrees.
    """
    settings, packing, room = config.sharding, config.packing, tokens_per_device(config)
    try:
        limits = Limits(
            max_degree=settings.max_degree,
            num_heads=text.num_heads if text is not None else 0,
            alpha=settings.alpha,
            tolerance=settings.tolerance,
            tokens_per_device=room,
            short=packing.short,
            cap=packing.group_cap,
            rounds_per_degree=packing.rounds_per_degree,
            tau=settings.devices_per_host,
        )
        degree = limits.degree(num_devices)
    except PlanError as error:
        raise ConfigError(_explained(error)) from error
    if config.rollout.max_sequence_tokens > degree * room:
        raise ConfigError(
            f"rollout.max_sequence_tokens is {config.rollout.max_sequence_tokens}, but the {degree} devices of a "
            f"sequence hold {degree * room} tokens (packing.tokens_per_row * packing.rows_per_device each)"
        )
    if settings.strategy is Strategy.ULYSSES:
        return lambda lengths, work: ulysses(lengths, num_devices, limits, work=work, degree=degree)
    if not settings.calibration:
        return lambda lengths, work: flex_ulysses(lengths, num_devices, limits, work=work)
    try:
        cost = calibrated(config, text)
        for k in range(1, degree.bit_length()):
            cost.all_to_all_seconds(1, 1 << k)
    except CostError as error:
        raise ConfigError(f"sharding.calibration: {error}; or lower sharding.max_degree") from error

    return lambda lengths, squares: flex_ulysses(
        lengths, num_devices, limits, work=forward_seconds(cost, lengths, squares), cost=_Squares(cost, squares)
    )


@dataclasses.dataclass(frozen=True)
class _Squares:
    """A cost model for sequences of which attention is quadratic in something else than their lengths."""

    cost: CostModel
    squares: Sequence[float]

    def step_seconds(self, plan: ShardPlan) -> float:
        return self.cost.step_seconds(plan, squares=self.squares)


def _explained(error: PlanError) -> str:
    """Limits by the names that they have in the configuration."""
    words = str(error).replace("limits.tokens_per_device", "packing.tokens_per_row * packing.rows_per_device")
    return words.replace("limits.max_degree", "sharding.max_degree").replace("limits.num_heads", "the model's")


def calibrated(config: Config, text: TextConfig | None, vision: VisionConfig | None = None) -> CostModel:
    """The cost model that `sharding.calibration` names, of a model of these sizes (None: of the one in the file).
    Raises CostError for a file that can't be read."""
    cost = _calibration(config.sharding.calibration)
    return cost if text is None else cost.of(model_sizes(config, text, vision))


def forward_seconds(cost: CostModel, tokens: Numbers, squares: Numbers) -> np.ndarray:
    """Of a forward pass over each sequence, without its media."""
    # Attention over a shared prompt is not quadratic in the length: the model is asked for that of equal work.
    return cost.attention_seconds(np.sqrt(squares)) + cost.linear_seconds(np.array(tokens, float))


def model_sizes(config: Config, text: TextConfig, vision: VisionConfig | None = None) -> ModelSizes:
    decoder = ModelSizes(
        name="the trained model",
        layers=text.num_layers,
        width=text.hidden_size,
        heads=text.num_heads,
        kv_heads=text.num_kv_heads,
        head_size=text.head_dim,
        mlp=text.intermediate_size,
        vocabulary=text.vocab_size,
        value_bytes=2 if config.model.compute_dtype is DType.BFLOAT16 else 4,
    )
    if vision is None:
        return decoder
    return dataclasses.replace(
        decoder,
        vision_layers=vision.depth,
        vision_width=vision.hidden_size,
        vision_mlp=vision.intermediate_size,
        patch_values=vision.patch_values,
        patches_per_token=vision.merge_unit,
    )


@functools.cache
def _calibration(path: str) -> CostModel:
    return CostModel.load(path)


def tokens_per_device(config: Config) -> int:
    """The row of a device: as many tokens as its packed rows would have together."""
    return config.packing.tokens_per_row * config.packing.rows_per_device


def shape_book(config: Config) -> ShapeBook:
    """An empty memory of buffer sizes."""
    return ShapeBook(config.sharding.max_shapes)


def compose_spread(
    entries: Sequence[TrainGroup],
    config: Config,
    num_devices: int,
    vision: VisionConfig | None,
    text: TextConfig | None,
    book: ShapeBook,
) -> Composition:
    """As few microbatches as the devices' memory allows, each with one row a device.

    With `packing.share_prompts` a group is one sequence, its responses are branches behind one copy of the prompt;
    otherwise each response is a sequence of its own. `book` keeps the shapes few. Raises ConfigError where no plan
    exists.
    """
    return joined([part.fill(book) for part in planned(entries, config, num_devices, vision, text)])


def planned(
    entries: Sequence[TrainGroup],
    config: Config,
    num_devices: int,
    vision: VisionConfig | None,
    text: TextConfig | None,
) -> list[Part]:
    """As few microbatches as hold everything. Raises ConfigError where no plan exists."""
    plan, room = planner(config, text, num_devices), tokens_per_device(config)
    # A group that not even all devices of a sharded sequence could hold is cut, its prompt computed twice.
    pieces = pieces_of(entries, room * largest_degree(config, text, num_devices), config.packing.share_prompts)
    least = math.ceil(sum(tokens_of(entries, piece) for piece in pieces) / (room * num_devices))
    failure: PlanError | None = None
    for count in range(min(max(least, 1), len(pieces)), len(pieces) + 1):
        try:
            return [Part(entries, members, plan, config, vision) for members in _deal(entries, pieces, count)]
        except PlanError as error:
            failure = failure or error
    assert failure is not None
    raise ConfigError(_explained(failure)) from failure


def largest_degree(config: Config, text: TextConfig | None, num_devices: int) -> int:
    """The most devices of one sequence. Raises ConfigError for a bound that devices or heads forbid."""
    heads = text.num_heads if text is not None else 0
    try:
        return Limits(max_degree=config.sharding.max_degree, num_heads=heads).degree(num_devices)
    except PlanError as error:
        raise ConfigError(_explained(error)) from error


def pieces_of(entries: Sequence[TrainGroup], longest: int, share_prompts: bool, responses: int = 0) -> list[Piece]:
    """What is computed as one sequence: with `share_prompts` a group, else each response.

    A group is cut into parts of at most `longest` tokens, and of at most `responses` without the prompt (0: any). A
    response with its prompt that has more is a part all the same.
    """
    items = [entry.item for entry in entries]
    if not share_prompts:
        return [Piece(i, (k,)) for i, item in enumerate(items) for k in range(len(item.responses))]
    pieces = []
    for i, item in enumerate(items):
        size = min(longest, item.prompt + responses) if responses else longest
        pieces += cut(items, i, Budget(max(size, item.prompt + max(item.responses)), (), ()))
    return pieces


def tokens_of(entries: Sequence[TrainGroup], piece: Piece) -> int:
    item = entries[piece.item].item
    return item.prompt + sum(item.responses[k] for k in piece.responses)


def squares_of(entries: Sequence[TrainGroup], piece: Piece) -> float:
    """Twice the (query, key) pairs that attention looks at: `length**2` for a prompt with one response."""
    item = entries[piece.item].item
    return float(item.prompt**2) + sum(r**2 + 2 * item.prompt * r for r in (item.responses[k] for k in piece.responses))


def _deal(entries: Sequence[TrainGroup], pieces: Sequence[Piece], count: int) -> list[list[Piece]]:
    """Longest first into the microbatch with the fewest tokens; order within a microbatch is that of `pieces`."""
    if count == 1:
        return [list(pieces)]
    totals, members = [0] * count, [[] for _ in range(count)]
    for index in sorted(range(len(pieces)), key=lambda i: (-tokens_of(entries, pieces[i]), i)):
        target = totals.index(min(totals))
        totals[target] += tokens_of(entries, pieces[index])
        members[target].append(index)
    return [[pieces[i] for i in sorted(indices)] for indices in members if indices]


class Part:
    """One microbatch: planned when it is made, which may fail; then filled."""

    pieces: tuple[Piece, ...]
    plan: ShardPlan
    layout: SizedLayout
    spans: Spans
    batch: TrainBatch

    def __init__(
        self,
        entries: Sequence[TrainGroup],
        pieces: Sequence[Piece],
        plan: Planner,
        config: Config,
        vision: VisionConfig | None,
    ) -> None:
        self._entries, self.pieces = entries, tuple(pieces)
        self._cap, self._share = tokens_per_device(config), config.packing.share_prompts
        self.plan = plan([tokens_of(entries, p) for p in pieces], [squares_of(entries, p) for p in pieces])
        self._bare = lay(self.plan, self._cap)
        patches = config.packing.patches_per_device
        self._media = None if vision is None else SpreadMedia(entries, pieces, self.plan, patches, vision)

    def fill(self, book: ShapeBook) -> Part:
        """Lays everything out in buffers of sizes that `book` chooses."""
        bare, media = self._bare, self._media
        self.spans = Spans(total=sum(bare.plan.lengths))
        features = media.first_feature if media else {}
        self.spans.place(self.pieces, 0, self._entries, features, self._share)
        line = {
            name: array.reshape(*array.shape[:-2], -1) for name, array in fill(self.spans, self.spans.total).items()
        }
        feature_index, predecessor = line["feature_index"], line["predecessor"]

        needs = bare.needs() | bare.imports(predecessor).needs()
        caps = {"columns": self._cap}
        if media is not None:
            needs |= media.needs(feature_index, bare.device)
            caps["patches"] = media.cap
        sizes = book.fit(needs, caps, size_weight, self.plan.num_devices)

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


_PADDING = {"feature_index": -1, "lags": -1, "temperatures": 1.0}  # 0 elsewhere


def _onto_rows(line: dict[str, np.ndarray], layout: SizedLayout) -> dict[str, np.ndarray]:
    """`[..., tokens]` -> `[..., devices, columns]`."""
    devices, columns = layout.plan.num_devices, layout.columns
    rows = {}
    for name, values in line.items():
        flat = np.full((*values.shape[:-1], devices * columns), _PADDING.get(name, 0), values.dtype)
        flat[..., layout.cells] = values
        rows[name] = flat.reshape(*values.shape[:-1], devices, columns)
    return rows


def joined(parts: Sequence[Part], devices: tuple[int, ...] = (), work: tuple[float, ...] = ()) -> Composition:
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
        devices,
        work,
    )
