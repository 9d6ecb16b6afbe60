"""Builds the model and the processor that the configuration names: those of a checkpoint folder, or tiny ones."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import models
from models.config import (
    AnyConfig,
    ModelConfigError,
    PatchLayout,
    Qwen2Config,
    Qwen25VLConfig,
    RopeConfig,
    TextConfig,
    VisionConfig,
)
from models.decoder import Decoder, parameter_count, shapes_only
from models.folder import why_missing
from models.processing import Processor
from models.processing.settings import DecodeLimits
from models.processing.tiny import SPECIAL_TOKENS
from models.processing.tiny import build as build_processor
from rollout.engine import SamplingParams
from sharding.links import Links
from sharding.mesh import MeshError, make_mesh
from sharding.weights import shardings

from ..algorithms import find_algorithm
from ..base.process import LARGE_MODEL, activity, give_back_large_blocks
from ..batch.composer import Composer
from ..config import Config, ConfigError, ModelConfig
from ..data.loader import PromptLoader
from ..data.prepare import Preparer
from ..data.sources import Source, all_texts, common_words
from ..hosts.gang import Gang
from ..learner.gradients import TokenLoss
from ..learner.learner import Learner, lora_of
from .memory_check import settled_remat
from .no_pixels import NoPixels

if TYPE_CHECKING:
    from ..data.materializer import Materializer
    from ..data.shadows import ProxyMedia
    from ..learner.critic import Critic


@dataclasses.dataclass(frozen=True)
class Learning:
    """The objects that train, on the devices of all processes of the run."""

    model: Decoder  # abstract: its weights are the learner's, and go with the first step
    learner: Learner
    composer: Composer

    @property
    def largest(self) -> int:
        """The bytes of the largest weight."""
        return max(array.nbytes for array in jax.tree.leaves(self.learner.params))


def build_learning(
    config: Config,
    sizes: AnyConfig,
    processor: Processor,
    *,
    token_loss: TokenLoss | None = None,
    note: Callable[[str], None] | None = None,
    links: Links | None = None,
    materializer: Materializer | None = None,
) -> Learning:
    """Returns the learner, with the weights that `config` names, and the composer of its batches. `token_loss` replaces
    that of the configured algorithm; `links` are those to other processes; `materializer` fetches pixels that are
    elsewhere. If `note` is given, the function checks that training fits into the devices, tells `note` how that goes,
    and settles `config.sharding.remat`. Raises `ConfigError`."""
    try:
        mesh = make_mesh(config.sharding.devices)
    except MeshError as error:
        raise ConfigError(f"sharding.devices: {error}") from error
    never_sampled = processor.media_token_ids
    if note is not None:
        config.sharding.remat = settled_remat(config, sizes, mesh, never_sampled, note)
    model = build_weights(config, sizes, mesh)
    token_loss = token_loss or find_algorithm(config.algorithm).token_loss
    learner = Learner(
        config, model, token_loss, mesh=mesh, never_sampled=never_sampled, links=links, materializer=materializer
    )
    if (lora := lora_of(config)) is not None and config.lora.adapter:
        try:
            learner.adopt(models.load_adapters(sizes, config.lora.adapter, lora))
        except (ValueError, OSError) as error:
            raise ConfigError(f"lora.adapter: {error}") from error
    vision = sizes.vision if isinstance(sizes, Qwen25VLConfig) else None
    composer = Composer(config, mesh.size, vision, learner.text)
    composer.check()
    return Learning(shapes_only(model), learner, composer)


def build_critic(config: Config, learning: Learning, links: Links | None, materializer: Materializer | None) -> Critic:
    """Returns the critic of an algorithm that has one, on the learner's mesh; it has no weights until RL begins."""
    from ..learner.critic import Critic

    return Critic(config, learning.model, mesh=learning.learner.mesh, links=links, materializer=materializer)


def build_model(config: Config, sources: Mapping[str, Source], mesh: Mesh | None = None) -> tuple[Decoder, Processor]:
    """Returns the model with its weights, and its processor. Raises what `describe_model` and `build_weights` do."""
    sizes, processor = describe_model(config, sources)
    return build_weights(config, sizes, mesh), processor


def build_weights(config: Config, sizes: AnyConfig, mesh: Mesh | None = None) -> Decoder:
    """Returns the model, with float32 master weights. They are read or drawn one by one and go straight to where
    training on `mesh` wants them (None: to one device). To leave room for a large model, this process gives freed
    memory back to the system from now on. Raises `ConfigError` for a checkpoint that can't be read."""
    if 4 * parameter_count(models.abstract(sizes)) >= LARGE_MODEL:
        give_back_large_blocks()
    places = None if mesh is None else functools.partial(shardings, mesh=mesh)
    if not config.model.path:
        return models.create(sizes, config.seed, places)
    share = [0.0]
    try:
        with activity(lambda: f"loading weights {100 * share[-1]:.0f} %"):
            return models.load(config.model.path, dtype=jnp.float32, shardings=places, progress=share.append)
    except (ValueError, OSError) as error:
        raise ConfigError(f"model.path: {error}") from error


