"""A model whose layers travel from host memory to the device while other layers compute (`docs/rewards.md`).

The results are those of the model with all its layers on the device. Work goes layer by layer. Between two layers the
caller may let other programs have the device (`rollout.streamed_judge`). Of `L` layers, `S` evenly spread layers are
streamed, so that `L // S` layers compute while a streamed layer travels.
"""

import dataclasses
import math
import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike

import models
from models.config import TextConfig
from models.decoder import Decoder
from models.inputs import PackedTokens, text_input
from sharding.cost import LINEAR_UTILISATION, PEAK_FLOPS
from sharding.kernels.runs import CHUNK
from sharding.mesh import Device, exact_products
from sharding.walk import HOST_MEMORY, Params
from sharding.weights import by_path

from .engine import EngineError
from .engine_weights import on_host
from .requests import EngineLimits
from .slots import doubling
from .streamed_programs import PARTS, Kept, Parts, programs
from .turns import LEAST_TOKENS, PrefillBatch, Prefix, plan

Result = TypeVar("Result")
Work: TypeAlias = Generator[None, None, Result]  # yields after each layer, when the device has computed it
BUFFERS = 2  # streamed layers on the device, at most: the layer that computes and the next one

# A layer: (weights, parts that travel meanwhile, hidden states, number) -> (hidden states, the parts on the device)
Step: TypeAlias = Callable[[Params | Parts, Parts, jax.Array, int], tuple[jax.Array, Parts]]


@dataclasses.dataclass(frozen=True)
class DeviceSpeed:
    """Operations, and bytes of memory and of the link to the host, in a second; by default of an H100 SXM."""

    flops: float = LINEAR_UTILISATION * PEAK_FLOPS
    memory_bytes: float = 3.35e12  # by its data sheet
    link_bytes: float = 0.8 * 63e9  # assumed share of what PCIe 5.0 x16 has in one direction

    def __post_init__(self) -> None:
        if not all(0 < value < math.inf for value in dataclasses.astuple(self)):
            raise EngineError(f"all numbers of a DeviceSpeed must be positive and finite: {self}")

    def compute_seconds(self, text: TextConfig, rows: int, tokens: int, context: int, layer_bytes: int) -> float:
        """The seconds of one layer over `rows` rows of `tokens` tokens, which see half of their row and all `context`
        tokens before it. The layer reads its weights once, however few tokens there are."""
        heads = text.num_heads * text.head_dim * len(text.attention_layers) / text.num_layers
        flops = 2 * layer_weights(text) + 4 * heads * (tokens / 2 + context)
        return max(rows * tokens * flops / self.flops, layer_bytes / self.memory_bytes)

    def transfer_seconds(self, layer_bytes: int) -> float:
        return layer_bytes / self.link_bytes


