"""The inputs of a model: one prepared sequence, and packed rows of several sequences.

Arrays are numpy on the host; the pytrees become device arrays at the `jit` boundary. Axis letters are those of the
legend in `docs/structure.md`.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Float32, Int32

from sharding.kernels.runs import CHUNK, PackedRuns, packed_runs
from sharding.spread.buffers import Spread
from sharding.spread.route import ExchangeRoute

from .shadow import ShadowTensor

if TYPE_CHECKING:
    AnyArray: TypeAlias = Any  # numpy arrays on the host, JAX arrays inside `jit`
else:
    AnyArray = jax.Array | np.ndarray | jax.ShapeDtypeStruct | jax.stages.ArgInfo  # ArgInfo: in a lowered program


@typing.no_type_check  # as a pytree it may hold shardings or dimensions instead of arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VisionInput:
    """Patches of any number of images and videos, packed into one axis, **in window order**.

    `merge_unit` consecutive patches become one merged feature. Features are ordered by frame pair, then by window. Both
    attention patterns of the tower are therefore contiguous runs.

    No frame pair has more than `frame_bound` patches, so that attention skips patches that lie further apart. The bound
    is part of the compiled shape; 0 means unknown, which is correct but slow.
    """

    patches_PX: Float32[AnyArray, "P X"]  # normalised pixels
    positions_P2: Int32[AnyArray, "P 2"]  # (row, column) of the patch in its frame, for the 2-D rotary embedding
    frame_segments_P: Int32[AnyArray, " P"]  # the patch's frame pair, from 1; 0 is padding
    window_segments_P: Int32[AnyArray, " P"]  # the patch's attention window, from 1; 0 is padding
    frame_bound: int = dataclasses.field(default=0, metadata={"static": True})
    route: ExchangeRoute | None = None  # None: each device computes the features of its own tokens

    @property
    def num_patches(self) -> int:
        return self.patches_PX.shape[0]


ARRAYS = ("patches_PX", "positions_P2", "frame_segments_P", "window_segments_P")


def frame_bound(frame_segments_P: np.ndarray) -> int:
    """The number of patches of the longest frame pair, rounded up to a power of two so that few shapes are compiled."""
    counts = np.bincount(frame_segments_P)[1:]
    longest = int(counts.max()) if counts.size else 1
    return 1 << (longest - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class ModelInput:
    """One prepared prompt: token ids with media placeholders expanded, plus its media. `feature_index_T[t]` is the row
    of the merged features of `vision` that replaces the embedding of token `t`, or -1 if the token is text. A generated
    token `i` has the rotary position `next_position + i` on all three axes."""

    token_ids_T: np.ndarray  # i32
    positions_3T: np.ndarray  # i32: temporal, height, width (equal for text)
    feature_index_T: np.ndarray  # i32
    next_position: int
    vision: VisionInput | None = None

    def __len__(self) -> int:
        return len(self.token_ids_T)

    def laid_out(self) -> ModelInput:
        return self

    def with_patches(self, patches_PX: np.ndarray | ShadowTensor | None) -> ModelInput:
        """The same prompt with other pixels, if it has media. All other arrays are shared."""
        vision = self.vision and dataclasses.replace(self.vision, patches_PX=patches_PX)
        return dataclasses.replace(self, vision=vision)

    @property
    def patches_PX(self) -> AnyArray | ShadowTensor | None:
        """The patches of the prompt's media; None without media."""
        return None if self.vision is None else self.vision.patches_PX

    @property
    def frame_bound(self) -> int:
        """The frame bound of the prompt's media (`VisionInput`); 1 without media."""
        return 1 if self.vision is None else self.vision.frame_bound or frame_bound(self.vision.frame_segments_P)

    @functools.cached_property
    def frame_edges(self) -> list[int]:
        """The first patch of each frame pair, and at the end the number of patches; empty without media."""
        if self.vision is None:
            return []
        inner = np.flatnonzero(np.diff(self.vision.frame_segments_P)) + 1
        return [0, *inner.tolist(), self.vision.num_patches]

    @functools.cached_property
    def shown(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (indices of the tokens that show a feature, the row of the features that each of them shows)."""
        tokens = np.flatnonzero(self.feature_index_T >= 0)
        return tokens, self.feature_index_T[tokens]


def text_input(token_ids: Sequence[int] | np.ndarray, start: int = 0) -> ModelInput:
    """The input of a text without media, whose first token has the rotary position `start`."""
    end = start + len(token_ids)
    positions_3T = np.tile(np.arange(start, end, dtype=np.int32), (3, 1))
    return ModelInput(np.asarray(token_ids, np.int32), positions_3T, np.full(len(token_ids), -1, np.int32), end)


def joined(parts: Sequence[ModelInput], merge_unit: int) -> ModelInput:
    """The parts of one sequence, in order, as one input. `merge_unit` patches become one feature."""
    visions = [part.vision for part in parts if part.vision is not None]
    features = np.cumsum([0, *(0 if part.vision is None else part.vision.num_patches // merge_unit for part in parts)])
    index_T = [
        np.where(part.feature_index_T >= 0, part.feature_index_T + first, -1).astype(np.int32)
        for part, first in zip(parts, features[:-1].tolist(), strict=True)
    ]
    return ModelInput(
        np.concatenate([part.token_ids_T for part in parts]).astype(np.int32),
        np.concatenate([part.positions_3T for part in parts], axis=1),
        np.concatenate(index_T),
        parts[-1].next_position,
        concatenate(visions) if visions else None,
    )


def media_numbers(inputs: ModelInput) -> np.ndarray:
    """For each token, the number of the medium that it belongs to, from 1 on in order; 0 for text. A medium has the
    tokens of its start and its end, and what lies between: a video may have such a pair for each frame pair, too."""
    shown, ids_T = inputs.shown[0], inputs.token_ids_T
    if not len(shown):
        return np.zeros(len(ids_T), np.int64)
    behind = shown[0] + np.argmin(np.append(inputs.feature_index_T[shown[0] :] >= 0, False))
    starts_T, ends_T = ids_T == ids_T[shown[0] - 1], ids_T == ids_T[behind]
    depth_T = np.cumsum(starts_T) - np.cumsum(ends_T)
    return np.where((depth_T > 0) | ends_T, np.cumsum(starts_T & (depth_T == 1)), 0)


def picked(inputs: ModelInput, kept: np.ndarray, start: int, merge_unit: int) -> ModelInput:
    """The input of some tokens of `inputs`: those of the indices `kept`, ascending. The first has the rotary position
    `start`. What is left out, and what is kept between, begins and ends outside of media. Kept media are neighbours."""
    where = np.append(inputs.positions_3T[0], inputs.next_position)
    begins = np.flatnonzero(np.diff(kept, prepend=-2) != 1)  # of runs of neighbouring tokens
    lengths = np.diff(begins, append=len(kept))
    firsts = kept[begins]
    advances = where[firsts + lengths] - where[firsts]
    ends = start + np.cumsum(advances)
    positions_3T = inputs.positions_3T[:, kept] + np.repeat(ends - advances - where[firsts], lengths)
    index_T, vision = inputs.feature_index_T[kept], None
    if (shown := index_T[index_T >= 0]).size:
        assert inputs.vision is not None
        first, end = int(shown.min()), int(shown.max()) + 1
        vision = cut(inputs.vision, first * merge_unit, end * merge_unit)
        frames_P, windows_P = vision.frame_segments_P, vision.window_segments_P
        segments = {"frame_segments_P": frames_P - frames_P[0] + 1, "window_segments_P": windows_P - windows_P[0] + 1}
        vision = dataclasses.replace(vision, **segments)
        index_T = np.where(index_T >= 0, index_T - first, -1).astype(np.int32)
    ids_T, next_position = inputs.token_ids_T[kept], int(ends[-1]) if len(ends) else start
    return ModelInput(ids_T, positions_3T.astype(np.int32), index_T, next_position, vision)


class OutlinedInput:
    """A prepared prompt without its large arrays, which `laid_out` makes again, but with what plans need."""

    __slots__ = ("_edges", "_tokens", "_where", "_which", "frame_bound", "laid_out", "patches_PX")

    def __init__(self, inputs: ModelInput, laid_out: Callable[[], ModelInput]) -> None:
        """`laid_out()` makes `inputs` once more."""
        self.laid_out = laid_out
        self._tokens, self.patches_PX, self.frame_bound = len(inputs), inputs.patches_PX, inputs.frame_bound
        self._edges, self._where, self._which = map(_narrow, (inputs.frame_edges, *inputs.shown))

    def __len__(self) -> int:
        return self._tokens

    @property
    def frame_edges(self) -> list[int]:
        return self._edges.tolist()

    @property
    def shown(self) -> tuple[np.ndarray, np.ndarray]:
        return self._where.astype(np.int64), self._which.astype(np.int32)


PromptInput: TypeAlias = ModelInput | OutlinedInput


def _narrow(values: list[int] | np.ndarray) -> np.ndarray:
    """Non-negative numbers in the smallest integer type that holds them."""
    array = np.asarray(values, np.int64)
    return array.astype(np.min_scalar_type(array.max(initial=0)))


@typing.no_type_check  # see `VisionInput`
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedTokens:
    """Packed rows of several sequences each, with all other inputs of the forward pass.

    Attention of query `t` reaches key `s` of the same row when `s <= t`, `segments[s] == segments[t] != 0` and
    `branches[s]` is 0 or equals `branches[t]`. Branch 0 of a segment is the prompt that a group shares; branches 1, 2,
    ... are the group's responses. A prompt is thus computed once for its group. In plain packing every sequence has its
    own segment and branch 0.

    `predecessor_BT[t]` is the index, in the row, of the token whose hidden state predicts token `t`: `t - 1`,
    or, for the first token of a response, the last token of its prompt.

    Data shards divide rows, and the patch axis of `vision`, evenly and in order; `feature_index_BT` counts from the
    start of a shard's own (perhaps routed) features.

    `spread` is set if devices share sequences; each device then has one row. An index in the row then means, in the
    rules above, an index in the stream of the devices that share the sequence. Segments are numbered through all rows,
    and a predecessor of `T` or more is a hidden state that another device exports.

    `temperatures_BT` is each token's sampling temperature, if temperatures differ. `runs` is the table that layers with
    Gated DeltaNet need; it is None for other models. Rows with a `spread` have tables in `Spread.runs` instead.
    """

    tokens_BT: Int32[AnyArray, "B T"]
    segments_BT: Int32[AnyArray, "B T"]  # from 1; 0 is padding
    branches_BT: Int32[AnyArray, "B T"]
    positions_3BT: Int32[AnyArray, "3 B T"]
    predecessor_BT: Int32[AnyArray, "B T"]
    feature_index_BT: Int32[AnyArray, "B T"]  # -1 for text
    vision: VisionInput | None
    spread: Spread | None = None
    temperatures_BT: Float32[AnyArray, "B T"] | None = None  # positive
    runs: PackedRuns | None = None

    def with_runs(self, chunks: int = 0, size: int = CHUNK) -> PackedTokens:
        """These rows, on the host, with their runs: `chunks` chunks (0: as many as needed) of `size` tokens a row."""
        return dataclasses.replace(self, runs=packed_runs(self.segments_BT, self.branches_BT, chunks, size=size))


def concatenate(parts: Sequence[VisionInput]) -> VisionInput:
    """The parts in order as one `VisionInput`. Padding within a part stays padding. Raises ValueError for no parts."""
    if not parts:
        raise ValueError("nothing to concatenate: a batch without media has vision=None")
    return VisionInput(
        np.concatenate([part.patches_PX for part in parts]),
        np.concatenate([part.positions_P2 for part in parts]),
        _renumbered([part.frame_segments_P for part in parts]),
        _renumbered([part.window_segments_P for part in parts]),
        frame_bound=max(part.frame_bound for part in parts) if all(part.frame_bound for part in parts) else 0,
    )


def _renumbered(segments: Sequence[np.ndarray]) -> np.ndarray:
    """The segment ids of several parts, in order, renumbered so that no two parts share an id; 0 stays padding."""
    result, used = [], 0
    for ids in segments:
        result.append(np.where(ids == 0, 0, ids + used).astype(np.int32))
        used += int(ids.max(initial=0))
    return np.concatenate(result)


def pad(vision: VisionInput, num_patches: int) -> VisionInput:
    """`vision`, padded (segment 0, zero pixels) to `num_patches`. Raises ValueError if `vision` has more patches."""
    missing = num_patches - vision.num_patches
    if missing < 0:
        raise ValueError(f"{vision.num_patches} patches do not fit into {num_patches}")
    if missing == 0:
        return vision
    return jax.tree.map(lambda x: np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)]), vision)


def cut(vision: VisionInput, start: int, stop: int) -> VisionInput:
    """A `VisionInput` of the patches `start .. stop - 1`, which must be complete frame pairs."""
    part = jax.tree.map(lambda x: x[start:stop], vision)
    return dataclasses.replace(part, frame_bound=frame_bound(part.frame_segments_P))


def blank(num_patches: int, patch_values: int) -> VisionInput:
    """Padding: zero pixels in segment 0."""
    return VisionInput(
        patches_PX=np.zeros((num_patches, patch_values), np.float32),
        positions_P2=np.zeros((num_patches, 2), np.int32),
        frame_segments_P=np.zeros(num_patches, np.int32),
        window_segments_P=np.zeros(num_patches, np.int32),
        frame_bound=1,
    )


def side_by_side(shards: Sequence[VisionInput], bound: int, way: ExchangeRoute | None = None) -> VisionInput:
    """The buffers of all shards along one axis; segment ids are not renumbered."""
    if len(shards) == 1:
        return dataclasses.replace(shards[0], frame_bound=bound, route=way)
    arrays = {name: np.concatenate([getattr(shard, name) for shard in shards]) for name in ARRAYS}
    return dataclasses.replace(shards[0], **arrays, frame_bound=bound, route=way)


def common_bound(inputs: Iterable[PromptInput]) -> int:
    """The largest `frame_bound` of the inputs. Each bound needs a program of its own, as the bound is static."""
    return max((prompt.frame_bound for prompt in inputs), default=1)