def check_reference(config: Config) -> None:
    """Raises `ConfigError` if the configuration names a reference that is not a checkpoint folder."""
    path = config.algorithm.reference if config.algorithm.kl_coefficient else ""
    if path and (why := why_missing(pathlib.Path(path))):
        raise ConfigError(f"algorithm.reference: {why}")


def describe_model(config: Config, sources: Mapping[str, Source]) -> tuple[AnyConfig, Processor]:
    """Returns the sizes of the model, and its processor; reads no weights.

    The tokenizer of a tiny model is built from the prompts and answers of the training `sources`. Raises `ConfigError`
    if `model.path` is not a checkpoint folder that can be read.
    """
    data = config.data
    if config.model.path:
        path = pathlib.Path(config.model.path)
        if why := why_missing(path):
            raise ConfigError(f"model.path: {why}")
        if not (path / "config.json").is_file():
            raise ConfigError(f"model.path: {path} is not a Hugging Face checkpoint folder (it has no config.json)")
        try:
            processor = Processor.load(path).configured(
                min_pixels=data.min_pixels,
                max_pixels=data.max_pixels,
                num_frames=data.video_frames,
                limits=DecodeLimits(),
            )
        except (ValueError, OSError) as error:
            raise ConfigError(f"model.path: {error}") from error
        if not processor.eos_ids:
            raise ConfigError(f"model.path: {path} names no end token (generation_config.json, eos_token_id)")
        if data.chat_template and not processor.chat_template:
            raise ConfigError(f"data.chat_template: {path} has no chat template, or none that is the default one")
        from ..sizing.model_sizes import model_sizes

        return model_sizes(config), processor
    try:
        vision = tiny_vision(config.model) if config.model.tiny["vision"] else None
        processor = build_processor(
            all_texts(sources.values()),
            words=common_words(sources.values()),
            layout=PatchLayout.of(vision) if vision else None,
            num_frames=data.video_frames or 4,
            **{
                key: value for key, value in (("min_pixels", data.min_pixels), ("max_pixels", data.max_pixels)) if value
            },
        ).configured(limits=DecodeLimits())
        return tiny_model(config.model, processor, vision), processor
    except ModelConfigError as error:
        raise ConfigError(f"model.tiny: {error}") from error


def sampling_params(config: Config, processor: Processor) -> SamplingParams:
    """Returns the settings with which responses are sampled: those of `config.rollout`, up to an end token, never a
    media token."""
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.fixed_temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_ids=processor.eos_ids,
        forbidden_ids=processor.media_token_ids,
    )


def tiny_vision(model: ModelConfig) -> VisionConfig:
    """Returns the tower of a tiny model. Raises ModelConfigError for sizes that no tower has."""
    tiny = cast(Mapping[str, Any], model.tiny)
    return VisionConfig(
        hidden_size=tiny["vision_hidden_size"],
        intermediate_size=tiny["vision_intermediate_size"],
        depth=tiny["vision_depth"],
        num_heads=tiny["vision_num_heads"],
        out_hidden_size=tiny["hidden_size"],
        full_attention_layers=tiny["vision_full_attention_layers"],
        patch_size=tiny["patch_size"],
        window_size=tiny["window_size"],
        initializer_range=tiny["initializer_range"],
    )


def tiny_model(model: ModelConfig, processor: Processor, vision: VisionConfig | None) -> Qwen2Config | Qwen25VLConfig:
    """Returns the architecture of a tiny model with the sizes that the configuration gives. Raises ModelConfigError for
    sizes that no model has."""
    tiny = cast(Mapping[str, Any], model.tiny)
    text = TextConfig(
        vocab_size=processor.tokenizer.get_vocab_size(),
        hidden_size=tiny["hidden_size"],
        intermediate_size=tiny["intermediate_size"],
        num_layers=tiny["num_layers"],
        num_heads=tiny["num_heads"],
        num_kv_heads=tiny["num_kv_heads"],
        head_dim=tiny["hidden_size"] // tiny["num_heads"],
        rope=RopeConfig(theta=tiny["rope_theta"], mrope_section=tiny["mrope_section"] if vision else ()),
        tie_word_embeddings=tiny["tie_word_embeddings"],
        initializer_range=tiny["initializer_range"],
    )
    if vision is None:
        return Qwen2Config(text=text)
    ids = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    return Qwen25VLConfig(
        text=text,
        vision=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


def training_prompts(
    config: Config, sources: Mapping[str, Source], processor: Processor, proxy: ProxyMedia | None = None
) -> Preparer:
    """Returns the prompts of RL, in the order of their draws; `proxy` is that of `Preparer`."""
    weights = {name: config.data.sources[name].weight for name in sources}
    return Preparer(processor, PromptLoader(sources, weights, config.seed), config, proxy=proxy)


def open_pixels(
    config: Config,
    processor: Processor,
    gang: Gang,
    run_dir: pathlib.Path,
    token: str,
    note: Callable[[float, float, int], None] = lambda start, end, bytes: None,
) -> NoPixels:
    """Returns the pixels of this process. The parameters, and what is raised, are those of `Pixels`."""
    if not processor.vision:
        return NoPixels()
    from .pixels import Pixels

    return Pixels(config, processor, gang, run_dir, token, note)
