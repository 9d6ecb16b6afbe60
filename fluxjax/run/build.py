"""Builds and exports the model and the processor of a run, from a checkpoint folder or the sizes of a tiny model."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import pathlib
import shutil
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import jax.numpy as jnp
from jax.sharding import Mesh

import models
from models.config import (
    DecoderConfig,
    DeepVisionConfig,
    ModelConfigError,
    PatchLayout,
    RopeConfig,
    TextConfig,
    VisionConfig,
)
from models.decoder import Decoder, parameter_count, shapes_only
from models.folder import read_json, why_missing, write_json
from models.processing import Processor
from models.processing.settings import DecodeLimits
from models.processing.tiny import SPECIAL_TOKENS
from models.processing.tiny import build as build_processor
from models.registry import ARCHITECTURES, write_config
from rollout.engine import SamplingParams
from sharding.kernels.delta_heads import DeltaHeads
from sharding.links import Links
from sharding.mesh import MeshError, make_mesh
from sharding.weights import shardings

from ..algorithms import find_algorithm
from ..base.process import LARGE_MODEL, give_back_large_blocks
from ..base.timeline import Span, activity
from ..batch.composer import Composer, Team
from ..config import Config, ConfigError, ModelConfig
from ..config.bounds import as_config_error
from ..data.loader import PromptLoader
from ..data.prepare import Preparer
from ..data.sources import Source, all_texts, common_words
from ..hosts.orders import UNKNOWN_PLACE
from ..learner.gradients import TokenLoss
from ..learner.learner import Learner, lora_of

if TYPE_CHECKING:
    from models.shadow import Fetch

    from ..base.statuses import PreprocessorStatus
    from ..data.materializer import Materializer
    from ..data.shadows import ProxyMedia
    from .pixels import Pixels
    from .play import Play

log = logging.getLogger(__name__)
AnyPixels: TypeAlias = "NoPixels | Pixels"
POSITION_GRID = 4  # rows and columns of a tiny tower's learned positions; its pictures have few patches


@dataclasses.dataclass(frozen=True)
class Learning:
    """The objects that train on the devices of all processes of the run."""

    model: Decoder  # abstract: the learner has its weights
    learner: Learner
    composer: Composer


def build_learning(
    config: Config,
    sizes: DecoderConfig,
    processor: Processor,
    *,
    token_loss: TokenLoss | None = None,
    links: Links | None = None,
    materializer: Materializer | None = None,
) -> Learning:
    """Returns the learner, with the weights that `config` names, and the composer. `token_loss` replaces the loss of
    the configured algorithm. `links` connect to the other processes. `materializer` fetches pixels that a media store
    holds. Raises `ConfigError`."""
    mesh = run_mesh(config)
    model = build_weights(config, sizes, mesh)
    loss, never = token_loss or find_algorithm(config.algorithm).token_loss, processor.media_token_ids
    learner = Learner(config, model, loss, mesh=mesh, never_sampled=never, links=links, materializer=materializer)
    if (lora := lora_of(config)) is not None and config.lora.adapter:
        with as_config_error("lora.adapter", ValueError, OSError):
            learner.adopt(models.load_adapters(sizes, config.lora.adapter, lora))
    composer = Composer(config, mesh.size, sizes.vision, learner.text)
    composer.check()
    return Learning(shapes_only(model), learner, composer)


def run_mesh(config: Config) -> Mesh:
    """Returns the mesh of the devices that train. Raises `ConfigError` if there are too few devices."""
    with as_config_error("sharding.devices", MeshError):
        return make_mesh(config.sharding.devices)


def build_model(config: Config, sources: Mapping[str, Source], mesh: Mesh | None = None) -> tuple[Decoder, Processor]:
    """Returns the model with its weights, and the processor. Raises what `describe_model` and `build_weights` raise."""
    sizes, processor = describe_model(config, sources)
    return build_weights(config, sizes, mesh), processor


def build_weights(config: Config, sizes: DecoderConfig, mesh: Mesh | None = None) -> Decoder:
    """Returns the model with float32 master weights. Weights are read or sampled one by one, and go to the devices of
    `mesh` (None: to one device). For a large model, this process returns freed memory to the system from now on. Raises
    `ConfigError` for an unreadable checkpoint."""
    if 4 * parameter_count(models.abstract(sizes)) >= LARGE_MODEL:
        give_back_large_blocks()
    places = None if mesh is None else functools.partial(shardings, mesh=mesh)
    if not config.model.path:
        return models.create(sizes, config.seed, places)
    share = [0.0]
    told = activity(lambda: f"loading weights {100 * share[-1]:.0f} %")
    with as_config_error("model.path", ValueError, OSError), told:
        return models.load(config.model.path, dtype=jnp.float32, shardings=places, progress=share.append)


def check_reference(config: Config) -> None:
    """Raises `ConfigError` if the configuration names a reference that is not a checkpoint folder."""
    path = config.algorithm.reference if config.algorithm.kl_coefficient else ""
    if path and (why := why_missing(pathlib.Path(path))):
        raise ConfigError(f"algorithm.reference: {why}")


def describe_model(config: Config, sources: Mapping[str, Source]) -> tuple[DecoderConfig, Processor]:
    """Returns the sizes of the model, and the processor, without reading weights. A tiny model's tokenizer is built
    from the texts of the training `sources`. Raises `ConfigError` for unusable folders and sizes."""
    data = config.data
    if config.model.path:
        path = pathlib.Path(config.model.path)
        if why := why_missing(path):
            raise ConfigError(f"model.path: {why}")
        if not (path / "config.json").is_file():
            raise ConfigError(f"model.path: {path} is not a Hugging Face checkpoint folder (it has no config.json)")
        with as_config_error("model.path", ValueError, OSError):
            processor = Processor.load(path).configured(
                max_pixels=data.max_pixels, num_frames=data.video_frames, limits=DecodeLimits()
            )
        if not processor.eos_ids:
            raise ConfigError(f"model.path: {path} names no end token (generation_config.json, eos_token_id)")
        if data.chat_template and not processor.chat_template:
            raise ConfigError(f"data.chat_template: {path} has no chat template, or several and no default")
        from ..sizing.model_sizes import model_sizes

        return model_sizes(config), processor
    with as_config_error("model.tiny", ModelConfigError):
        vision = tiny_vision(config.model)
        times = ["seconds"] if vision and vision.timed else []
        processor = build_processor(
            itertools.chain(all_texts(sources.values()), [string.printable] * config.data.has_environments),
            words=[*common_words(sources.values()), *times],
            layout=PatchLayout.of(vision) if vision else None,
            num_frames=data.video_frames,
            **({"max_pixels": data.max_pixels} if data.max_pixels else {}),
        ).configured(limits=DecodeLimits())
        sizes = tiny_model(config.model, processor, vision)
        return sizes, dataclasses.replace(processor, architecture=sizes.architecture)


def export(model: Decoder, processor: Processor, folder: pathlib.Path) -> None:
    """Writes model and processor as a Hugging Face folder."""
    models.save(model, folder)
    processor.save(folder)


def export_adapters(config: Config, model: Decoder, learner: Learner, folder: pathlib.Path, gang: Team) -> None:
    """Writes the LoRA adapters, if the model has any, in the format of PEFT."""
    lora = lora_of(config)
    if lora is not None:
        adapters = gang.whole(lambda: learner.trained(learner.params), learner.mesh, adapters=True)
        models.save_adapters(model.config, adapters, folder, lora, config.model.path)


def server_checkpoint(config: Config, run_dir: pathlib.Path, model: Decoder, processor: Processor) -> pathlib.Path:
    """Returns a folder that rollout servers can start from. Its weights do not matter, because servers get the run's
    weights before they generate. Without `model.path`, the folder is an export of the model. With `model.path`, the
    folder is `model.path` if `write_config` gives the same config.json. Otherwise the folder has the new config.json,
    and links to all other files."""
    folder, content = run_dir / "servers" / "model", write_config(model.config)
    if not config.model.path:
        export(model, processor, folder)
        return folder
    path = pathlib.Path(config.model.path)
    if content == read_json(path / "config.json", needed=True):
        return path
    shutil.rmtree(folder, ignore_errors=True)  # an earlier start of the run may have left the folder
    folder.mkdir(parents=True)
    for file in path.resolve().iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    write_json(folder / "config.json", content)
    return folder


def sampling_params(config: Config, processor: Processor) -> SamplingParams:
    """Returns the sampling settings of `config.rollout`. Responses end at an end token or at the limit, and have no
    media token. Top-p and top-k are off, because log-probs of engine and trainer are under the full distribution."""
    rollout, never = config.rollout, processor.media_token_ids
    most, temperature = rollout.max_new_tokens, rollout.fixed_temperature
    return SamplingParams(most, temperature, stop_ids=processor.eos_ids, forbidden_ids=never)


def tiny_vision(model: ModelConfig) -> VisionConfig | None:
    """Returns the vision tower of a tiny model, or None for an architecture without a tower. Raises ModelConfigError
    for an unknown architecture, and for impossible sizes of a tower."""
    tiny = cast(Mapping[str, Any], model.tiny)
    if (architecture := tiny["architecture"]) not in ARCHITECTURES:
        raise ModelConfigError(f"architecture {architecture!r} is not among {', '.join(ARCHITECTURES)}")
    if ARCHITECTURES[architecture].rope_index is None:
        return None
    sizes = {name.removeprefix("vision_"): size for name, size in tiny.items() if name.startswith("vision_")}
    full = sizes.pop("full_attention_layers")
    sizes |= {name: tiny[name] for name in ("patch_size", "initializer_range")}
    sizes["out_hidden_size"] = tiny["hidden_size"]
    if architecture in ("qwen3_vl", "qwen3_5"):
        before_last = tuple(range(sizes["depth"] - 1)) if architecture == "qwen3_vl" else ()
        return DeepVisionConfig(position_grid=POSITION_GRID, deepstack_layers=before_last, **sizes)
    return VisionConfig(window_size=tiny["window_size"], full_attention_layers=full, **sizes)


def tiny_model(model: ModelConfig, processor: Processor, vision: VisionConfig | None) -> DecoderConfig:
    """Returns the configuration of a tiny model. Raises ModelConfigError for impossible sizes."""
    tiny = cast(Mapping[str, Any], model.tiny)
    architecture = tiny["architecture"]
    qwen3 = architecture.startswith("qwen3")
    hybrid = architecture.startswith("qwen3_5")  # has three position axes even without a tower
    section = tiny["mrope_section"] if vision or hybrid else ()
    text = TextConfig(
        vocab_size=processor.tokenizer.get_vocab_size(),
        head_dim=tiny["hidden_size"] // tiny["num_heads"],
        qkv_bias=not qwen3,
        head_norm=qwen3,
        rope=RopeConfig(tiny["rope_theta"], section, interleaved=qwen3 and bool(section)),
        **{name: size for name, size in tiny.items() if name in TextConfig.__dataclass_fields__},
        **(tiny_states(tiny) if hybrid else {}),
    )
    if vision is None:
        return DecoderConfig(architecture, text)
    ids = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    return DecoderConfig(
        architecture,
        text,
        vision,
        names=ARCHITECTURES[architecture].published,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


def tiny_states(tiny: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `TextConfig` that only a tiny Qwen3.5 sets. As in published models, a quarter of each head
    is rotated. Every second layer has attention, not every fourth as in published models: four tiny layers would
    otherwise be a single period, which takes minutes to compile, because no layer repeats."""
    size = tiny["hidden_size"] // tiny["num_heads"]
    return {
        "delta": DeltaHeads(tiny["num_kv_heads"], tiny["num_heads"], size, size),
        "attention_interval": min(2, tiny["num_layers"]),
        "rotated": 0.25,
        "output_gate": True,
        "zero_centred_norms": True,
    }


