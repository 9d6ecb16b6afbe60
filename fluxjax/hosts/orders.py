"""The orders that process 0 sends to the other processes, and their encoding: typed, versioned, compact. They carry
decisions, and the responses that a process trains on; never a prompt's media, and never a batch.

An order is msgpack: a dict with the protocol's version, the order's name and its fields. Arrays of numbers are the
bytes of the smallest integers that hold them. The responses of a step come last, as they were written when they arrived
(`base.response_bytes`): however many processes there are, process 0 only decides which goes where.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice, pairwise
from typing import Any, ClassVar, NamedTuple, TypeAlias, get_args

import msgpack
import numpy as np

from models.inputs import PromptInput
from models.shadow import ShadowTensor
from sharding.planner.plan import Round, ShardPlan

from ..base.response_bytes import head_of
from ..base.types import Response, Reward, Sample
from ..batch.composition import PackedRows, Piece, TrainGroup, tokens_of
from ..batch.share import PlannedRows, Share, sized_input, sized_samples

PROTOCOL = 7
MediaTold: TypeAlias = Sequence[tuple[str, str]] | None  # (ticket, place) of each; None: who is told decodes
PlaceOf: TypeAlias = Callable[[str], str]  # the preprocessor that holds what a ticket names
UNKNOWN_PLACE = ""


class OrderError(ValueError):
    """The bytes are not an order of this protocol. The message says what they are."""


@dataclasses.dataclass(frozen=True)
class Start:
    """A run begins. Its folder is on a file system that all hosts share. The `token` gives access to the engines of its
    processes; `config` is its configuration, as JSON."""

    name: ClassVar[str] = "start"
    run_dir: str
    token: str
    config: str


@dataclasses.dataclass(frozen=True)
class Begin:
    """A phase of training begins: `warm_start` or `rl`."""

    name: ClassVar[str] = "begin"
    phase: str


@dataclasses.dataclass(frozen=True)
class Coming:
    """Prompts were drawn: `media` has [draw, [[ticket, place], ...]] for each prompt whose pixels are elsewhere. Some
    of these prompts will be in rows to learn from."""

    name: ClassVar[str] = "coming"
    media: Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Learn:
    """Lay out `rows`: a minibatch of the `number`-th training step of the run, whose optimizer steps are made when the
    `last` minibatch has come. `rows` and `responses` are of `told_all`; in a decoded order, `responses` is one
    run of bytes."""

    name: ClassVar[str] = "learn"
    number: int
    rows: Mapping[str, Any]
    responses: Sequence[bytes] | bytes
    last: bool = True


@dataclasses.dataclass(frozen=True)
class Gather:
    """Take part in bringing the weights together in process 0: the model's, or its adapters."""

    name: ClassVar[str] = "gather"
    adapters: bool = False


@dataclasses.dataclass(frozen=True)
class Save:
    """Take part in the checkpoint of `step`."""

    name: ClassVar[str] = "save"
    step: int


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Write your part of the snapshot of `step` into the `folder` of your host."""

    name: ClassVar[str] = "snapshot"
    step: int
    folder: str


@dataclasses.dataclass(frozen=True)
class Offer:
    """Report the steps whose part of the snapshot is in the `folder` of your host."""

    name: ClassVar[str] = "offer"
    folder: str


@dataclasses.dataclass(frozen=True)
class Restore:
    """Take part in restoring the checkpoint of `step`, and go on from there. With `folder`, restore your part of the
    snapshot in it instead; `source` is the state of the data source, which only process 0 has in its part."""

    name: ClassVar[str] = "restore"
    step: int
    folder: str = ""
    source: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class End:
    """The run is over: wait for what is being written, and end."""

    name: ClassVar[str] = "end"


Order: TypeAlias = Start | Begin | Coming | Learn | Gather | Save | Snapshot | Offer | Restore | End
_BYTES = struct.Struct(">BI")  # how msgpack begins so many bytes ("bin 32")
_HEAD = 1 << 12  # bytes that an order mostly has without its responses
# Of a response; its number in its group.
_FACTS = np.dtype([("weight", "<f8"), ("advantage", "<f8"), ("number", "<i4")])
_ORDERS: dict[str, type] = {order.name: order for order in get_args(Order)}


def encode(order: Order) -> list[bytes]:
    """Returns the bytes of an order, in pieces to be sent one after the other. Responses are not copied: for many
    processes they are gigabytes."""
    fields = {"protocol": PROTOCOL, "order": order.name, **vars(order)}
    if not isinstance(order, Learn):
        return [bytes(msgpack.Packer().pack(fields))]
    responses = fields.pop("responses")
    # The last two bytes say that there are none.
    head = msgpack.Packer(buf_size=_HEAD).pack(fields | {"responses": b""})
    return [head[:-2] + _BYTES.pack(0xC6, sum(map(len, responses))), *responses]


def decode(data: bytes) -> Order:
    """Returns the order in these bytes. Raises OrderError for bytes that `encode` did not make, or that another version
    of this program made."""
    try:
        fields = msgpack.unpackb(data, strict_map_key=True)
        protocol, kind = fields.pop("protocol"), fields.pop("order")
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.exceptions.UnpackException) as error:
        raise OrderError(f"{len(data)} bytes came that are no order: {error}") from error
    if protocol != PROTOCOL:
        raise OrderError(f"process 0 speaks version {protocol} of the orders, this one {PROTOCOL}: run one release")
    if kind not in _ORDERS:
        raise OrderError(f"there is no order {kind!r}")
    try:
        return _ORDERS[kind](**fields)
    except TypeError as error:
        raise OrderError(f"order {kind}: {error}") from error


# --- rows ---------------------------------------------------------------------------------------


Told: TypeAlias = tuple[dict[str, Any], list[bytes]]  # the rows and the responses of a `Learn`


def told_all(shares: Sequence[Share], place_of: PlaceOf = lambda ticket: UNKNOWN_PLACE) -> list[Told]:
    """Returns every share of a step as it is sent: without its prompts' inputs, which the receiving process reads by
    their draws. For prompts whose pixels are elsewhere, it has the tickets of their media, and the place of each."""
    if shares[0].needed is None:  # rows, which all have the groups of the whole step
        return _told_rows(shares, ToldGroups(shares[0].groups, None, place_of))
    return [_told_plans(share, ToldGroups(share.groups, share.needed, place_of)) for share in shares]


class ToldGroup(NamedTuple):
    """A group as it is sent, without its prompt's inputs: a tuple of values, because there may be thousands."""

    name: str
    draw: int
    media: list[list[Any]] | None  # what `told_media` returns
    version: int
    temperature: float | None
    responses: int  # of it in the step


