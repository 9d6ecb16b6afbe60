"""Fits the cost model of `sharding.cost` to measured times: published ones, or those of `calibrate.py`.

The published times are FlexRL's, appendix B (Table 3) and appendix C (Tables 4 and 5). Table 4 is the 262144-token part
of Table 5.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from sharding.cost import (
    LINEAR_UTILISATION,
    PEAK_FLOPS,
    AttentionFit,
    CostError,
    CostModel,
    Link,
    ModelSizes,
    link_bytes,
)

Runs = Mapping[tuple[int, int], float]

QWEN2_5_VL_7B = ModelSizes(
    "qwen2.5-vl-7b",
    layers=28,
    width=3584,
    heads=28,
    kv_heads=4,
    head_size=128,
    mlp=18944,
    vocabulary=152064,
    vision_layers=32,
    vision_width=1280,
    vision_mlp=3420,
)
MODELS = {QWEN2_5_VL_7B.name: QWEN2_5_VL_7B}

# --- FlexRL, Table 3: forward flash_attn_var_len on one H800, 65536 tokens in all ---------------------

TABLE3_MODEL = ModelSizes("FlexRL Table 3", layers=1, width=8192, heads=64, kv_heads=8, head_size=128)
TABLE3_MS = {  # (sequences, tokens of each): milliseconds
    (1, 65536): 182.9,
    (4, 16384): 46.6,
    (8, 8192): 24.0,
    (16, 4096): 12.7,
    (32, 2048): 7.0,
    (64, 1024): 4.3,
}

# --- FlexRL, Table 5 (and 4): SeqAlltoAll of GQA attention, whole sequence length ---------------------

# KV heads are not copied: copies would make 32 devices send 4/3 of the bytes of 16 in all, against the times below.
TABLE5_MODEL = ModelSizes("FlexRL Table 5", layers=1, width=4096, heads=32, kv_heads=8, head_size=128, share_kv=False)
NODE = 8  # GPUs a node, in both clusters
TABLE5_TOKENS = (131072, 262144, 524288, 1048576)  # the last ones at some degrees only


def _cells(rows_ms: dict[int, tuple[float, ...]]) -> dict[tuple[int, int], float]:
    return {(p, tokens): ms for p, row in rows_ms.items() for tokens, ms in zip(TABLE5_TOKENS, row, strict=False)}


TABLE5_MS = {  # cluster: {(degree, tokens): milliseconds}
    "h200": _cells(
        {
            2: (9.970, 23.401, 52.472),
            4: (6.547, 16.107, 47.361),
            8: (3.501, 8.513, 22.462, 64.878),
            16: (7.871, 14.639, 36.554, 68.558),
            32: (6.355, 11.030, 24.150, 48.356),
        }
    ),
    "h800": _cells(
        {
            2: (11.079, 18.245, 60.709),
            4: (6.943, 16.480, 44.372),
            8: (6.360, 12.543, 28.686, 119.293),
            16: (12.333, 19.644, 41.430, 104.011),
            32: (17.219, 16.558, 31.089, 69.296),
        }
    ),
}

# --- assumed, because no table has it -----------------------------------------------------------------

VISION_UTILISATION = 0.4  # share of the peak in the vision tower; its matrices are a tenth of the language model's
ALPHA_WITHIN = 100e-6  # seconds that starting the all-to-alls of an attention costs within a node, at most


def named(model: ModelSizes | str) -> ModelSizes:
    """Returns the sizes of a model by its name. Raises CostError for a name that is not in `MODELS`."""
    if isinstance(model, ModelSizes):
        return model
    if model not in MODELS:
        raise CostError(f"no sizes of a model {model!r}; there are {', '.join(MODELS)}, or give ModelSizes")
    return MODELS[model]


def published(cluster: str = "h800", model: ModelSizes | str = QWEN2_5_VL_7B) -> CostModel:
    """Fits FlexRL's tables for 8-GPU nodes of `h800` or `h200`. Attention was measured on H800 only; its peak compute
    is the H200's. Raises CostError for another cluster or model name."""
    if cluster not in TABLE5_MS:
        raise CostError(f"no published measurements of {cluster!r}; there are {', '.join(TABLE5_MS)}")
    linear, vision = LINEAR_UTILISATION, VISION_UTILISATION
    return fitted(
        f"FlexRL Tables 3, 4 and 5 ({cluster.upper()}); linear terms: {linear:.0%} and {vision:.0%} (vision) of "
        f"{PEAK_FLOPS / 1e12:.0f} TFLOP/s, assumed",
        attention=({key: ms / 1e3 for key, ms in TABLE3_MS.items()}, TABLE3_MODEL),
        all_to_all=({key: ms / 1e3 for key, ms in TABLE5_MS[cluster].items()}, TABLE5_MODEL),
        node=NODE,
        most_alpha=ALPHA_WITHIN,
        flops=(linear * PEAK_FLOPS, vision * PEAK_FLOPS),
    ).of(named(model))


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
    `all_to_all` as `{(degree, tokens in all): s}`; `most_alpha` bounds the seconds of a start within a node. `flops`
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
    spent = [launch_seconds(base, [length] * count) for count, length in attention[0]]
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


