"""Logits, log-probabilities, gradients and features of media equal those of `transformers`, 1e-4 absolute in float32.

`pytest -rP` shows the largest error of each comparison.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from hf_reference import (
    BUILD,
    QUESTIONS,
    TOLERANCE,
    Pair,
    build_text,
    build_vl,
    gradient_errors,
    question,
    torch,
    worst,
)
from tiny import logits, run

import models
from models.config import RopeConfig
from models.decoder import logprobs
from models.inputs import pad
from models.processing.processor import pack_patches
from sharding.walk import Walk

tied_or_not = pytest.mark.parametrize("vl", [False, True], ids=["untied", "tied"], indirect=True, scope="module")


@pytest.fixture(scope="module", params=[False], ids=["untied"])
def vl(request, tmp_path_factory) -> Pair:
    return build_vl(tmp_path_factory.mktemp("vl"), tied=request.param)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def reader(request, tmp_path_factory) -> Pair:
    """A model that reads media."""
    return BUILD[request.param](tmp_path_factory.mktemp(request.param))


def error_of_logits(pair: Pair, *parts: Any) -> float:
    """The largest error over a prompt of these parts."""
    asked = question(pair.model, *parts)
    with torch.no_grad():
        reference = pair.reference(**asked.reference).logits
    assert reference.std() > 0.3, "values of order 1, or the tolerance says nothing"
    error = worst(run(pair.model, logits, asked.inputs, Walk()), reference)
    print("max error", error)
    return error


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "mixed"])
def test_logits_of_models_that_read_media(reader: Pair, kind: str) -> None:
    assert error_of_logits(reader, *QUESTIONS[kind]) < TOLERANCE


@pytest.mark.medium
def test_logits_of_qwen2(tmp_path) -> None:
    assert error_of_logits(build_text(tmp_path, tied=True), 40) < TOLERANCE


def drawn_shape(seed: int) -> dict[str, Any]:
    """A Qwen3 of any numbers of heads, head sizes and layers. Every third shape has biases, every second is tied."""
    rng = np.random.default_rng(seed)
    kv_heads = int(rng.integers(1, 4))
    return {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * int(rng.integers(1, 6)),
        "head_dim": 2 * int(rng.integers(2, 13)),
        "hidden_size": int(rng.integers(20, 90)),
        "intermediate_size": int(rng.integers(20, 90)),
        "num_hidden_layers": int(rng.integers(1, 4)),
        "attention_bias": seed % 3 == 0,
        "tied": seed % 2 == 0,
    }


def drawn_hybrid(seed: int) -> dict[str, Any]:
    """A Qwen3.5 of any numbers of heads of both kinds, any interval, and layers that are seldom a multiple of it."""
    rng, shape = np.random.default_rng(seed), drawn_shape(seed)
    interval, key_heads, half = (int(rng.integers(low, high)) for low, high in ((2, 5), (1, 5), (3, 7)))
    pairs = half - 2 * (half // 3)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
    rope |= {"mrope_section": [pairs, half // 3, half // 3], "partial_rotary_factor": [0.25, 0.5, 1.0][seed % 3]}
    return shape | {
        "rope_parameters": rope,
        "head_dim": int(2 * half / rope["partial_rotary_factor"]),
        "num_hidden_layers": interval + int(rng.integers(0, 3)),
        "full_attention_interval": interval,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * int(rng.integers(1, 4)),
        "linear_key_head_dim": int(rng.integers(8, 17)),  # heads of 3 numbers have sums so small that norms are noise
        "linear_value_head_dim": int(rng.integers(8, 17)),
    }


def drawn_tower(seed: int, layers: int) -> dict[str, Any]:
    """A tower of Qwen3-VL of any size; the decoder reads its last layer, and up to three layers before."""
    rng = np.random.default_rng(seed)
    depth, heads = int(rng.integers(2, 6)), int(rng.integers(1, 4))
    read = rng.choice(depth, size=min(int(rng.integers(1 if seed else 0, 4)), depth, layers), replace=False)
    return {
        "depth": depth,
        "num_heads": heads,
        "hidden_size": 4 * heads * int(rng.integers(2, 6)),
        "intermediate_size": int(rng.integers(20, 90)),
        "patch_size": int(rng.integers(2, 5)),
        "num_position_embeddings": int(rng.integers(2, 9)) ** 2,
        "deepstack_visual_indexes": sorted(map(int, read)),
    }


def drawn_parts(seed: int) -> list[Any]:
    """Texts, images and videos, these of any number of frame pairs."""
    rng, parts = np.random.default_rng(seed), [int(np.random.default_rng(seed).integers(1, 9))]
    for kind in rng.permutation(["image", "video", "video"])[: int(rng.integers(1, 4))]:
        pairs = int(rng.integers(1, 6)) if kind == "video" else 1
        rows, columns = (2 * int(side) for side in rng.integers(1, 5, 2))
        parts += [(str(kind), (pairs, rows, columns), 1.0), int(rng.integers(1, 9))]
    return parts


COUNTS = {"qwen3": 7, "qwen3_vl": 8, "qwen3_5_text": 6, "qwen3_5": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "seed"),
    [(kind, seed) for kind, count in COUNTS.items() for seed in range(count)],
)
def test_qwen3_of_any_shape(tmp_path, kind: str, seed: int) -> None:
    """Logits, log-probabilities, and the gradients of every weight, these to a thousandth of the largest of each."""
    shape = drawn_hybrid(seed) if kind.startswith("qwen3_5") else drawn_shape(seed)
    parts: list[Any] = [100 if kind.startswith("qwen3_5") else 33]
    if kind == "qwen3_vl":
        half, parts = shape["head_dim"] // 2, drawn_parts(seed)
        section = [half - 2 * (half // 3), half // 3, half // 3]
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True, "mrope_section": section}
        shape |= {"vision": drawn_tower(seed, shape["num_hidden_layers"]), "rope_parameters": rope}
    if kind == "qwen3_5":
        tower = drawn_tower(seed, 1)
        del tower["deepstack_visual_indexes"]
        shape["vision"], parts = tower, drawn_parts(seed)
    pair = BUILD[kind](tmp_path, seed=seed, **shape)
    assert error_of_logits(pair, *parts) < TOLERANCE
    asked = question(pair.model, *parts, seed=seed)
    with torch.no_grad():
        logs = torch.log_softmax(pair.reference(**asked.reference).logits, -1)[:, :-1]
    chosen, _ = run(pair.model, logprobs, asked.inputs, Walk())
    assert worst(chosen[:, 1:], logs.gather(-1, asked.reference["input_ids"][:, 1:, None])[..., 0]) < TOLERANCE
    errors = {name: error / largest for name, (error, largest) in gradient_errors(pair, asked).items()}
    print("max relative error of gradients", max(errors.values()))
    assert max(errors.values()) < 1e-3, errors


@pytest.mark.slow
@tied_or_not
def test_logprobs_and_entropies(vl: Pair) -> None:
    temperature, asked = 0.7, question(vl.model, *QUESTIONS["mixed"], seed=1)
    with torch.no_grad():
        logs = torch.log_softmax(vl.reference(**asked.reference).logits / temperature, -1)[:, :-1]
    targets = asked.reference["input_ids"][:, 1:, None]
    chosen, entropies = run(vl.model, logprobs, asked.inputs, Walk(), temperature=temperature)
    assert worst(chosen[:, 1:], logs.gather(-1, targets)[..., 0]) < TOLERANCE
    assert worst(entropies[:, 1:], -(logs.exp() * logs).sum(-1)) < TOLERANCE
    assert np.isfinite(chosen).all()


@pytest.mark.slow
@tied_or_not
def test_gradients_of_every_weight(vl: Pair) -> None:
    """The gradients are those of the mean log-loss of a prompt with images and videos, remat included."""
    errors = gradient_errors(vl, question(vl.model, *QUESTIONS["mixed"], seed=2))
    print("max error", max(error for error, _ in errors.values()))
    assert not {name: error for name, (error, _) in errors.items() if error >= TOLERANCE}


ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn with scales": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [("linear", "vl"), ("yarn", "vl"), ("yarn", "qwen3"), ("yarn with scales", "qwen2")]
)
def test_scaled_rotary_embeddings(tmp_path, name: str, kind: str) -> None:
    """Long-context settings; each changes the logits by much more than the tolerance."""
    rope = {**ROPES[name], "rope_theta": 10000.0, **({"mrope_section": [2, 1, 1]} if kind == "vl" else {})}
    parts = QUESTIONS["mixed"] if kind == "vl" else (60,)
    pair = {**BUILD, "vl": build_vl}[kind](tmp_path, rope_parameters=rope)
    assert error_of_logits(pair, *parts) < TOLERANCE
    plain = dataclasses.replace(
        pair.model.config.text, rope=RopeConfig(mrope_section=tuple(rope.get("mrope_section", ())))
    )
    unscaled = models.merge(
        models.split(models.abstract(dataclasses.replace(pair.model.config, text=plain)))[0],
        models.split(pair.model)[1],
    )
    assert error_of_logits(dataclasses.replace(pair, model=unscaled), *parts) > 100 * TOLERANCE


# Frames larger than a window, cut windows at the edges, several frame pairs, several media.
GRIDS = ((1, 6, 10), (3, 4, 6), (1, 4, 4), (2, 10, 8))


@pytest.mark.medium
@pytest.mark.parametrize("bounded", [True, False], ids=["bound known", "bound unknown"])
def test_vision_tower(reader: Pair, bounded: bool) -> None:
    """Raster-ordered patches in, raster-ordered features out; padding at the end changes nothing."""
    vl = reader
    count = sum(int(np.prod(grid)) for grid in GRIDS)
    patches_PX = np.random.default_rng(0).normal(size=(count, 96)).astype(np.float32)
    vision, order = pack_patches(patches_PX, GRIDS, vl.model.config.vision)  # type: ignore[union-attr]
    vision = pad(vision, 512)
    if not bounded:
        vision = dataclasses.replace(vision, frame_bound=0)
    ours = jax.jit(lambda vision: vl.model.visual(Walk(), vision))(vision)  # type: ignore[union-attr]
    assert np.isfinite(ours).all()
    with torch.no_grad():
        found = vl.reference.model.visual(torch.as_tensor(patches_PX), grid_thw=torch.as_tensor(GRIDS))
    reference = torch.cat([found.pooler_output, *found.get("deepstack_features", [])], dim=-1)
    error = worst(np.asarray(ours[: count // 4])[order], reference)
    print("max error", error)
    assert reference.abs().max() > 0.3
    assert error < TOLERANCE