class ToldGroups:
    """Groups as they are sent, and their responses one after the other: `first[item]` is the index of the first
    response of a group."""

    def __init__(self, groups: Sequence[TrainGroup], needed: frozenset[int] | None, place_of: PlaceOf) -> None:
        """Groups that are not `needed` (None: all are needed) have no responses here."""
        items = range(len(groups)) if needed is None else sorted(needed)
        whole = [groups[k] for k in items]
        self._told = dict(zip(items, (_told_group(group, place_of) for group in whole), strict=True))
        columns_of_groups = [group.columns for group in whole]
        counts = np.zeros(len(groups), np.int64)
        counts[list(items)] = [len(columns.data) for columns in columns_of_groups]
        self.first = np.cumsum(counts) - counts
        self.responses: list[bytes] = list(chain.from_iterable(columns.data for columns in columns_of_groups))
        self.facts = np.zeros(len(self.responses), _FACTS)
        if whole:
            self.facts["weight"] = np.concatenate([group.weights for group in whole])
            self.facts["advantage"] = np.concatenate([columns.advantages_G for columns in columns_of_groups])
        self.facts["number"] = np.arange(len(self.responses)) - np.repeat(self.first, counts)

    def __getitem__(self, item: int) -> ToldGroup:
        return self._told[item]


def _told_group(group: TrainGroup, place_of: PlaceOf) -> ToldGroup:
    columns, media = group.columns, told_media(group.inputs, place_of)
    return ToldGroup(group.name, columns.draw, media, group.version, group.temperature, len(columns.data))


def _told_rows(shares: Sequence[Share], groups: ToldGroups) -> list[Told]:
    """Returns shares of packed rows as they are sent. Responses are in the order of the pieces in the rows."""
    pieces = [list(chain(*chain(*chain(*(micro.shards for micro in _packed(share)))))) for share in shares]
    every = list(chain(*pieces))
    counts = [len(piece.responses) for piece in every]
    which = np.repeat(groups.first[np.array([piece.item for piece in every], np.int64)], counts)
    which += np.fromiter(chain.from_iterable(piece.responses for piece in every), np.int64, len(which))
    facts, responses = groups.facts[which].tobytes(), list(map(groups.responses.__getitem__, which.tolist()))
    ends = np.cumsum([0, *counts])[np.cumsum([0, *map(len, pieces)])].tolist()
    return [
        (
            _rows_of(share, share_pieces, groups) | {"facts": facts[begin * _FACTS.itemsize : end * _FACTS.itemsize]},
            responses[begin:end],
        )
        for share, share_pieces, (begin, end) in zip(shares, pieces, pairwise(ends), strict=True)
    ]


def _packed(share: Share) -> list[PackedRows]:
    return [micro for micro in share.micros if isinstance(micro, PackedRows)]


