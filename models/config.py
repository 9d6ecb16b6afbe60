"""The architectures as frozen dataclasses, read from and written to Hugging Face `config.json` dictionaries.

Every setting that changes a forward pass is a typed field here. Reading a setting that this code cannot honour raises
ModelConfigError. Fields that only matter to other programs are kept in `extra` and written back.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from sharding.kernels.delta_heads import DeltaHeads

if TYPE_CHECKING:
    import numpy as np

JsonObject: TypeAlias = Mapping[str, Any]  # the content of a JSON file, before its fields are read into types
Grid: TypeAlias = tuple[int, int, int]  # the size of a medium: frame pairs, patch rows, patch columns


class ModelConfigError(ValueError):
    """A `config.json` asks for something that is not supported. The message names the field and what is supported."""


class NameLayout(enum.Enum):
    """Two ways to name the weights of tower and decoder on disk."""

    FLAT = "flat"  # `visual.*`, `model.*`
    NESTED = "nested"  # `model.visual.*`, `model.language_model.*`


def _check_numbers(section: Any) -> None:
    """Raises ModelConfigError, naming the field, for a number of a wrong type or outside its range."""
    for field in dataclasses.fields(section):
        value, whole = getattr(section, field.name), field.type == "int"
        least = int(whole and not field.name.endswith("_id") and field.name != "window_size")
        right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if field.type in ("int", "float") and not (right and least <= value < (1 << 31 if whole else float("inf"))):
            raise ModelConfigError(f"{field.name}={str(value)[:50]!r} is no {field.type} of at least {least}")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `mrope_section` counts the frequencies of each position axis (time, height, width), and sums to
    half of the rotated size. An empty `mrope_section` means one position axis. `linear` and `yarn` read `factor`. Only
    `yarn` reads the fields from `original_max_positions` to `truncate`."""

    theta: float = 10000.0
    mrope_section: tuple[int, ...] = ()
    kind: str = "default"  # default, linear, yarn
    factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: computed from `factor`, `mscale` and `mscale_all_dim`
    mscale: float = 0.0  # 0: not in the file
    mscale_all_dim: float = 0.0
    truncate: bool = True  # rounds the ends of the range of interpolated frequencies to whole indices
    interleaved: bool = False  # frequencies are dealt to the position axes in turn, not in blocks


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """The decoder: grouped-query attention, SwiGLU, RMS norms. Qwen2 has biases on q, k, v; Qwen3 has head norms. With
    `delta` (Qwen3.5), only every `attention_interval`-th layer has attention, all others are Gated DeltaNet."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = True
    o_bias: bool = False
    head_norm: bool = False  # an RMS norm of each query head and each key head, before the rotary embedding
    output_gate: bool = False  # each head of q has a second half, whose sigmoid multiplies the head's output
    rotated: float = 1.0  # share of a head's numbers, from the first on, that the rotary embedding rotates
    zero_centred_norms: bool = False  # RMS norms multiply by one plus their scale
    delta: DeltaHeads | None = None
    attention_interval: int = 1
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.num_heads % self.num_kv_heads:
            raise ModelConfigError(
                f"num_attention_heads={self.num_heads} must be a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        size = self.rotary_dim
        if size % 2 or not size:
            share = "" if self.rotated == 1 else f" * partial_rotary_factor={self.rotated}"
            raise ModelConfigError(f"head_dim={self.head_dim}{share} must be even for rotary embeddings")
        section = self.rope.mrope_section
        if section and sum(section) != size // 2:
            half = "head_dim / 2" if size == self.head_dim else "head_dim * partial_rotary_factor / 2"
            raise ModelConfigError(f"mrope_section={list(section)} must sum to {half} = {size // 2}")
        if (self.attention_interval > 1) != (self.delta is not None):
            raise ModelConfigError("delta and attention_interval go together: give both, or neither")
        if self.num_layers < self.attention_interval:
            raise ModelConfigError(
                f"num_hidden_layers={self.num_layers} must be at least full_attention_interval="
                f"{self.attention_interval}: a model without full attention is not supported"
            )

    @property
    def rotary_dim(self) -> int:
        """The size of the part of a head that the rotary embedding rotates."""
        return int(self.head_dim * self.rotated)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The indices of the layers with attention."""
        return tuple(range(self.attention_interval - 1, self.num_layers, self.attention_interval))

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """The indices of the layers with Gated DeltaNet."""
        return tuple(sorted(set(range(self.num_layers)) - set(self.attention_layers)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchLayout:
    """The sizes of patches, merge blocks and windows, which preprocessing needs."""

    patch_size: int = 14  # pixels
    temporal_patch_size: int = 2  # frames
    spatial_merge_size: int = 2  # patches along a side of a merge block
    window_size: int = 112  # pixels; 0: no windows
    tokens_per_second: float | int = 4  # ticks of the rotary time axis in a second

    @classmethod
    def of(cls, vision: VisionConfig) -> PatchLayout:
        return cls(**{field.name: getattr(vision, field.name) for field in dataclasses.fields(cls)})

    @property
    def timed(self) -> bool:
        """Says whether the text has the time before each frame pair of a video, as for Qwen3-VL. Qwen2.5-VL, whose
        tower has windows, reads a video as one run of features."""
        return self.window_size == 0

    @property
    def factor(self) -> int:
        """Sides of a resized frame are multiples of this many pixels."""
        return self.patch_size * self.spatial_merge_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig(PatchLayout):
    """The tower: patches of `temporal_patch_size` frames, windowed attention except in `full_attention_layers`."""

    hidden_size: int
    intermediate_size: int
    depth: int
    num_heads: int
    out_hidden_size: int
    full_attention_layers: tuple[int, ...]
    in_channels: int = 3
    rope_theta: float = 10000.0
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.hidden_size % self.num_heads or self.head_dim % 4:
            raise ModelConfigError(
                f"vision hidden_size={self.hidden_size} must give each of num_heads={self.num_heads} a size "
                "divisible by 4 (two spatial axes, sine and cosine)"
            )
        if self.spatial_merge_size != 2:
            raise ModelConfigError(f"spatial_merge_size={self.spatial_merge_size} is not supported; supported is 2")
        if self.window_size % self.factor:
            raise ModelConfigError(
                f"window_size={self.window_size} must be a multiple of patch_size * spatial_merge_size = {self.factor}"
            )
        wrong = [layer for layer in self.full_attention_layers if not 0 <= layer < self.depth]
        if wrong:
            raise ModelConfigError(f"fullatt_block_indexes {wrong} are not among the {self.depth} vision layers")

    @property
    def feature_width(self) -> int:
        """The size of a merged feature, as the decoder reads it."""
        return self.out_hidden_size

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:
        """The number of values of a flattened patch (`X`), ordered by channel, frame, row and column."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def kernel_shape(self) -> tuple[int, ...]:
        """The shape of the patch convolution's weight in checkpoints."""
        return (self.hidden_size, self.in_channels, self.temporal_patch_size, self.patch_size, self.patch_size)

    @property
    def merge_unit(self) -> int:
        """The number of patches that become one feature."""
        return self.spatial_merge_size**2


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepVisionConfig(VisionConfig):
    """The tower of Qwen3-VL: full attention within a frame pair, and a learned grid of positions. The decoder also
    reads features of `deepstack_layers` (DeepStack, arXiv 2406.04334)."""

    patch_size: int = 16
    window_size: int = 0
    full_attention_layers: tuple[int, ...] = ()  # not read: all layers have full attention
    position_grid: int = 48  # rows, and columns, of the learned grid
    deepstack_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = self.deepstack_layers
        if any(after <= layer for layer, after in itertools.pairwise((-1, *layers, self.depth))):
            raise ModelConfigError(f"deepstack_visual_indexes {list(layers)} must grow, below depth={self.depth}")

    @property
    def stretches(self) -> list[range]:
        """The layers of each stack of the tower. A stack ends at a layer of `deepstack_layers` or at the last layer."""
        edges = [0, *(layer + 1 for layer in self.deepstack_layers), self.depth]
        return [range(first, last) for first, last in itertools.pairwise(edges) if first < last]

    @property
    def feature_width(self) -> int:
        return (1 + len(self.deepstack_layers)) * self.out_hidden_size


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder and, if the model reads images and videos, its vision tower."""

    architecture: str  # a key of `models.registry.ARCHITECTURES`
    text: TextConfig
    vision: VisionConfig | None = None
    image_token_id: int = 151655  # only models with a tower read this id and the next three
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653
    names: NameLayout = NameLayout.FLAT  # layout of the weights' names in the checkpoint
    extra: str = dataclasses.field(default="{}", compare=False, repr=False)  # text of the config.json that was read
    # Tensors of the checkpoint, by name, that no model here reads. Exports write these tensors back, bit for bit.
    carried: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.vision and self.vision.out_hidden_size != self.text.hidden_size:
            raise ModelConfigError(
                f"vision out_hidden_size={self.vision.out_hidden_size} must equal the text hidden_size="
                f"{self.text.hidden_size}"
            )

    @property
    def feature_width(self) -> int:
        """The size of a merged vision feature, as the decoder reads it; the decoder's width if there is no tower."""
        return self.text.hidden_size if self.vision is None else self.vision.feature_width
