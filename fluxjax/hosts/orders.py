"""The orders of process 0 to the other processes, the answers of these processes, and the encoding of all messages.

An order is a msgpack dict with the protocol's version, the order's name and the order's fields. The responses of a step
follow the dict, in the bytes of `base.scored`. No order has media or batches.
"""

from __future__ import annotations

import dataclasses
import io
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, TypeAlias

import msgpack
import numpy as np

from models.inputs import ModelInput, PromptInput, VisionInput
from models.shadow import Rows, ShadowTensor
from sharding.planner.plan import ShardPlan, rounds
from sharding.spread.shapes import Sizes

from ..base.scored import head_of, numbers_of, trained_of, version_span_of
from ..base.types import Columns
from ..batch.fill import sized_group, sized_input
from ..batch.share import Outline, Piece, Share, TrainGroup
from ..config import ConfigError

PROTOCOL = 13
MediaTold: TypeAlias = Sequence[tuple[str, str]] | None  # (ticket, place) of each medium; None: the receiver decodes
PlaceOf: TypeAlias = Callable[[str], str]  # ticket -> the preprocessor that holds the medium
UNKNOWN_PLACE = ""


class OrderError(ValueError):
    """The bytes are not an order of this protocol."""


@typing.dataclass_transform(frozen_default=True)
class Order:
    """The base of orders and answers, which are frozen dataclasses. `name` is the class's name in lower case."""

    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__.lower()
        dataclasses.dataclass(frozen=True)(cls)


class Start(Order):
    """A run begins. The folder `run_dir` is on a file system that all hosts share. The `token` gives access to the
    engines of all processes. `config` is the configuration in `run_dir`."""

    run_dir: str
    token: str
    config: Mapping[str, Any]


class Begin(Order):
    """A phase of training begins: `warm_start`, or `rl` with `steps` training steps."""

    phase: str
    steps: int = 0


class Coming(Order):
    """Prompts were drawn. `media` has [draw, [[ticket, place], ...]] for each prompt whose pixels a media store holds.
    Some of these prompts will be in the rows of later `Learn` orders."""

    media: Sequence[Any]


class Learn(Order):
    """Lay out `minibatches` of the `number`-th training step of the run. With `update`, make the optimizer steps; else
    keep the gradients. `size` is the argument of `PolicyTrainer.follow`. `told` makes `minibatches` and `responses`. A
    decoded order has all responses in one bytes object."""

    number: int
    minibatches: Sequence[Mapping[str, Any]]
    responses: Sequence[bytes]
    size: int = 0
    update: bool = True


class Gather(Order):
    """Take part in gathering the weights of the model, or only the `adapters`, in process 0."""

    adapters: bool = False


class Save(Order):
    """Take part in the checkpoint of `step`."""

    step: int


class Restore(Order):
    """Take part in restoring the checkpoint of `step`, in a run of `steps` training steps."""

    step: int
    steps: int


class End(Order):
    """The run is over. Wait for files that are being written, and end."""


class Value(Order):
    """A process's part of a common decision (`Team.decided`), sent to or from process 0. `value` has numbers, texts,
    lists, dictionaries and arrays of one dimension."""

    value: Any


class Status(Order):
    """The fields of a `HostStatus`, sent to process 0. Times count from the end of the step."""

    fields: Mapping[str, Any]


_ORDERS = {kind.name: kind for kind in Order.__subclasses__()}


def encode(order: Order) -> list[bytes]:
    """Returns the bytes of an order, in pieces to be sent in turn, without a copy of responses (maybe gigabytes)."""
    fields = {"protocol": PROTOCOL, "order": order.name, **vars(order)}
    responses = fields.pop("responses", ())
    return [bytes(msgpack.Packer(default=_plain, unicode_errors="surrogateescape").pack(fields)), *responses]


def decode(data: bytes) -> Order:
    """Returns the order in these bytes. Raises OrderError for other bytes, and for another `PROTOCOL`."""
    try:
        unpacker = msgpack.Unpacker(
            io.BytesIO(data), object_hook=_array, max_buffer_size=len(data), unicode_errors="surrogateescape"
        )
        fields = unpacker.unpack()
        protocol, kind = fields.pop("protocol"), fields.pop("order")
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.exceptions.UnpackException) as error:
        raise OrderError(f"{len(data)} bytes came that are no order: {error}") from error
    if protocol != PROTOCOL:
        raise OrderError(
            f"another process speaks version {protocol} of the orders, this process version {PROTOCOL}: run one "
            "release in all processes"
        )
    if kind not in _ORDERS:
        raise OrderError(f"there is no order {kind!r}")
    responses = data[unpacker.tell() :]
    if responses or kind == Learn.name:
        fields["responses"] = [responses]
    try:
        return _ORDERS[kind](**fields)
    except TypeError as error:
        raise OrderError(f"order {kind}: {error}") from error