def _rows_of(share: Share, pieces: Sequence[Piece], groups: ToldGroups) -> dict[str, Any]:
    items = [piece.item for piece in pieces]
    needed = sorted(set(items))
    number = {item: k for k, item in enumerate(needed)}
    return {
        "shards": [share.shards.start, share.shards.stop],
        "micros": [
            {
                "sizes": [micro.rows, micro.tokens, micro.patches, micro.frame],
                "pieces": [list(map(len, shard)) for shard in micro.shards],
            }
            for micro in _packed(share)
        ],
        "items": [number[item] for item in items],
        "counts": [len(piece.responses) for piece in pieces],
        "groups": [groups[item] for item in needed],
    }


def _told_plans(share: Share, groups: ToldGroups) -> Told:
    """Returns a share of planned microbatches as it is sent. Groups are sent whole, and responses are in their
    order."""
    needed = share.needed
    assert needed is not None
    rows = {
        "shards": [share.shards.start, share.shards.stop],
        "micros": [_told_plan(micro, share.shards) for micro in share.micros if isinstance(micro, PlannedRows)],
        "groups": [groups[k] if k in needed else _told_sizes(group) for k, group in enumerate(share.groups)],
        "facts": groups.facts.tobytes(),
    }
    return rows, groups.responses


def share_of(
    rows: Mapping[str, Any],
    responses: Sequence[bytes] | bytes,
    inputs: Callable[[Mapping[int, MediaTold]], Mapping[int, PromptInput]],
) -> Share:
    """Returns a share that `told_all` was given. `inputs` returns the inputs of prompts, by draw, from what was told of
    their media. Raises OrderError for a prompt that `inputs` does not return, and for malformed rows."""
    try:
        groups = [group if isinstance(group, Mapping) else ToldGroup(*group) for group in rows["groups"]]
        media = {group.draw: _media(group) for group in groups if isinstance(group, ToldGroup)}
        found = inputs({draw: media[draw] for draw in sorted(media)})
        if missing := sorted(media.keys() - set(found)):
            raise OrderError(f"draw {missing[0]} can't be prepared here, but could be in process 0")
        data = responses if isinstance(responses, bytes) else b"".join(responses)
        if "items" in rows:
            return _rows(rows, [ToldGroup(*group) for group in rows["groups"]], data, found)
        return _plans(rows, groups, data, found)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, OrderError):
            raise
        raise OrderError(f"rows that can't be read: {error}") from error


def _rows(rows: Mapping[str, Any], told: Sequence[ToldGroup], data: bytes, inputs: Mapping[int, PromptInput]) -> Share:
    """Returns a share of packed rows. Responses that were not sent leave no gap: the others get new numbers in their
    group."""
    items, counts = rows["items"], rows["counts"]
    owners = [item for item, count in zip(items, counts, strict=True) for _ in range(count)]
    facts = np.frombuffer(rows["facts"], _FACTS)
    members: list[list[int]] = [[] for _ in told]  # of each group, which of the responses that came
    for k in np.lexsort((facts["number"], owners)).tolist():
        members[owners[k]].append(k)
    responses = _responses(data, [told[item].draw for item in owners])
    groups = tuple(
        _group(group, inputs[group.draw], responses, facts, numbers)
        for group, numbers in zip(told, members, strict=True)
    )
    place = {k: number for numbers in members for number, k in enumerate(numbers)}
    ends = np.cumsum(counts).tolist()
    pieces = [
        Piece(item, tuple(place[k] for k in range(end - count, end)))
        for item, count, end in zip(items, counts, ends, strict=True)
    ]
    following = iter(pieces)
    micros = []
    for micro in rows["micros"]:
        shards = tuple(tuple(tuple(islice(following, count)) for count in shard) for shard in micro["pieces"])
        count, tokens, patches, frame = micro["sizes"]
        micros.append(PackedRows(count, tokens, patches, shards, frame))
    return Share(tuple(micros), groups, range(*rows["shards"]), None)


def _plans(
    rows: Mapping[str, Any],
    told: Sequence[ToldGroup | Mapping[str, Any]],
    data: bytes,
    inputs: Mapping[int, PromptInput],
) -> Share:
    """Returns a share of planned microbatches, with whole groups."""
    whole = {k: group for k, group in enumerate(told) if isinstance(group, ToldGroup)}
    facts = np.frombuffer(rows["facts"], _FACTS)
    responses = _responses(data, [group.draw for group in whole.values() for _ in range(group.responses)])
    numbers = np.split(np.arange(len(responses)), np.cumsum([group.responses for group in whole.values()])[:-1])
    members = dict(zip(whole, numbers, strict=True)) if whole else {}
    groups = tuple(
        _group(group, inputs[group.draw], responses, facts, members[k].tolist())
        if isinstance(group, ToldGroup)
        else _sizes(group)
        for k, group in enumerate(told)
    )
    micros = tuple(_plan(micro, groups) for micro in rows["micros"])
    return Share(micros, groups, range(*rows["shards"]), frozenset(whole))


