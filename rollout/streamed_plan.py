"""Decides which layers of a layer-streamed model stay on the device, and when the parts of the others travel there.

Flexes (RollPacker, section 4.3) keeps most of a judge's layers in host memory, sends them over PCIe while others
compute, and changes their number with the sequence length, so that the judge fits beside the actor; it has no formula.
The rule here follows from the pipeline: of `L` layers, `S` are streamed, evenly spread, so that each travels while `L
// S` layers compute. Longer rows hide the travel of more layers, and need memory for their activations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from models.config import TextConfig
from sharding.cost import LINEAR_UTILISATION, PEAK_FLOPS

from .engine import EngineError

PARTS = 4  # of a layer's weights; the computation of one layer hides so many parts or fewer
BUFFERS = 2  # layers on the device beside the resident ones: the layer that computes and the next one


@dataclasses.dataclass(frozen=True)
class DeviceSpeed:
    """The operations, bytes of memory and bytes of the link to the host that a device handles in a second.

    The defaults are an H100 SXM's: compute as in the cost model, memory from its data sheet, and 80 % (assumed) of the
    63 GB/s that PCIe 5.0 x16 has in one direction.
    """

    flops: float = LINEAR_UTILISATION * PEAK_FLOPS
    memory_bytes: float = 3.35e12
    link_bytes: float = 0.8 * 63e9

    def __post_init__(self) -> None:
        if not all(0 < value < math.inf for value in dataclasses.astuple(self)):
            raise EngineError(f"a pace needs positive, finite numbers: {self}")

    def compute_seconds(self, text: TextConfig, rows: int, tokens: int, context: int, layer_bytes: int) -> float:
        """The seconds of one layer over `rows` rows of `tokens` tokens. A token sees half of its row and all `context`
        tokens before it. The layer reads its weights once, however few tokens there are."""
        heads = text.num_heads * text.head_dim
        flops = 2 * layer_weights(text) + 4 * heads * (tokens / 2 + context)
        return max(rows * tokens * flops / self.flops, layer_bytes / self.memory_bytes)

    def transfer_seconds(self, layer_bytes: int) -> float:
        return layer_bytes / self.link_bytes


def layer_weights(text: TextConfig) -> int:
    """The number of weights in a layer's matrices."""
    projections = 2 * text.head_dim * (text.num_heads + text.num_kv_heads)
    return text.hidden_size * (projections + 3 * text.intermediate_size)


def pass_bytes(text: TextConfig, rows: int, tokens: int, room: int, value_bytes: int) -> int:
    """About the most device memory of a pass beside weights, if attention stores no scores: hidden states, one layer's
    projections, MLP and unpacked weights, and all keys and values if there are `room` columns for a response."""
    width = 4 * text.hidden_size + 2 * text.head_dim * (text.num_heads + text.num_kv_heads) + 3 * text.intermediate_size
    kept = 2 * text.num_layers * text.num_kv_heads * text.head_dim * (tokens + room) if room else 0
    return value_bytes * (rows * (tokens * width + kept) + layer_weights(text))


def resident_layers(
    layers: int, layer_bytes: int, compute_seconds: float, transfer_seconds: float, free_bytes: int | float
) -> int:
    """The number of layers that stay on the device: as few as hide all transfers, but no more than fit `free_bytes`.

    A layer that takes `transfer_seconds` hides behind `g = ceil(transfer_seconds / compute_seconds)` layers, so that
    one layer in `g` can be streamed. If `g` is above PARTS, transfers can't be hidden, and every resident layer saves
    its own transfer: as many as fit are resident. The number never grows with `compute_seconds`, and never shrinks with
    `free_bytes`. Raises EngineError if not even the buffers fit.
    """
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
    if wanted > layers - BUFFERS - 1:  # with the buffers, all layers or more
        wanted = layers
    return min(wanted, most)


def streamed_places(layers: int, resident: int) -> tuple[int, ...]:
    """The numbers of the layers that are streamed: the first one, and others evenly spread."""
    streamed = layers - resident
    return tuple(k * layers // streamed for k in range(streamed))


def travel(layers: int, streamed: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Returns, for each layer, (a streamed layer, the numbers of its parts) that travel meanwhile (or none).

    A streamed layer travels from the start of the streamed layer before it; the first one travels behind the last
    streamed layer of the pass before. Its parts are spread evenly over that time."""
    plan: list[tuple[int, tuple[int, ...]]] = [(0, ())] * layers
    for start, following in zip(streamed, [*streamed, layers][1:], strict=True):
        gap = following - start
        for offset in range(gap):
            parts = tuple(part for part in range(PARTS) if part * gap // PARTS == offset)
            plan[start + offset] = following % layers, parts
    return plan
