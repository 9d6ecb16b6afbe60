"""The seconds that a plan takes: attention, all-to-alls, projections and MLPs, vision tower. numpy only.

All seconds are those of one forward pass of the whole model (all layers) on one device, unless said otherwise. The
default is fitted to published measurements (`CostModel.published`), `python -m sharding.calibrate` writes one that is
fitted to the machine it runs on (`CostModel.load`).
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from ..planner.plan import Round, ShardPlan
from . import tables
from .fit import AttentionFit, CostError, Link, Number, fit_attention, fit_link, goodness, link_bytes
from .tables import ModelSizes

Runs = Mapping[tuple[int, int], float]


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Times of `model` on one kind of hardware.

    A training step is a forward pass, `recompute` further ones (1 with activation checkpointing, 0 without) and a
    backward pass that takes `backward_attention` times the forward time in attention (five matrix products for two),
    `backward_linear` times in everything linear, and once the bytes in its all-to-alls. `node` devices share the link
    `within`; groups of more devices are as fast as `across`, or refused where that was never measured (None).
    `fits` are R^2 and relative errors of each fit, `source` says what was measured on what.
    """

    source: str
    model: ModelSizes
    attention: AttentionFit
    within: Link
    across: Link | None
    node: int
    linear_flops: float  # a second, as achieved
    vision_flops: float
    recompute: float = 1.0
    backward_attention: float = 2.5
    backward_linear: float = 2.0
    fits: dict[str, dict[str, int | float]] = dataclasses.field(default_factory=dict)

    # --- where it comes from ------------------------------------------------------------------------

    @staticmethod
    def published(cluster: str = "h800", model: ModelSizes | str = tables.QWEN2_5_VL_7B) -> CostModel:
        """Fits FlexRL's tables for 8-GPU nodes of `h800` or `h200`; attention was measured on H800 only, whose compute
        is the H200's. Raises CostError for another cluster or model name."""
        if cluster not in tables.TABLE5_MS:
            raise CostError(f"no published measurements of {cluster!r}; there are {', '.join(tables.TABLE5_MS)}")
        linear, vision = tables.LINEAR_UTILISATION, tables.VISION_UTILISATION
        return CostModel.fitted(
            f"FlexRL Tables 3, 4 and 5 ({cluster.upper()}); linear terms: {linear:.0%} and {vision:.0%} (vision) of "
            f"{tables.PEAK_FLOPS / 1e12:.0f} TFLOP/s, assumed",
            attention=({key: ms / 1e3 for key, ms in tables.TABLE3_MS.items()}, tables.TABLE3_MODEL),
            all_to_all=({key: ms / 1e3 for key, ms in tables.TABLE5_MS[cluster].items()}, tables.TABLE5_MODEL),
            node=tables.NODE,
            most_alpha=tables.ALPHA_WITHIN,
            flops=(linear * tables.PEAK_FLOPS, vision * tables.PEAK_FLOPS),
        ).of(model)

    @staticmethod
    def fitted(
        source: str,
        *,
        attention: tuple[Runs, ModelSizes],
        all_to_all: tuple[Runs, ModelSizes],
        node: int,
        flops: tuple[float, float],
        most_alpha: float | None = None,
    ) -> CostModel:
        """Fits measured seconds of one layer of a model each: `attention` as `{(sequences, tokens of each): s}`,
        `all_to_all` as `{(degree, tokens in all): s}`; `most_alpha` bounds what starting costs within a node. `flops`
        are FLOP/s achieved in linear work and in the vision tower. Raises CostError."""
        runs, sizes = all_to_all
        inner, outer = ({key: s for key, s in runs.items() if (key[0] > node) == beyond} for beyond in (False, True))
        if not inner:
            raise CostError(f"no all-to-all was measured within a node of {node} devices")
        across = fit_link(outer, sizes, node) if outer else None
        base = CostModel(
            source=source,
            model=attention[1],
            attention=fit_attention(*attention),
            within=fit_link(inner, sizes, node, most_alpha),
            across=across,
            node=node,
            linear_flops=float(flops[0]),
            vision_flops=float(flops[1]),
        )
        spent = [base.launch_seconds([length] * count) for count, length in attention[0]]
        fits = {"attention": goodness(list(attention[0].values()), spent)}

        def judge(name: str, fitted: CostModel, some: Runs) -> None:
            guess = [fitted.of(sizes).all_to_all_seconds(tokens, degree) for degree, tokens in some]
            fits[name] = goodness(list(some.values()), guess)

        judge("within_node", base, inner)
        if outer:
            judge("across_nodes", base, outer)
            judge("all_to_all", base, runs)
        if most_alpha is not None:
            free = dataclasses.replace(base, within=fit_link(inner, sizes, node))
            judge("within_node_if_alpha_were_free", free, inner)
        return dataclasses.replace(base, fits=fits)

    @staticmethod
    def load(path: str | pathlib.Path, model: ModelSizes | str | None = None) -> CostModel:
        """Reads the file of `save`, for its own model or another. Raises CostError, with the path, for a file that is
        missing or is something else."""
        try:
            loaded = CostModel.from_json(pathlib.Path(path).read_text())
        except OSError as error:
            raise CostError(
                f"no cost model at {path}: {error.strerror}; `python -m sharding.calibrate --out {path}` measures one"
            ) from error
        except (CostError, UnicodeDecodeError) as error:
            raise CostError(f"{path}: {error}") from error
        return loaded.of(model) if model else loaded

    def save(self, path: str | pathlib.Path) -> None:
        pathlib.Path(path).write_text(self.to_json() + "\n")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> CostModel:
        """Reads what `to_json` wrote. Raises CostError for anything else."""
        try:
            raw = json.loads(text)
            parts = {"model": ModelSizes(**raw["model"]), "attention": AttentionFit(**raw["attention"])}
            links = {name: Link(**raw[name]) if raw[name] else None for name in ("within", "across")}
            read = CostModel(**{**raw, **parts, **links})
            if not all(map(np.isfinite, (read.linear_seconds(1), read.attention_seconds(1)))) or read.node < 1:
                raise CostError("this is no cost model: its figures are not positive and finite")
            return read
        except (AttributeError, KeyError, TypeError, ZeroDivisionError, json.JSONDecodeError) as error:
            raise CostError(f"this is no cost model: {type(error).__name__} {error}") from error

    def of(self, model: ModelSizes | str) -> CostModel:
        """Returns the same hardware with another model: FLOPs and bytes in proportion."""
        return dataclasses.replace(self, model=named(model))

    # --- seconds of a forward pass ------------------------------------------------------------------

    def attention_seconds(self, length: Number, degree: int = 1) -> Number:
        """Seconds of one device's share of the attention of a sequence of `length` tokens that `degree` devices
        compute, in a launch of its own; `[...]` for an array of lengths. Heads are dealt as in
        `sharding.spread.heads`, zeros included. Raises PlanError for a degree above the number of heads."""
        length = np.asarray(length, float)
        return self._attention(length**2, length, degree)

    def launch_seconds(self, lengths: Sequence[int], degree: int = 1) -> float:
        """Seconds of one launch over packed sequences, otherwise like `attention_seconds`."""
        tokens = np.asarray(lengths, float)
        return float(self._attention((tokens**2).sum(), tokens.sum(), degree))

    def all_to_all_seconds(self, tokens: Number, degree: int) -> float:
        """Seconds of both all-to-alls of a sequence (or stream) of `tokens` in all over `degree` devices; 0 for one
        device. Raises CostError for a group wider than a node if none was measured."""
        return float(self._all_to_all(np.asarray(tokens, float), degree)) if tokens else 0.0

    def linear_seconds(self, tokens: Number) -> Number:
        """Seconds of projections, MLPs and output head of `tokens` tokens on one device."""
        return np.asarray(tokens, float) * (self.model.linear_flops() / self.linear_flops)

    def vision_seconds(self, patches: Number) -> Number:
        """Seconds of the vision tower over `patches` patches on one device."""
        return np.asarray(patches, float) * (self.model.vision_flops() / self.vision_flops)

    # --- seconds of a plan --------------------------------------------------------------------------

    def step_seconds(
        self,
        plan: ShardPlan,
        *,
        train: bool = True,
        patches: Sequence[int | float] | np.ndarray | None = None,
        squares: Sequence[int | float] | np.ndarray | None = None,
    ) -> float:
        """Seconds of the forward and backward pass of a microbatch, or with `train=False` of the forward pass alone.

        Each device has its attention, its linear work and what its all-to-alls expose (`_attention_ends`);
        layers end with the slowest device, because all gather the next layer's weights together. `patches` are those
        that each device passes through the vision tower, `[devices]`, before. `squares` is what attention is
        quadratic in, a sequence each: `length**2` unless a prompt is shared by several responses.

        Not in it: gathering weights, reducing gradients, the optimizer, host work.
        """
        lengths = np.array(plan.lengths, float)
        quadratic = lengths**2 if squares is None else np.asarray(squares, float)
        linear = self.linear_seconds(plan.memory())
        vision = np.max(self.vision_seconds(np.zeros(1) if patches is None else np.asarray(patches, float)))

        def one_pass(attention: float, rest: float, *, mirrored: bool = False) -> float:
            ends = self._attention_ends(plan, quadratic, attention, mirrored)
            return float(np.max(ends + linear * rest) + vision * rest)

        total = one_pass(1.0, 1.0)
        if train:
            total += self.recompute * total
            total += one_pass(self.backward_attention, self.backward_linear, mirrored=True)
        return total

    def _attention_ends(self, plan: ShardPlan, squares: np.ndarray, factor: float, mirrored: bool) -> np.ndarray:
        """Returns `[devices]`: seconds from the start of a layer's attention until a device has sent all outputs, if
        communication overlaps computation (FlexRL, 3.4).

        A device computes its unsharded sequences first, with the all-to-all of its first group under way. When a
        group's attention starts, the all-to-all of the device's next group is issued; when it ends, that of its outputs
        is. All-to-alls go over one wire a device, in the order of issue, and start when the whole group is there.

        `squares` are the squared tokens of each sequence. Attention takes `factor` times that of the forward pass; a
        `mirrored` pass sends what others receive.
        """
        lengths = np.array(plan.lengths, float)
        busy_until, wire_until, issued = (np.zeros(plan.num_devices) for _ in range(3))
        leaving = None

        def send(after: np.ndarray, takes: np.ndarray, there: np.ndarray, degree: int) -> None:
            ready = np.where(there, np.maximum(wire_until, after), 0.0).reshape(-1, degree).max(axis=1)
            wire_until[there] = np.repeat(ready + takes, degree)[there]

        for turn in sorted(plan.rounds, key=lambda turn: turn.degree > 1):  # the unsharded ones first; stable
            degree, tokens = turn.degree, _sums(turn, lengths)
            there = np.repeat(tokens > 0, degree)
            attention = self._attention(_sums(turn, squares), tokens, degree)
            seconds = np.repeat(np.asarray(factor * attention), degree)
            if degree == 1:
                busy_until[there] += seconds[there]
                continue
            wire = self._all_to_all(tokens, degree)
            queries, kv = self.model.heads_of(degree)
            inputs = (queries + 2 * kv) / (2 * queries + 2 * kv)  # of the bytes; the rest are outputs
            inputs = 1 - inputs if mirrored else inputs
            send(issued, np.asarray(inputs * wire), there, degree)
            begin = np.maximum(busy_until, wire_until)
            if leaving:  # the outputs of the round before: issued when its attention ended, after the arrival above
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

    def _all_to_all(self, tokens: np.ndarray, degree: int) -> Number:
        if degree <= 1:
            return np.zeros_like(tokens)
        link = self.within if degree <= self.node else self.across
        if link is None:
            raise CostError(
                f"an all-to-all over {degree} devices was not measured ({self.source}): cap the degree at {self.node}"
            )
        return self.model.layers * link.seconds(*link_bytes(self.model, tokens, degree, self.node))


def _sums(turn: Round, values: np.ndarray) -> np.ndarray:
    """Sums the values of each group's sequences: `[groups]`."""
    return np.array([values[list(members)].sum() if members else 0.0 for members in turn.groups])


def named(model: ModelSizes | str) -> ModelSizes:
    """Returns the sizes of a model by its name. Raises CostError for a name that is not in `tables.MODELS`."""
    if isinstance(model, ModelSizes):
        return model
    if model not in tables.MODELS:
        raise CostError(f"no sizes of a model {model!r}; there are {', '.join(tables.MODELS)}, or give ModelSizes")
    return tables.MODELS[model]
