"""Tiny random models of `transformers`, saved to disk and loaded by both sides, and prompts for them.

Weights are drawn so that activations stay of order 1: a tolerance of 1e-4 then means something.
"""

import dataclasses
import functools
import operator
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from media_files import parity

import models
from models.config import NameLayout, PatchLayout
from models.decoder import Decoder, logprobs
from models.hf import tensor_names
from models.inputs import PackedTokens
from models.processing import tiny
from models.processing.processor import pack_patches
from models.qwen2_5_vl.positions import rope_index
from sharding.walk import Walk

torch, transformers = parity("torch", "transformers")

TEXTS = ["abcdefghijklmnopqrstuvwxyz ?!.,:0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ\n"]
VOCAB = 160
IMAGE, VIDEO, START, END = 150, 151, 152, 153
MEDIA_IDS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
TOLERANCE = 1e-4  # absolute, float32


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same weights on both sides."""

    reference: Any
    model: Any  # the `Decoder` of that reference
    folder: pathlib.Path


def randomise(module: Any, seed: int) -> None:
    """Matrices with unit gain, scales around 1, biases around 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "embed_tokens" in name:
                parameter.copy_(noise)
            elif parameter.ndim > 1:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
            else:
                parameter.copy_(0.2 * noise + (0 if name.endswith("bias") else 1))


def trained_decays(module: Any, seed: int) -> None:
    """Gives the layers of Gated DeltaNet decays between 0.5 and 0.999 a token, as trained models have them, and norms
    that multiply by one plus their weight a weight around 0."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for part in module.modules():
            if type(part).__name__ == "Qwen3_5RMSNorm":
                part.weight.sub_(1)
            if type(part).__name__ == "Qwen3_5GatedDeltaNet":
                rates, steps = (np.exp(rng.uniform(*span, part.A_log.shape)) for span in ((0, np.log(16)), (-7, -3.5)))
                part.A_log.copy_(torch.tensor(np.log(rates)))
                part.dt_bias.copy_(torch.tensor(np.log(np.expm1(steps))))
                part.in_proj_a.weight.mul_(0.3)


def text_settings(**changes: Any) -> dict[str, Any]:
    """14 query heads over 2 KV heads: the ratio of 28 to 4."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": 112,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        **changes,
    }


def vl_config(text: dict[str, Any], **vision: Any) -> Any:
    settings = {
        "depth": 4,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_heads": 3,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1, 3],
        "out_hidden_size": text["hidden_size"],
        "tokens_per_second": 2,
        **vision,
    }
    rope = {"type": "mrope", "rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    return transformers.Qwen2_5_VLConfig(
        text_config={"rope_parameters": rope, **text},
        vision_config=settings,
        tie_word_embeddings=text["tie_word_embeddings"],
        **MEDIA_IDS,
    )


def build_vl(folder: pathlib.Path, *, tied: bool = False, dtype: Any = None, seed: int = 0, **text: Any) -> Pair:
    config = vl_config(text_settings(tie_word_embeddings=tied, **text))
    return _pair(transformers.Qwen2_5_VLForConditionalGeneration(config), folder, dtype, seed)


def build_text(folder: pathlib.Path, *, tied: bool = False, dtype: Any = None, seed: int = 0, **text: Any) -> Pair:
    config = transformers.Qwen2Config(**text_settings(tie_word_embeddings=tied, **text))
    return _pair(transformers.Qwen2ForCausalLM(config), folder, dtype, seed)


def build_qwen3(folder: pathlib.Path, *, tied: bool = False, dtype: Any = None, seed: int = 0, **text: Any) -> Pair:
    config = transformers.Qwen3Config(**text_settings(tie_word_embeddings=tied, **{"head_dim": 12, **text}))
    return _pair(transformers.Qwen3ForCausalLM(config), folder, dtype, seed)


def qwen3_vl_config(text: dict[str, Any], **vision: Any) -> Any:
    settings = {
        "depth": 5,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_heads": 3,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 49,
        "deepstack_visual_indexes": [0, 3],
        "out_hidden_size": text["hidden_size"],
        **vision,
    }
    rope = {"rope_type": "default", "mrope_section": [3, 2, 1], "mrope_interleaved": True, "rope_theta": 10000.0}
    return transformers.Qwen3VLConfig(
        text_config={"rope_parameters": rope, "head_dim": 12, **text},
        vision_config=settings,
        tie_word_embeddings=text["tie_word_embeddings"],
        **MEDIA_IDS,
    )


def build_qwen3_vl(
    folder: pathlib.Path, *, tied: bool = False, dtype: Any = None, seed: int = 0, vision: Any = None, **text: Any
) -> Pair:
    config = qwen3_vl_config(text_settings(tie_word_embeddings=tied, **text), **(vision or {}))
    return _pair(transformers.Qwen3VLForConditionalGeneration(config), folder, dtype, seed)