def training_prompts(config: Config, sources: Mapping[str, Source], processor: Processor, **preparing: Any) -> Preparer:
    """Returns the prompts of RL, in the order of their draws. `preparing` has further arguments of `Preparer`."""
    weights = {name: config.data.sources[name].weight for name in sources}
    return Preparer(processor, PromptLoader(sources, weights, config.seed), config, **preparing)


def open_play(
    config: Config,
    processor: Processor,
    proxy: ProxyMedia | None,
    folder: pathlib.Path | None,
    note: Callable[[str, str], None] = lambda environment, text: log.warning("environment %s: %s", environment, text),
) -> Play | None:
    """Returns the environments of a run, if any source has one. Parameters and errors are those of `Play`."""
    if not config.data.has_environments:
        return None
    from .play import Play

    return Play(config, processor, proxy, folder, note)


def preparing(pixels: AnyPixels, play: Play | None) -> dict[str, Any]:
    """Returns further arguments of `Preparer`."""
    return {"proxy": pixels.proxy} | ({} if play is None else {"opened": play.opened})


class NoPixels:
    """The `Pixels` of a run whose model reads only text. Nothing is stored or fetched."""

    proxy: ProxyMedia | None = None  # prepares prompts without pixels; None: there are no media
    fetch: Fetch | None = None  # returns the pixels of tickets; None: there are no media
    materializer: Materializer | None = None

    def place_of(self, ticket: str) -> str:
        return UNKNOWN_PLACE

    def hear(self, media: Iterable[tuple[str, str]]) -> None: ...
    def begin(self) -> None: ...
    def begin_steps(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}

    def preprocessors(self) -> list[PreprocessorStatus]:
        return []

    def lanes(self, spans: Sequence[Span]) -> list[Span]:
        return []

    def draw(self, file: pathlib.Path) -> None: ...
    def close(self) -> None: ...