class StreamedModel:
    """A text model, or the decoder of a model with vision, on `device` of this process; None: its first device.

    `resident` layers stay on the device. If `resident` is None, `resident_layers` chooses the number for each batch, by
    `pace` and the free memory that the device reports; without a report (a CPU), all fit. A batch has at most
    `batch_tokens` (rows x row length), or a single prompt, and runs alone. `compute_dtype` casts the weights; without
    it all layers must have one dtype. The host holds the layers once, in pinned memory. Raises EngineError for settings
    that the model or the device can't have.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        device: Device | None = None,
        compute_dtype: DTypeLike | None = None,
        resident: int | None = None,
        pace: DeviceSpeed = DeviceSpeed(),
        batch_tokens: int = 8192,
    ) -> None:
        self.device = device or jax.local_devices()[0]
        self.text = model.config.text
        if resident is not None and not 0 <= resident <= self.text.num_layers:
            raise EngineError(f"resident={resident} must be 0 to {self.text.num_layers}, the number of layers")
        if batch_tokens < 1:
            raise EngineError(f"batch_tokens must be positive, got {batch_tokens}")
        if not any(memory.kind == HOST_MEMORY for memory in self.device.addressable_memories()):
            raise EngineError(f"{self.device} has no {HOST_MEMORY} memory, from which layers could be streamed")
        self._given, self._pace = resident, pace
        self._batch_tokens = batch_tokens
        self._limits = EngineLimits(batch_tokens, sys.maxsize, self.text.vocab_size, small_model=False)
        self._on_device = SingleDeviceSharding(self.device, memory_kind="device")
        self._programs = programs(model.config)
        params: dict[str, Any] = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        self._order = model.stack.order
        stacks = {kind: by_path(params[kind]) for kind in self._programs.kinds}
        dtypes = {stack.dtype for stack in jax.tree.leaves(stacks)}
        if compute_dtype is None and len(dtypes) > 1:
            raise EngineError(f"the layers have several dtypes, {sorted(map(str, dtypes))}: give compute_dtype")
        self.dtype = np.dtype(compute_dtype or dtypes.pop())
        exact_products(self.dtype)
        self._host = model.stack.in_order(
            {kind: [self._pinned(kind, stacks[kind], i) for i in range(self._order.count(kind))] for kind in stacks}
        )
        outer = {name: params[name] for name in ("embedding", "norm", "head") if name in params}
        self._outer: Params = jax.tree.map(lambda x: jax.device_put(x.astype(self.dtype), self._on_device), outer)
        self._resident: dict[int, Params] = {}
        self._first: Parts = ()  # the first streamed layer, with which the next pass begins

    @staticmethod
    def load(path: str | os.PathLike[str], **settings: Any) -> "StreamedModel":
        """The model in a checkpoint folder, with `settings` of the class. During the call, the host holds the weights
        twice. Also raises the errors of `models.load`."""
        return StreamedModel(models.load(path, shardings=on_host), **settings)

    def _pinned(self, kind: str, stacks: dict[tuple, np.ndarray], entry: int) -> Parts:
        place = SingleDeviceSharding(self.device, memory_kind=HOST_MEMORY)
        parts = self._programs.pack({path: stack[entry] for path, stack in stacks.items()}, self.dtype, kind=kind)
        return tuple(jax.block_until_ready(jax.device_put(parts, place)))

    @property
    def layer_bytes(self) -> int:
        return sum(part.nbytes for part in self._host[0])

    @property
    def resident(self) -> tuple[int, ...]:
        """The numbers of the layers that are resident now."""
        return tuple(sorted(self._resident))

    def release(self) -> None:
        """Frees the device memory of all layers; the next batch brings them again."""
        self._resident, self._first = {}, ()

    # --- requests ---------------------------------------------------------------------------------

    def score(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
    ) -> Work[list[tuple[float, ...]]]:
        """Returns for each prompt the log-probability (nats) of each answer, summed over the answer's tokens. All
        answers to a prompt take one pass: each answer is a branch behind the prompt."""
        self.check("prompt", prompts)
        self.check("answer", answers)
        if not answers:
            raise EngineError("there are no answers to score")
        targets_A = np.concatenate([np.asarray(answer, np.int32) for answer in answers])
        ends = np.cumsum([len(answer) for answer in answers])[:-1]
        scores: dict[int, tuple[float, ...]] = {}
        for members, batch in self._batches(prompts, [answer[:-1] for answer in answers]):  # no token follows the last
            before_BA, targets_BA = np.zeros((2, len(batch.inputs.tokens_BT), len(targets_A)), np.int32)
            for row, places in enumerate(batch.places):
                targets_BA[row] = targets_A
                before_BA[row] = [
                    column
                    for place in places
                    for column in (place.prompt_tokens - 1, *(place.response_start + np.arange(place.response_tokens)))
                ]
            x = yield from self._prefill(batch.inputs, [])
            logprobs_BA = np.asarray(self._programs.logprobs(self._outer, x, before_BA, targets_BA))
            for row, index in enumerate(members):
                scores[index] = tuple(float(part.sum()) for part in np.split(logprobs_BA[row], ends))
        return [scores[index] for index in range(len(prompts))]

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Sequence[int] = ()
    ) -> Work[list[tuple[int, ...]]]:
        """Returns the greedy response to each prompt: the most probable token each time, up to and including a stop id.
        Every token takes a pass, which lasts at least as long as the transfers of all streamed layers."""
        self.check("prompt", prompts)
        if max_new_tokens < 1:
            raise EngineError(f"max_new_tokens must be positive, got {max_new_tokens}")
        texts: dict[int, tuple[int, ...]] = {}
        room = doubling(max_new_tokens, LEAST_TOKENS)
        for members, batch in self._batches(prompts, [()]):
            rows, T = batch.inputs.tokens_BT.shape
            length_B = np.ones(rows, np.int32)
            length_B[: len(members)] = [len(prompts[index]) for index in members]
            kept: list[Kept] = []
            x = yield from self._prefill(batch.inputs, kept, room)
            last_B = length_B - 1
            new: list[np.ndarray] = []
            while True:
                token_B = np.asarray(self._programs.likeliest(self._outer, x, last_B))
                new.append(token_B)
                tokens_BN = np.stack(new, axis=1)[: len(members)]
                if len(new) == max_new_tokens or np.isin(tokens_BN, stop_ids).any(axis=1).all():
                    break
                x = yield from self._decode(token_B, kept, length_B, T, len(new) - 1)
                last_B = np.zeros_like(length_B)
            for tokens_N, index in zip(tokens_BN, members, strict=True):
                stops = np.flatnonzero(np.isin(tokens_N, stop_ids))
                texts[index] = tuple(tokens_N[: stops[0] + 1 if len(stops) else None].tolist())
        return [texts[index] for index in range(len(prompts))]

    def check(self, what: str, sequences: Sequence[Sequence[int]]) -> None:
        """Raises EngineError for a sequence that is empty, or has an id that is no token of the model."""
        for number, tokens in enumerate(sequences):
            if not len(tokens):
                raise EngineError(f"{what} {number} is empty")
            if min(tokens) < 0 or max(tokens) >= self.text.vocab_size:
                raise EngineError(
                    f"{what} {number} has token ids from {min(tokens)} to {max(tokens)}; "
                    f"the model knows 0 to {self.text.vocab_size - 1}"
                )

    def _batches(
        self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
    ) -> Iterator[tuple[list[int], PrefillBatch]]:
        """Yields (numbers of some prompts, their batch). Each prompt has a row, with all `responses` behind it. Prompts
        of similar lengths share a batch, the shortest first."""
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        behind = tuple(np.asarray(response, np.int32) for response in responses)
        prefixes = [Prefix(text_input(prompts[index]), behind) for index in order]
        for members, batch in plan(prefixes, self._limits, self._batch_tokens, batch_patches=0):
            yield [order[member] for member in members], batch

    # --- passes through the layers ----------------------------------------------------------------

    def _prefill(self, inputs: PackedTokens, kept: list[Kept], room: int = 0) -> Work[jax.Array]:
        """Returns the hidden states after all layers. With `room` columns for a response, fills `kept`."""
        rows, tokens = inputs.tokens_BT.shape
        self._settle(rows, tokens, room)
        x, rotary = self._programs.embed(self._outer, inputs.tokens_BT, inputs.positions_3BT)
        if self.text.delta is not None:  # enough chunks for runs of any lengths
            inputs = inputs.with_runs(tokens // CHUNK + 1 + int(inputs.branches_BT.max()))
        places = jax.device_put((inputs.segments_BT, inputs.branches_BT, inputs.runs), self._on_device)

        def step(layer: Params | Parts, upcoming: Parts, x: jax.Array, number: int) -> tuple[jax.Array, Parts]:
            kind = self._order[number]
            x, fetched, rows = self._programs.prefill(layer, upcoming, x, rotary, places, room=room, kind=kind)
            if rows is not None:
                kept.append(rows)
            return x, fetched

        return (yield from self._pass(x, step))

    def _decode(
        self, token_B: np.ndarray, kept: list[Kept], length_B: np.ndarray, first: int, number: int
    ) -> Work[jax.Array]:
        """Returns the hidden states of token `number` of each response, and adds these tokens to `kept`."""
        positions_3B1 = np.broadcast_to(length_B[:, None] + np.int32(number), (3, len(length_B), 1))
        x, rotary = self._programs.embed(self._outer, token_B[:, None], positions_3B1)

        def step(layer: Params | Parts, upcoming: Parts, x: jax.Array, i: int) -> tuple[jax.Array, Parts]:
            reach, kind = (length_B, np.int32(first), np.int32(number)), self._order[i]
            x, fetched, kept[i] = self._programs.decode(layer, upcoming, x, kept[i], rotary, reach, kind=kind)
            return x, fetched

        return (yield from self._pass(x, step))

    def _pass(self, x: jax.Array, step: Step) -> Work[jax.Array]:
        layers = self.text.num_layers
        streamed = [number for number in range(layers) if number not in self._resident]
        arriving = list(self._first or jax.device_put(self._host[0], self._on_device)) if streamed else []
        self._first = ()  # a pass that is given up leaves no layer behind
        for number, (target, parts) in enumerate(travel(layers, streamed)):
            upcoming = tuple(self._host[target][part] for part in parts)
            layer: Params | Parts
            if number in self._resident:
                layer = self._resident[number]
            else:
                layer, arriving = tuple(arriving), []
            x, fetched = step(layer, upcoming, x, number)
            del layer
            arriving += fetched
            # Without this wait, the host would run ahead, and take memory for layers long before they are needed.
            jax.block_until_ready((x, fetched))
            yield
        self._first = tuple(arriving)
        return x

    def _settle(self, rows: int, tokens: int, room: int) -> None:
        wanted = set(range(self.text.num_layers)) - set(
            streamed_places(self.text.num_layers, self._residents(rows, tokens, room))
        )
        self._resident = {number: layer for number, layer in self._resident.items() if number in wanted}
        if len(wanted) == self.text.num_layers:
            self._first = ()
        for number in sorted(wanted - self._resident.keys()):
            parts = jax.device_put(self._host[number], self._on_device)
            self._resident[number] = jax.block_until_ready(self._programs.unpack(parts, kind=self._order[number]))

    def _residents(self, rows: int, tokens: int, room: int) -> int:
        if self._given is not None:
            return self._given
        # A batch that generates is a series of passes over one token of each row.
        computed, context = (1, tokens + room) if room else (tokens, 0)
        compute = self._pace.compute_seconds(self.text, rows, computed, context, self.layer_bytes)
        needed = pass_bytes(self.text, rows, tokens, room, self.dtype.itemsize)
        return resident_layers(
            self.text.num_layers,
            self.layer_bytes,
            compute,
            self._pace.transfer_seconds(self.layer_bytes),
            self._free() - needed,
        )

    def _free(self) -> int | float:
        """The bytes of device memory for layers and activations; infinite if the device does not report them."""
        memory = self.device.memory_stats() or {}
        if "bytes_limit" not in memory:
            return float("inf")
        held = self.layer_bytes * len(self._resident) + sum(part.nbytes for part in self._first)
        return memory["bytes_limit"] - memory["bytes_in_use"] + held


def finish(work: Work[Result]) -> Result:
    """Runs the work to its end without a break."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


