"""The cost model, for planning and simulation: seconds of attention, all-to-alls, linear work, vision tower.

All seconds are those of one forward pass of the whole model (all layers) on one device, unless said otherwise. The
devices that compute one sequence are a device group. `python benchmarks/calibrate.py` measures a machine and writes the
file that `CostModel.load` reads.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

import numpy as np

from .planner.plan import Round, ShardPlan, deal_heads

# The assumed speed of a GPU.
PEAK_FLOPS = 989e12  # dense bfloat16 of an H800 or H200 (NVIDIA's data sheets)
LINEAR_UTILISATION = 0.5  # assumed share of the peak in the large products of projections and MLPs

Number = int | float | np.integer | np.floating | np.ndarray


class CostError(ValueError):
    """A time was never measured, measured values can't be fitted, or a file is no cost model."""


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """The sizes that a model's cost depends on."""

    name: str
    layers: int  # layers with attention
    width: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int = 0
    vocabulary: int = 0
    vision_layers: int = 0
    vision_width: int = 0
    vision_mlp: int = 0
    vision_products: int = 3  # matrices of an MLP: three with a gate
    vision_mergers: int = 1  # a merger gives a token as many numbers as the decoder is wide
    patch_values: int = 3 * 2 * 14 * 14  # numbers in a patch: channels x frames x height x width
    patches_per_token: int = 4
    value_bytes: int = 2  # of an activation on the wire
    share_kv: bool = True  # heads that a device group can't share evenly are dealt (`deal_heads`), not divided
    other_flops: float = 0.0  # FLOPs of a token in layers without attention and in gates of attention
    state_layers: int = 0  # layers that mix tokens by a state
    state_bytes: float = 0.0  # bytes of a token in the all-to-alls of one such layer, without copies of heads

    def linear_flops(self) -> float:
        """The FLOPs of a token in a forward pass, without attention scores: projections, MLPs, output head."""
        channels = self.heads * self.head_size, self.kv_heads * self.head_size
        layer = self.width * (2 * channels[0] + 2 * channels[1] + 3 * self.mlp)
        return 2.0 * (self.layers * layer + self.width * self.vocabulary) + self.other_flops

    def vision_flops(self) -> float:
        """The FLOPs of a patch in a forward pass of the vision tower and its mergers, without attention scores. With
        windows of 64 patches, as in most layers of Qwen2.5-VL, the scores would add 2 %."""
        mlp = self.vision_products * self.vision_width * self.vision_mlp
        tower = self.vision_layers * (4 * self.vision_width**2 + mlp)
        merged = self.patches_per_token * self.vision_width  # a token's patches side by side
        merger = (merged**2 + merged * self.width) / self.patches_per_token if self.vision_layers else 0.0
        return 2.0 * (self.patch_values * self.vision_width + tower + self.vision_mergers * merger)

    def heads_of(self, degree: int) -> tuple[int, int]:
        """(query heads, KV heads) that travel to `degree` devices and are computed there. Raises as `deal_heads`."""
        if not self.share_kv:
            return self.heads, self.kv_heads
        deal = deal_heads(self.heads, self.kv_heads, degree)
        return deal.local_queries * degree, deal.local_kv * degree

    def wire_bytes(self, degree: int) -> float:
        """The bytes of a token in the all-to-alls of one layer's attention over `degree` devices, those that stay on
        their device included. Raises PlanError as `deal_heads` does."""
        return 2.0 * sum(self.heads_of(degree)) * self.head_size * self.value_bytes


@dataclasses.dataclass(frozen=True)
class AttentionFit:
    """Seconds of one forward attention launch: `channels * (per_square * sum L^2 + per_token * sum L) + per_launch`.
    Channels are query heads times head size."""

    per_square: float
    per_token: float
    per_launch: float

    def seconds(self, squares: Number, tokens: Number, channels: Number) -> Number:
        """The seconds without the launch. `squares` is the sum of squared lengths."""
        return channels * (self.per_square * squares + self.per_token * tokens)


@dataclasses.dataclass(frozen=True)
class Link:
    """Seconds of an all-to-all: `alpha + sent * (per_byte + congestion * flying)`; see `link_bytes`."""

    alpha: float
    per_byte: float
    congestion: float

    def seconds(self, sent: Number, flying: Number) -> Number:
        return self.alpha + sent * (self.per_byte + self.congestion * flying)