def qwen3_5_settings(**text: Any) -> dict[str, Any]:
    """Two value heads a key head; five layers, the fourth with attention.

    Heads of so few numbers now and then read almost nothing of a state. Their norm divides by what they read: with an
    epsilon of 1e-6, float32 errors there are up to 2e-4 on both sides, compared with float64.
    """
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    return {
        "rope_parameters": {**rope, "partial_rotary_factor": 0.5},
        "rms_norm_eps": 1e-3,
        "head_dim": 16,
        "num_hidden_layers": 5,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 10,
        **text,
    }


def qwen3_5_config(text: dict[str, Any], **vision: Any) -> Any:
    settings = {
        "depth": 3,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_heads": 3,
        "patch_size": 4,
        "num_position_embeddings": 49,
        "out_hidden_size": text["hidden_size"],
        **vision,
    }
    return transformers.Qwen3_5Config(
        text_config=text,
        vision_config=settings,
        tie_word_embeddings=text["tie_word_embeddings"],
        **MEDIA_IDS,
    )


def build_qwen3_5(
    folder: pathlib.Path, *, tied: bool = False, dtype: Any = None, seed: int = 0, vision: Any = None, **text: Any
) -> Pair:
    settings = text_settings(tie_word_embeddings=tied, **qwen3_5_settings(**text))
    config = qwen3_5_config(settings, **(vision or {}))
    return _pair(transformers.Qwen3_5ForConditionalGeneration(config), folder, dtype, seed)


def build_qwen3_5_text(
    folder: pathlib.Path, *, tied: bool = False, dtype: Any = None, seed: int = 0, **text: Any
) -> Pair:
    config = transformers.Qwen3_5TextConfig(**text_settings(tie_word_embeddings=tied, **qwen3_5_settings(**text)))
    return _pair(transformers.Qwen3_5ForCausalLM(config), folder, dtype, seed)


BUILD = {
    "qwen2": build_text,
    "qwen3": build_qwen3,
    "qwen2_5_vl": build_vl,
    "qwen3_vl": build_qwen3_vl,
    "qwen3_5": build_qwen3_5,
    "qwen3_5_text": build_qwen3_5_text,
}


def _pair(reference: Any, folder: pathlib.Path, dtype: Any, seed: int) -> Pair:
    randomise(reference, seed)
    trained_decays(reference, seed)
    reference = reference.to(dtype or torch.float32).eval()
    reference.save_pretrained(folder)
    return Pair(reference, models.load(folder), folder)


def checkpoint(kind: str, folder: pathlib.Path) -> Pair:
    """A checkpoint with both sides' files, tokenizer included, whose special ids are the tokenizer's."""
    configs = {"qwen2_5_vl": vl_config, "qwen3_vl": qwen3_vl_config, "qwen3_5": qwen3_5_config}
    if kind not in configs:
        pair, media = BUILD[kind](folder, seed=5, vocab_size=90), {}
    else:
        own = qwen3_5_settings() if kind == "qwen3_5" else {}
        config = configs[kind](text_settings(vocab_size=90, **own))
        config.vision_start_token_id, config.vision_end_token_id = 3, 4
        config.image_token_id, config.video_token_id = 6, 7
        pair = _pair(transformers.AutoModelForImageTextToText.from_config(config), folder, None, 3)
        media = {"layout": PatchLayout.of(pair.model.config.vision), "max_pixels": 32 * 32}  # type: ignore[union-attr]
    tiny.build(TEXTS, ["left", "right"], **media).save(folder)
    return pair


def to_numpy(value: Any) -> np.ndarray:
    return value.detach().to(torch.float32).numpy()


def worst(ours: Any, reference: Any) -> float:
    """The largest absolute difference; shapes must agree."""
    ours, reference = np.asarray(ours), to_numpy(reference)
    assert ours.shape == reference.shape
    return float(np.abs(ours - reference).max())


@dataclasses.dataclass(frozen=True)
class Question:
    """One prompt for both sides: `reference` are keyword arguments of the torch model."""

    inputs: PackedTokens
    reference: dict[str, Any]