# --- the plan: which layers stay on the device, and when the parts of streamed layers travel ---------


def layer_weights(text: TextConfig) -> int:
    """The number of weights in the matrices of a layer of the largest kind."""
    return text.hidden_size * (_projections(text) + 3 * text.intermediate_size)


def _projections(text: TextConfig) -> int:
    """The sum of the widths of a layer's projections beside its MLP, for the largest kind of layer."""
    attention = text.head_dim * ((3 if text.output_gate else 2) * text.num_heads + 2 * text.num_kv_heads)
    if (heads := text.delta) is None:
        return attention
    return max(attention, heads.channels + 2 * heads.value_heads * (heads.value_size + 1))


def pass_bytes(text: TextConfig, rows: int, tokens: int, room: int, value_bytes: int) -> int:
    """Estimates the peak memory of a pass on the device in bytes, beside streamed and resident weights, if attention
    stores no scores: hidden states, one layer's projections, MLP and unpacked weights and, with `room` columns for a
    response, all layers' keys, values and states."""
    width = 4 * text.hidden_size + _projections(text) + 3 * text.intermediate_size
    kept, states = 2 * len(text.attention_layers) * text.num_kv_heads * text.head_dim * (tokens + room), 0
    if (heads := text.delta) is not None:
        width += 4 * heads.channels  # the channels of chunks, and outputs in float32
        states = 4 * len(text.delta_layers) * heads.value_heads * heads.key_size * heads.value_size  # float32
    behind = rows * (value_bytes * kept + states) if room else 0
    return value_bytes * (rows * tokens * width + layer_weights(text)) + behind