def forward_seconds(cost: CostModel, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """The seconds of each sequence on one device, without its media: the work by which planners balance."""
    tokens = np.asarray(lengths)
    return np.asarray(cost.attention_seconds(tokens) + cost.linear_seconds(tokens))


def launch_seconds(cost: CostModel, lengths: Sequence[int], degree: int = 1) -> float:
    """Seconds of one launch of attention over packed sequences, otherwise like `CostModel.attention_seconds`."""
    tokens = np.asarray(lengths, float)
    return float(cost._attention((tokens**2).sum(), tokens.sum(), degree))


def save(cost: CostModel, path: str | pathlib.Path) -> None:
    """Writes the file that `CostModel.load` reads."""
    pathlib.Path(path).write_text(json.dumps(dataclasses.asdict(cost), indent=1) + "\n")


# --- the fits: non-negative coefficients, least squares of relative errors ------------------------------


def fit_attention(runs: Mapping[tuple[int, int], float], model: ModelSizes) -> AttentionFit:
    """Fits `{(sequences, tokens of each): seconds}` of one layer of `model`.

    If all runs have the same total of tokens, `per_token` and `per_launch` can't be told apart, and `per_token` gets
    both. Raises CostError for less than two measurements.
    """
    if len(runs) < 2:
        raise CostError(f"attention needs at least two measurements, got {len(runs)}")
    count, length = np.array(list(runs), float).T
    tokens, channels = count * length, model.heads * model.head_size
    columns = [channels * count * length**2, channels * tokens]
    if np.ptp(tokens) > 0:
        columns.append(np.ones_like(tokens))
    found = non_negative(np.stack(columns, axis=1), np.array(list(runs.values())))
    return AttentionFit(float(found[0]), float(found[1]), float(found[2]) if len(found) > 2 else 0.0)


def fit_link(
    runs: Mapping[tuple[int, int], float], model: ModelSizes, node: int, most_alpha: float | None = None
) -> Link:
    """Fits `{(degree, tokens): seconds}`, all within a node or all across nodes.

    `most_alpha` bounds `alpha`: without short measurements, a free fit sets it to milliseconds. No collective takes so
    long to start, and short sequences would seem far too slow. Raises CostError for less than two measurements.
    """
    if len(runs) < 2:
        raise CostError(f"an all-to-all needs at least two measurements, got {len(runs)}")
    sent, flying = np.array([link_bytes(model.wire_bytes(degree) * tokens, degree, node) for degree, tokens in runs]).T
    seconds = np.array(list(runs.values()))
    columns = np.stack([np.ones_like(sent), sent, sent * flying], axis=1)
    found = non_negative(columns, seconds)
    if most_alpha is not None and found[0] > most_alpha:  # convex: the best fit is then at the bound
        rest = non_negative(columns[:, 1:], seconds - most_alpha, weights=1 / seconds)
        found = np.array([most_alpha, *rest])
    return Link(*map(float, found))


def non_negative(columns: np.ndarray, seconds: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Finds the coefficients `[columns]` of at least 0 with the least sum of squared relative errors (or of errors
    times `weights`). Raises CostError for times that are not positive and finite."""
    from scipy.optimize import nnls  # takes half a second to import, and most users of a cost model fit nothing

    weights = 1 / seconds if weights is None else weights
    if not np.isfinite(seconds).all() or not np.isfinite(weights).all() or (weights <= 0).any():
        raise CostError(f"measured seconds must be positive and finite, got {seconds.tolist()}")
    scale = np.abs(columns).max(axis=0)
    coefficients, _ = nnls(columns / scale * weights[:, None], seconds * weights)
    return coefficients / scale


def goodness(measured: Sequence[float], fitted: Sequence[float]) -> dict[str, int | float]:
    """Computes `r2` of the seconds, and the worst and mean relative error."""
    seconds, guess = np.array(measured), np.array(fitted)
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    relative = np.abs(guess / seconds - 1)
    return {
        "measurements": len(seconds),
        "r2": round(1 - float(((guess - seconds) ** 2).sum()) / spread, 4) if spread else 0.0,
        "worst_relative_error": round(float(relative.max()), 4),
        "mean_relative_error": round(float(relative.mean()), 4),
    }