def _responses(data: bytes, draws: Sequence[int]) -> list[Response]:
    """Returns the responses in `data`, one behind the other; `draws` has the draw of each."""
    found, at = [], 0
    for draw in draws:
        size = head_of(data, at).size
        found.append(Response.of(draw, data[at : at + size]))
        at += size
    if at != len(data):
        raise OrderError(f"{len(data) - at} bytes more than {len(draws)} responses came")
    return found


def _told_plan(micro: PlannedRows, shards: range) -> dict[str, Any]:
    shape = {"owner": micro.owner, "work": micro.work, "sizes": dict(micro.sizes)}
    if micro.elsewhere(shards):
        return shape
    plan = micro.plan
    assert plan is not None
    return shape | {
        "pieces": [[piece.item, *piece.responses] for piece in micro.pieces],
        "devices": plan.num_devices,
        "degrees": _integers(plan.degrees),
        "firsts": _integers(plan.firsts),
        "rounds": [[round.degree, round.groups] for round in plan.rounds],
    }


def _plan(told: Mapping[str, Any], groups: Sequence[TrainGroup]) -> PlannedRows:
    shape = {name: told[name] for name in ("owner", "work", "sizes")}
    if "pieces" not in told:
        return PlannedRows(None, (), **shape)
    items = [group.item for group in groups]
    pieces = tuple(Piece(item, tuple(responses)) for item, *responses in told["pieces"])
    degrees, firsts = (tuple(_numbers(*told[name]).tolist()) for name in ("degrees", "firsts"))
    rounds = tuple(Round(degree, tuple(map(tuple, members))) for degree, members in told["rounds"])
    lengths = tuple(tokens_of(items, piece) for piece in pieces)
    work = (0.0,) * len(pieces)  # asked for by who plans
    plan = ShardPlan(told["devices"], lengths, work, degrees, firsts, rounds)
    return PlannedRows(plan, pieces, **shape)


def _told_sizes(group: TrainGroup) -> dict[str, Any]:
    """Returns the sizes of a group, on which the places of other groups depend."""
    where, which = group.inputs.shown
    begins = np.flatnonzero((np.diff(where, prepend=-2) != 1) | (np.diff(which, prepend=-2) != 1))  # of runs
    counts = np.diff(np.append(begins, len(where)))
    return {
        "prompt": len(group.inputs),
        "lengths": _integers(group.item.responses),
        "temperature": group.temperature,
        "shown": [_integers(values) for values in (where[begins], which[begins], counts)],
        "frames": _integers(np.diff(group.inputs.frame_edges)),
    }


def _sizes(told: Mapping[str, Any]) -> TrainGroup:
    where, which, counts = (_numbers(*values) for values in told["shown"])
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    shown = np.repeat(where, counts) + within, np.repeat(which, counts) + within
    inputs = sized_input(told["prompt"], shown, _numbers(*told["frames"]).tolist())
    samples = sized_samples(_numbers(*told["lengths"]).tolist())
    return TrainGroup("", inputs, samples, np.zeros(len(samples)), temperature=told["temperature"])


def told_media(inputs: PromptInput, place_of: PlaceOf) -> list[list[Any]] | None:
    """Returns [ticket, place] of each medium of a prompt, in order; None where this process has the pixels."""
    patches = inputs.patches_PX
    if not isinstance(patches, ShadowTensor):
        return None
    return [[rows.ticket, place_of(rows.ticket)] for rows in patches.elsewhere]


def _media(group: ToldGroup) -> MediaTold:
    return None if group.media is None else [(str(ticket), str(place)) for ticket, place in group.media]


def _group(
    told: ToldGroup, inputs: PromptInput, responses: Sequence[Response], facts: np.ndarray, numbers: Sequence[int]
) -> TrainGroup:
    """Returns the group made of the responses of these `numbers`, in order."""
    samples = tuple(Sample(responses[k], Reward(0.0, False), float(facts["advantage"][k])) for k in numbers)
    return TrainGroup(told.name, inputs, samples, facts["weight"][numbers], told.version, told.temperature)


def _integers(values: Iterable[int] | np.ndarray) -> list[Any]:
    """Returns [dtype, least value, bytes of the differences to the least value]."""
    array = values if isinstance(values, np.ndarray) else np.fromiter(values, np.int64)
    least = int(array.min(initial=0))
    dtype = np.min_scalar_type(int(array.max(initial=least)) - least).newbyteorder("<").str
    above = array - least if least else array
    return [dtype, least, above.astype(dtype).tobytes()]


def _numbers(dtype: str, least: int, data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype).astype(np.int64) + least