def resident_layers(
    layers: int, layer_bytes: int, compute_seconds: float, transfer_seconds: float, free_bytes: int | float
) -> int:
    """The number of layers that stay on the device: the fewest with which all transfers hide, but no more than fit into
    `free_bytes`. A transfer hides behind `g = ceil(transfer_seconds / compute_seconds)` layers, so that one layer in
    `g` can be streamed; if `g` is above PARTS, none can. Raises EngineError if not even the buffers fit."""
    if free_bytes >= layers * layer_bytes:
        most = layers
    else:
        most = int(free_bytes // layer_bytes) - BUFFERS
        if most < 0:
            raise EngineError(
                f"a layer-streamed model needs room for {BUFFERS} layers, {BUFFERS * layer_bytes} bytes, beside the "
                f"activations of a batch, but has {max(int(free_bytes), 0)}; give it more memory or smaller batches"
            )
    gap = math.ceil(transfer_seconds / compute_seconds)
    wanted = layers - layers // gap if gap <= PARTS else layers
    if wanted > layers - BUFFERS - 1:  # the buffers would hold all other layers
        wanted = layers
    return min(wanted, most)


def streamed_places(layers: int, resident: int) -> tuple[int, ...]:
    """The numbers of the layers that are streamed: evenly spread, from layer 0 on."""
    streamed = layers - resident
    return tuple(k * layers // streamed for k in range(streamed))


def travel(layers: int, streamed: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Returns, for each layer, (a streamed layer, the numbers of its parts that travel meanwhile). A streamed layer
    travels while the one before it and all layers between the two compute, the first one for the next pass."""
    plan: list[tuple[int, tuple[int, ...]]] = [(0, ())] * layers
    for start, following in zip(streamed, [*streamed, layers][1:], strict=True):
        gap = following - start
        for offset in range(gap):
            parts = tuple(part for part in range(PARTS) if part * gap // PARTS == offset)
            plan[start + offset] = following % layers, parts
    return plan
