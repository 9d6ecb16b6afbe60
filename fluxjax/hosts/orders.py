"""What process 0 tells the others, and how it is written: typed, versioned, compact. Decisions travel, and the
responses that a process trains on; never a prompt's media, and never a batch.

An order is msgpack: a dict with the protocol's version, the order's name and its fields. Arrays of numbers are the
bytes of the smallest integers that hold them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, TypeAlias

import msgpack
import numpy as np

from models.inputs import ModelInput
from sharding.planner.plan import Round, ShardPlan

from ..base.types import Response, Reward, Sample
from ..batch.composition import PackedRows, Piece, TrainGroup, tokens_of
from ..batch.share import PlannedRows, Share, sized_input, sized_samples

PROTOCOL = 1


class OrderError(ValueError):
    """Something else than an order of this protocol. The message says what."""


@dataclasses.dataclass(frozen=True)
class Start:
    """A run begins, whose folder, on a file system that all hosts share, has its configuration."""

    name: ClassVar[str] = "start"
    run_dir: str


@dataclasses.dataclass(frozen=True)
class Begin:
    """A phase of training begins: `warm_start` or `rl`."""

    name: ClassVar[str] = "begin"
    phase: str


@dataclasses.dataclass(frozen=True)
class Learn:
    """Lay out `rows` and make an optimizer step, the `number`-th of the run; `rows` is what `told` returned."""

    name: ClassVar[str] = "learn"
    number: int
    rows: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Gather:
    """Take part in bringing the weights together in process 0."""

    name: ClassVar[str] = "gather"


@dataclasses.dataclass(frozen=True)
class Save:
    """Take part in the checkpoint of `step`."""

    name: ClassVar[str] = "save"
    step: int


@dataclasses.dataclass(frozen=True)
class Restore:
    """Take part in restoring the checkpoint of `step`, and go on from there."""

    name: ClassVar[str] = "restore"
    step: int


@dataclasses.dataclass(frozen=True)
class End:
    """The run is over: wait for what is being written, and end."""

    name: ClassVar[str] = "end"


Order: TypeAlias = Start | Begin | Learn | Gather | Save | Restore | End
_ORDERS: dict[str, type] = {order.name: order for order in (Start, Begin, Learn, Gather, Save, Restore, End)}


def encode(order: Order) -> bytes:
    fields = {field.name: getattr(order, field.name) for field in dataclasses.fields(order)}
    return bytes(msgpack.Packer().pack({"protocol": PROTOCOL, "order": order.name, **fields}))


def decode(data: bytes) -> Order:
    """Raises OrderError for what `encode` did not make, or another version of this program."""
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


def told(share: Share) -> dict[str, Any]:
    """A share without its prompts' inputs, which the process that it is for reads by their draws."""
    groups = [_told_group(g) if k in share.needed else _told_sizes(g) for k, g in enumerate(share.groups)]
    micros = [_told_micro(micro, share.shards) for micro in share.micros]
    return {"shards": [share.shards.start, share.shards.stop], "micros": micros, "groups": groups}


def share_of(rows: Mapping[str, Any], inputs: Callable[[Sequence[int]], Mapping[int, ModelInput]]) -> Share:
    """The share that `told` was given; `inputs` returns those of prompts, by draw. Raises OrderError for a prompt that
    it does not return, and for rows that are none."""
    try:
        needed = [k for k, group in enumerate(rows["groups"]) if "draw" in group]
        draws = [rows["groups"][k]["draw"] for k in needed]
        found = inputs(sorted(set(draws)))
        if missing := sorted(set(draws) - set(found)):
            raise OrderError(f"draw {missing[0]} can't be prepared here, but could be in process 0")
        groups = tuple(_group(g, found[g["draw"]]) if "draw" in g else _sizes(g) for g in rows["groups"])
        micros = tuple(_micro(micro, groups) for micro in rows["micros"])
        return Share(micros, groups, range(*rows["shards"]), frozenset(needed))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, OrderError):
            raise
        raise OrderError(f"rows that can't be read: {error}") from error


def _told_micro(micro: PackedRows | PlannedRows, shards: range) -> dict[str, Any]:
    if isinstance(micro, PlannedRows):
        return _told_plan(micro, shards)
    pieces = [[[[piece.item, *piece.responses] for piece in row] for row in shard] for shard in micro.shards]
    sizes = {name: getattr(micro, name) for name in ("rows", "tokens", "patches", "frame")}
    return {"pieces": pieces, "sizes": sizes}


def _micro(told: Mapping[str, Any], groups: Sequence[TrainGroup]) -> PackedRows | PlannedRows:
    if "owner" in told:
        return _plan(told, groups)
    shards = tuple(
        tuple(tuple(Piece(item, tuple(responses)) for item, *responses in row) for row in shard)
        for shard in told["pieces"]
    )
    return PackedRows(shards=shards, **told["sizes"])


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
    """What the places of other groups depend on."""
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


def _told_group(group: TrainGroup) -> dict[str, Any]:
    responses = [sample.response for sample in group.samples]
    return {
        "name": group.name,
        "draw": responses[0].draw,
        "version": group.version,
        "temperature": group.temperature,
        "weights": _bytes(group.weights, "<f8"),
        "samples": [response.sample for response in responses],
        "temperatures": [response.temperature for response in responses],
        "advantages": _bytes([sample.advantage for sample in group.samples], "<f8"),
        "lengths": [len(response.token_ids) for response in responses],
        "tokens": _integers(chain.from_iterable(response.token_ids for response in responses)),
        "logprobs": _bytes(chain.from_iterable(response.logprobs for response in responses), "<f4"),
        "versions": _integers(chain.from_iterable(response.versions for response in responses)),
    }


def _group(told: Mapping[str, Any], inputs: ModelInput) -> TrainGroup:
    ends = np.cumsum(told["lengths"])[:-1]
    tokens, versions = (np.split(_numbers(*told[name]), ends) for name in ("tokens", "versions"))
    logprobs = np.split(np.frombuffer(told["logprobs"], "<f4"), ends)
    advantages = np.frombuffer(told["advantages"], "<f8").tolist()
    samples = []
    for k, sample in enumerate(told["samples"]):
        response = Response(
            rid="",
            draw=told["draw"],
            sample=sample,
            token_ids=tuple(tokens[k].tolist()),
            logprobs=tuple(logprobs[k].tolist()),
            versions=tuple(versions[k].tolist()),
            finish="stop",
            temperature=told["temperatures"][k],
        )
        samples.append(Sample(response, Reward(0.0, False), advantages[k]))
    weights = np.frombuffer(told["weights"], "<f8")
    return TrainGroup(told["name"], inputs, tuple(samples), weights, told["version"], told["temperature"])


def _bytes(values: Iterable[float] | np.ndarray, dtype: str) -> bytes:
    return np.fromiter(values, dtype).tobytes()  # a third of the time of `np.asarray`, which reads a list twice


def _integers(values: Iterable[int] | np.ndarray) -> list[Any]:
    """[dtype, least, bytes of the differences to the least]."""
    array = np.fromiter(values, np.int64)
    least = int(array.min(initial=0))
    above = array - least
    dtype = np.min_scalar_type(int(above.max(initial=0))).newbyteorder("<").str
    return [dtype, least, above.astype(dtype).tobytes()]


def _numbers(dtype: str, least: int, data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype).astype(np.int64) + least