def _plain(array: np.ndarray) -> dict[str, Any]:
    return {"dtype": array.dtype.str, "data": array.tobytes()}


def _array(read: dict[str, Any]) -> Any:
    return np.frombuffer(read["data"], read["dtype"]) if read.keys() == {"dtype", "data"} else read


# A group is sent as a list of values without the inputs of the prompt, and the responses follow the order. If the
# receiver needs a group only to place tokens of other groups, only the group's sizes are sent.

Told: TypeAlias = tuple[dict[str, Any], list[bytes]]  # the rows of a minibatch, and the responses of the rows
Inputs: TypeAlias = Callable[[Mapping[int, MediaTold]], Mapping[int, PromptInput]]
Hear: TypeAlias = Callable[[Iterable[tuple[str, str]]], None]


def told(share: Share, place_of: PlaceOf = lambda ticket: UNKNOWN_PLACE) -> Told:
    """Returns a share to send, without the inputs of prompts, which the receiver prepares from draws. If a media store
    holds a prompt's pixels, the share has the tickets and places of the prompt's media. The media of observations
    travel as tickets, too. Raises ConfigError for observations whose pixels no media store holds."""
    used: dict[int, list[int]] = {}  # by item: indices of responses
    for piece in chain.from_iterable(outline.pieces for outline in share.micros):
        used.setdefault(piece.item, []).extend(piece.responses)
    groups: list[Sequence[Any]] = []
    responses: list[bytes] = []
    for item, group in share.groups.items():
        if item in share.needed:
            draw, _, advantages_GU, data = group.columns
            media, numbers = told_media(group.inputs, place_of), used[item]
            observed = [(k, _told_observed(group.observed[k], place_of)) for k in numbers if k in group.observed]
            groups.append((draw, media, group.weights.tobytes(), advantages_GU.tobytes(), numbers, observed))
            responses += [data[k] for k in numbers]
        else:  # the arguments of `_sizes`: of the prompt, of all responses, and of the responses with media
            observed = [(k, _told_shown(inputs)) for k, inputs in group.observed.items()]
            groups.append((_told_shown(group.inputs), group.item.responses, observed))
    micros: list[Sequence[Any]] = []  # the arguments of `_outline`
    for outline in share.micros:
        plan = outline.plan if outline.shards else None
        planned = None if plan is None else (plan.num_devices, plan.lengths, plan.degrees, plan.firsts)
        pieces = [[[piece[:2] for piece in row] for row in shard] for shard in outline.shards]
        micros.append((pieces, outline.sizes, outline.coming, planned, outline.owner, outline.work))
    return {
        "shards": [share.shards.start, share.shards.stop],
        "version": share.version,
        "micros": micros,
        "items": list(share.groups),
        "groups": groups,
    }, responses


def shares_of(order: Learn, inputs: Inputs, hear: Hear = lambda tickets: None) -> list[Share]:
    """Returns this process's share of each minibatch of an order. `inputs` gets, by draw, the (ticket, place) pairs of
    the prompt's media, and returns the prompt's inputs. `hear` gets the pairs of observations. Raises OrderError for a
    draw that `inputs` does not return, and for malformed rows."""
    data, at = b"".join(order.responses), 0
    shares: list[Share] = []
    try:
        for rows in order.minibatches:
            share, at = _share_of(rows, data, at, inputs, hear)
            shares.append(share)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, OrderError):
            raise
        raise OrderError(f"the rows of an order can't be read: {error}") from error
    if at != len(data):
        raise OrderError(f"an order has {len(data) - at} bytes after its last response")
    return shares