def question(model: Decoder, *parts: Any, seed: int = 0) -> Question:
    """A prompt of `parts`: a number of text tokens, ("image", (1, rows, columns)) or ("video", grid, seconds)."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    media = []
    for part in parts:
        if isinstance(part, int):
            tokens += rng.integers(0, 140, part).tolist()
            continue
        kind, grid, *_ = part
        frame = [START, *[IMAGE if kind == "image" else VIDEO] * (grid[1] * grid[2] // 4), END]
        if kind == "video" and model.config.vision.timed:  # type: ignore[union-attr]
            for _ in range(grid[0]):
                tokens += [*rng.integers(0, 140, 3).tolist(), *frame]
        else:
            tokens += [START, *frame[1:-1] * grid[0], END]
        media.append(part)
    ids = np.asarray(tokens, np.int32)
    reference: dict[str, Any] = {"input_ids": torch.as_tensor(ids[None]).long()}
    T = len(ids)
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), (3, T))
    feature_index, vision = np.full(T, -1, np.int32), None
    if media:
        config = model.config.vision
        assert config is not None
        patches = [rng.normal(size=(int(np.prod(grid)), config.patch_values)) for _, grid, *_ in media]
        patches = [pixels.astype(np.float32) for pixels in patches]
        vision, order = pack_patches(np.concatenate(patches), [part[1] for part in media], config)
        feature_index[(ids == IMAGE) | (ids == VIDEO)] = order
        grids = {kind: [part[1] for part in media if part[0] == kind] for kind in ("image", "video")}
        seconds = [part[2] for part in media if part[0] == "video"]
        frames = [(1, rows, columns) for pairs, rows, columns in grids["video"] for _ in range(pairs)]
        positions, _ = rope_index(
            ids,
            grids["image"],
            frames if config.timed else grids["video"],
            [0.0] * len(frames) if config.timed else seconds,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            spatial_merge_size=config.spatial_merge_size,
            tokens_per_second=config.tokens_per_second,
        )
        # given, since transformers 5.3 and later counts otherwise behind a video: see models/qwen2_5_vl/positions.py
        if not config.timed:
            reference["position_ids"] = torch.as_tensor(positions[:, None]).long()
        kinds = (ids == IMAGE).astype(np.int32) + 2 * (ids == VIDEO)
        reference["mm_token_type_ids"] = torch.as_tensor(kinds[None])
        for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            if grids[kind]:
                pixels = [rows for rows, part in zip(patches, media, strict=True) if part[0] == kind]
                reference[name] = torch.as_tensor(np.concatenate(pixels))
                reference[f"{kind}_grid_thw"] = torch.as_tensor(grids[kind])
        if seconds and not config.timed:
            reference["second_per_grid_ts"] = torch.as_tensor(seconds)
    inputs = PackedTokens(
        tokens_BT=ids[None],
        segments_BT=np.ones((1, T), np.int32),
        branches_BT=np.zeros((1, T), np.int32),
        positions_3BT=positions[:, None],
        predecessor_BT=np.maximum(np.arange(T, dtype=np.int32) - 1, 0)[None],
        feature_index_BT=feature_index[None],
        vision=vision,
    )
    return Question(inputs if model.config.text.delta is None else inputs.with_runs(), reference)


def gradient_errors(pair: Pair, asked: Question) -> dict[str, tuple[float, float]]:
    """(largest error, largest magnitude) of the gradient of each weight, of the mean log-loss of a prompt. Ours are
    computed with rematerialisation."""
    pair.reference.zero_grad()
    output = pair.reference(**asked.reference).logits[:, :-1]
    targets = asked.reference["input_ids"][:, 1:]
    torch.nn.functional.cross_entropy(output[0], targets[0]).backward()
    wanted = {name: parameter.grad for name, parameter in pair.reference.state_dict(keep_vars=True).items()}

    graphdef, params = models.split(pair.model)

    @jax.jit
    def gradient(params):
        def loss(params):
            chosen, _ = logprobs(models.merge(graphdef, params), asked.inputs, Walk(remat="layer"))
            return -jnp.mean(chosen[:, 1:])

        return jax.grad(loss)(params)

    found, errors = gradient(params), {}
    config = pair.model.config
    if config.vision:  # in memory the reference always has the nested names
        config = dataclasses.replace(config, names=NameLayout.NESTED)
    for entry in tensor_names(config):
        ours = functools.reduce(operator.getitem, entry.path, found)
        for layer, name in enumerate(entry.full_names):
            expected = wanted[name].numpy()
            assert np.abs(expected).max() > 1e-6, f"{name} has no gradient: the comparison is empty"
            actual = entry.to_disk(np.asarray(ours[layer] if entry.stacked else ours))
            errors[name] = float(np.abs(actual - expected).max()), float(np.abs(expected).max())
    assert len(errors) == len(list(pair.reference.parameters()))
    return errors


QUESTIONS: dict[str, tuple[Any, ...]] = {
    "text": (17,),
    "image": (5, ("image", (1, 6, 10)), 7),
    "video": (3, ("video", (4, 6, 4), 1.5), 6),
    "mixed": (
        4,
        ("image", (1, 4, 4)),
        3,
        ("video", (2, 8, 6), 0.5),
        ("image", (1, 10, 6)),
        2,
        ("video", (3, 4, 4), 2.0),
        5,
    ),
}