def link_bytes(total: Number, degree: int, node: int) -> tuple[Number, Number]:
    """Returns (sent, flying) of both all-to-alls of a layer, which have `total` bytes. `sent` are the bytes that a
    device sends to the other devices of its device group (to other nodes, if it is wider than a node: transfers within
    a node are faster and run meanwhile), `flying` the bytes that all these devices send to each other."""
    receivers = degree - node if degree > node else degree - 1
    return total * receivers / degree**2, total * (degree - 1) / degree


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Times of `model` on one kind of hardware.

    A training step is a forward pass, `recompute` further forward passes (1 with activation checkpointing, 0 without)
    and a backward pass. The backward pass takes `backward_attention` times the forward time in attention (five matrix
    products instead of two), `backward_linear` times in linear work, and sends the same bytes in its all-to-alls.
    `node` devices share the link `within`; wider device groups use the link `across`, which is None if no such group
    was measured. `fits` are R^2 and relative errors of each fit, `source` names measurements and hardware.
    """

    source: str
    model: ModelSizes
    attention: AttentionFit
    within: Link
    across: Link | None
    node: int
    linear_flops: float  # FLOPs a second, as measured in large products
    vision_flops: float
    recompute: float = 1.0
    backward_attention: float = 2.5
    backward_linear: float = 2.0
    fits: dict[str, dict[str, int | float]] = dataclasses.field(default_factory=dict)

    @staticmethod
    def load(path: str | pathlib.Path, model: ModelSizes | None = None) -> "CostModel":
        """Reads a file; `model` replaces the file's. Raises CostError, naming the path, if this is no cost model."""
        try:
            raw = json.loads(pathlib.Path(path).read_text())
            parts = {"model": ModelSizes(**raw["model"]), "attention": AttentionFit(**raw["attention"])}
            links = {name: Link(**raw[name]) if raw[name] else None for name in ("within", "across")}
            read = CostModel(**{**raw, **parts, **links})
            if not all(map(np.isfinite, (read.linear_seconds(1), read.attention_seconds(1)))) or read.node < 1:
                raise ValueError("its figures are not positive and finite")
        except OSError as error:
            raise CostError(
                f"no cost model at {path}: {error.strerror}; `python benchmarks/calibrate.py --out {path}` measures one"
            ) from error
        except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise CostError(f"{path}: this is no cost model: {type(error).__name__} {error}") from error
        return read.of(model) if model else read

    def of(self, model: ModelSizes) -> "CostModel":
        """Returns the cost model of the same hardware for another model: FLOPs and bytes in proportion."""
        return dataclasses.replace(self, model=model)

    # --- seconds of a forward pass ------------------------------------------------------------------

    def attention_seconds(self, length: Number, degree: int = 1) -> Number:
        """Seconds of one device's share of the attention of a sequence of `length` tokens on `degree` devices, with a
        launch for this sequence alone in each layer. Raises PlanError as `deal_heads` does."""
        length = np.asarray(length, float)
        return self._attention(length**2, length, degree)

    def all_to_all_seconds(self, tokens: Number, degree: int) -> Number:
        """Seconds of both all-to-alls of all layers, for `tokens` tokens over `degree` devices; 0 for one device and
        for no tokens. Raises CostError for more devices than a node has if `across` is None."""
        tokens = np.asarray(tokens, float)
        if degree <= 1:
            return np.zeros_like(tokens)[()]
        link = self.within if degree <= self.node else self.across
        if link is None:
            raise CostError(
                f"an all-to-all over {degree} devices was not measured ({self.source}): cap the degree at {self.node}"
            )
        model = self.model
        kinds = (model.layers, model.wire_bytes(degree)), (model.state_layers, model.state_bytes)
        seconds = sum(n * link.seconds(*link_bytes(width * tokens, degree, self.node)) for n, width in kinds)
        return np.where(tokens > 0, seconds, 0.0)[()]

    def linear_seconds(self, tokens: Number) -> Number:
        """Seconds of projections, MLPs and output head of `tokens` tokens on one device."""
        return np.asarray(tokens, float) * (self.model.linear_flops() / self.linear_flops)

    def vision_seconds(self, patches: Number) -> Number:
        """Seconds of the vision tower over `patches` patches on one device."""
        return np.asarray(patches, float) * (self.model.vision_flops() / self.vision_flops)

    # --- seconds of a plan --------------------------------------------------------------------------

    def step_seconds(
        self, plan: ShardPlan, *, train: bool = True, squares: Sequence[int | float] | np.ndarray | None = None
    ) -> float:
        """Seconds of all passes over a microbatch (forward, recomputed, backward), or with `train=False` of the forward
        pass alone, of the slowest device. Each device has its attention, its linear work and the part of its
        all-to-alls that computation does not hide (`_attention_ends`). `squares` gives each sequence's attention work:
        `length**2` unless several responses share a prompt. Not included: the vision tower, gathering weights, reducing
        gradients, the optimizer, host work."""
        lengths = np.array(plan.lengths, float)
        quadratic = lengths**2 if squares is None else np.asarray(squares, float)
        linear = self.linear_seconds(plan.memory())

        def one_pass(attention: float, rest: float, *, mirrored: bool = False) -> float:
            ends = self._attention_ends(plan, quadratic, attention, mirrored)
            return float(np.max(ends + linear * rest))

        total = one_pass(1.0, 1.0)
        if train:
            total += self.recompute * total
            total += one_pass(self.backward_attention, self.backward_linear, mirrored=True)
        return total

    def _attention_ends(self, plan: ShardPlan, squares: np.ndarray, factor: float, mirrored: bool) -> np.ndarray:
        """Returns `[devices]`: seconds from the start of a layer's attention until a device has sent all outputs, times
        the number of layers. Communication overlaps computation (FlexRL, 3.4).

        A device computes its unsharded sequences first; meanwhile the inputs of its first sharded round are under way.
        When a round's attention starts, the inputs of the next round are sent; when it ends, the round's own outputs. A
        device sends its all-to-alls in order over one wire; an all-to-all starts when all its devices are ready.

        `squares` is the attention work of each sequence. Attention takes `factor` times the forward pass's time. A
        `mirrored` pass swaps the bytes of inputs and outputs.
        """
        lengths = np.array(plan.lengths, float)
        busy_until, wire_until, issued = (np.zeros(plan.num_devices) for _ in range(3))
        leaving = None

        def send(after: np.ndarray, takes: np.ndarray, there: np.ndarray, degree: int) -> None:
            ready = np.where(there, np.maximum(wire_until, after), 0.0).reshape(-1, degree).max(axis=1)
            wire_until[there] = np.repeat(ready + takes, degree)[there]

        for turn in sorted(plan.rounds, key=lambda turn: turn.degree > 1):  # unsharded rounds first; stable
            degree, tokens = turn.degree, _sums(turn, lengths)
            there = np.repeat(tokens > 0, degree)
            attention = self._attention(_sums(turn, squares), tokens, degree)
            seconds = np.repeat(np.asarray(factor * attention), degree)
            if degree == 1:
                busy_until[there] += seconds[there]
                continue
            wire = np.asarray(self.all_to_all_seconds(tokens, degree))
            queries, kv = self.model.heads_of(degree)
            inputs = (queries + 2 * kv) / (2 * queries + 2 * kv)  # share of inputs in the bytes sent
            inputs = 1 - inputs if mirrored else inputs
            send(issued, np.asarray(inputs * wire), there, degree)
            begin = np.maximum(busy_until, wire_until)
            if leaving:  # on the wire, the outputs of the previous round follow the inputs sent above
                send(*leaving)
            issued[there] = begin[there]
            busy_until[there] = (begin + seconds)[there]
            leaving = busy_until.copy(), np.asarray((1 - inputs) * wire), there, degree
        if leaving:
            send(*leaving)
        return np.maximum(busy_until, wire_until)

    def _attention(self, squares: Number, tokens: Number, degree: int) -> Number:
        channels = self.model.heads_of(degree)[0] / degree * self.model.head_size
        seconds = self.model.layers * self.attention.seconds(squares, tokens, channels)
        return seconds + self.model.layers * self.attention.per_launch


def _sums(turn: Round, values: np.ndarray) -> np.ndarray:
    return np.array([values[list(members)].sum() if members else 0.0 for members in turn.groups])