def _share_of(rows: Mapping[str, Any], data: bytes, at: int, inputs: Inputs, hear: Hear) -> tuple[Share, int]:
    """Returns the share whose responses begin at byte `at`, and the byte after the responses."""
    groups = dict(zip(rows["items"], rows["groups"], strict=True))
    needed = {item: group for item, group in groups.items() if isinstance(group[2], bytes)}
    media = {
        draw: media and [(str(ticket), str(place)) for ticket, place in media] for draw, media, *_ in needed.values()
    }
    found = inputs({draw: media[draw] for draw in sorted(media)})
    if missing := sorted(media.keys() - set(found)):
        raise OrderError(f"draw {missing[0]} can't be prepared in this process, but could be in process 0")
    read: dict[int, TrainGroup] = {}
    for item, group in groups.items():
        if item in needed:
            draw, _, weights, advantages, responses, told_of = group
            advantages_GU = np.frombuffer(advantages).reshape(-1, len(advantages) // len(weights))
            columns, at = _columns(draw, advantages_GU, responses, data, at)
            hear((ticket, place) for _, (pieces, *_) in told_of for ticket, place, *_ in pieces)
            observed = {k: _observed(numbers_of(columns.data[k]).tokens, *told) for k, told in told_of}
            read[item] = TrainGroup("", found[draw], columns, np.frombuffer(weights), observed)
        else:
            read[item] = _sizes(*group)
    micros = tuple(_outline(*micro) for micro in rows["micros"])
    return Share(micros, read, range(*rows["shards"]), rows["version"], frozenset(needed)), at


def _columns(
    draw: int, advantages_GU: np.ndarray, responses: Sequence[int], data: bytes, at: int
) -> tuple[Columns, int]:
    """Returns the columns of the group whose `responses` begin at byte `at`, and the byte after the responses."""
    data_G, numbers_G4 = [b""] * len(advantages_GU), np.zeros((len(advantages_GU), 4), np.int64)
    for k in responses:
        head = head_of(data, at)
        data_G[k] = data[at : at + head.size]
        numbers_G4[k] = head.sample, head.tokens, version_span_of(data_G[k])[1], trained_of(data_G[k])
        at += head.size
    return Columns(draw, numbers_G4, advantages_GU, tuple(data_G)), at


def _outline(
    pieces: Sequence[Any], sizes: Sizes, coming: Sizes | None, planned: Sequence[Any] | None, *of: Any
) -> Outline:
    shards = tuple(
        tuple(tuple(Piece(item, tuple(responses)) for item, responses in row) for row in shard) for shard in pieces
    )
    plan = None
    if planned is not None:
        devices, lengths, degrees, firsts = planned
        costs = (0.0,) * len(lengths)  # only the process that plans needs costs
        placed = rounds(devices, degrees, firsts)
        plan = ShardPlan(devices, tuple(lengths), costs, tuple(degrees), tuple(firsts), placed)
    return Outline(shards, sizes, coming, plan, *of)


def _told_observed(inputs: PromptInput, place_of: PlaceOf) -> Sequence[Any]:
    """Returns the arguments of `_observed` behind the tokens."""
    laid_out = inputs.laid_out()
    vision = laid_out.vision
    if vision is None or not isinstance(patches_PX := vision.patches_PX, ShadowTensor):
        raise ConfigError(
            "several processes share media of observations through a media store only: set data.loader=shadow"
        )
    pieces = [(rows.ticket, place_of(rows.ticket), rows.start, rows.stop) for rows in patches_PX.elsewhere]
    tokens = laid_out.positions_3T.ravel(), laid_out.feature_index_T, laid_out.next_position
    segments = vision.frame_segments_P, vision.window_segments_P, vision.frame_bound
    return pieces, patches_PX.shape[1], *tokens, vision.positions_P2.ravel(), *segments


def _observed(
    tokens_T: np.ndarray,
    pieces: Sequence[Sequence[Any]],
    values: int,
    positions: np.ndarray,
    feature_index_T: np.ndarray,
    next_position: int,
    patch_positions: np.ndarray,
    *segments: Any,
) -> ModelInput:
    rows = [Rows(ticket, start, stop) for ticket, _, start, stop in pieces]
    patches = ShadowTensor(rows, (values,), np.dtype(np.float32))
    vision = VisionInput(patches, patch_positions.reshape(-1, 2), *segments)
    return ModelInput(tokens_T, positions.reshape(3, -1), feature_index_T, next_position, vision)


def _told_shown(inputs: PromptInput) -> tuple[int, Sequence[Sequence[int]], Sequence[int]]:
    """Returns the number of tokens, the runs of consecutive entries in `ModelInput.shown` (first tokens, first
    features, lengths), and each frame pair's patches."""
    where, which = inputs.shown
    begins = np.flatnonzero((np.diff(where, prepend=-2) != 1) | (np.diff(which, prepend=-2) != 1))  # where runs begin
    counts = np.diff(np.append(begins, len(where)))
    runs = [values.tolist() for values in (where[begins], which[begins], counts)]
    return len(inputs), runs, np.diff(inputs.frame_edges).tolist()


def _sizes(prompt: Sequence[Any], lengths: Sequence[int], observed: Sequence[Sequence[Any]]) -> TrainGroup:
    return sized_group(_shown(*prompt), lengths, {k: _shown(*sizes) for k, sizes in observed})


def _shown(tokens: int, runs: Sequence[Sequence[int]], frames: Sequence[int]) -> ModelInput:
    where, which, counts = (np.array(values, np.int64) for values in runs)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    shown = np.repeat(where, counts) + within, np.repeat(which, counts) + within
    return sized_input(tokens, shown, frames)


def told_media(inputs: PromptInput, place_of: PlaceOf) -> list[list[Any]] | None:
    """Returns [ticket, place] of each medium of a prompt, in order, or None if no media store holds its pixels."""
    patches = inputs.patches_PX
    if not isinstance(patches, ShadowTensor):
        return None
    return [[rows.ticket, place_of(rows.ticket)] for rows in patches.elsewhere]
