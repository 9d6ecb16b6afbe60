"""The compiled programs of a layer-streamed model: embedding, one layer, log-probabilities and likeliest tokens.

The program that computes a layer also brings parts of a later layer's weights from the host, so that the compiler sees
the transfer and the computation that hides it. Parts are flat: XLA would wait for nearly all of many small copies.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict
from jaxtyping import Array, Float, Int

import models
from models.config import DecoderConfig
from models.decoder import Mix, Rotary
from sharding.kernels.attention import attention, packed_attention
from sharding.kernels.delta import DeltaInputs, DeltaState, delta_rule, delta_step
from sharding.kernels.runs import PackedRuns
from sharding.vocab import token_logprobs
from sharding.walk import Params, Walk
from sharding.weights import by_path

PARTS = 4  # parts of a layer's weights; while one layer computes, from none to all parts of another layer travel
Parts: TypeAlias = tuple[Array, ...]  # a layer's weights as equal pieces of one flat array, or some of the pieces
KeyValues: TypeAlias = tuple[Array, Array]  # keys and values of one layer, [B, S, K, H]
Kept: TypeAlias = KeyValues | DeltaState  # what a layer keeps of earlier tokens
Layer: TypeAlias = Params | Parts  # the weights of a resident layer, or the parts of a streamed layer
Packing: TypeAlias = tuple[Int[Array, "B T"], Int[Array, "B T"], PackedRuns | None]  # segments, branches, runs
Reach: TypeAlias = tuple[Int[Array, " B"], Int[Array, ""], Int[Array, ""]]  # (length_B, first, number) of `decode`


class StreamedPrograms:
    """The programs of one architecture. `outer` are the model's weights without the layers (and without a vision
    tower). A `layer` is the weights of a resident layer, or the parts of a streamed layer; its `kind` is one of
    `kinds`. All parts have the same size, so that a layer's program does not depend on the kind that travels."""

    def __init__(self, config: DecoderConfig) -> None:
        self.walk, self._delta = Walk(), config.text.delta
        model = models.abstract(config)
        self.kinds: dict[str, dict[tuple, tuple[int, ...]]] = {}  # the shapes of a layer's weights, by kind and path
        self._graphdefs = {kind: nnx.graphdef(module) for kind, module in model.stack.modules.items()}
        for kind, module in model.stack.modules.items():
            stacks = by_path(nnx.to_pure_dict(nnx.state(module)))
            self.kinds[kind] = {path: x.shape[1:] for path, x in stacks.items()}
        largest = max(sum(map(math.prod, shapes.values())) for shapes in self.kinds.values())
        self.part_size = -(-largest // PARTS)  # values of a part; the last part is padded
        for name in {*self.kinds, "visual"} & vars(model).keys():
            delattr(model, name)
        self._outer = nnx.graphdef(model)
        self.embed = jax.jit(self._embed)
        self.unpack = jax.jit(self._unpack, static_argnames="kind")
        self.prefill = jax.jit(self._prefill, static_argnames=("room", "kind"))
        self.decode = jax.jit(self._decode, static_argnames="kind", donate_argnums=3)
        self.logprobs = jax.jit(self._logprobs)
        self.likeliest = jax.jit(self._likeliest)

    def pack(self, weights: dict[tuple, np.ndarray], dtype: np.dtype, *, kind: str) -> list[np.ndarray]:
        """Packs the weights of one layer, given by path, into parts."""
        flat = np.concatenate([weights[path].reshape(-1) for path in self.kinds[kind]]).astype(dtype)
        return np.split(np.pad(flat, (0, self.part_size * PARTS - len(flat))), PARTS)

    def _unpack(self, parts: Parts, *, kind: str) -> Params:
        weights: dict[tuple, Array] = {}
        start = 0
        for path, shape in self.kinds[kind].items():
            stop = start + math.prod(shape)
            begins = [self.part_size * number for number in range(PARTS)]
            pieces = [
                part[max(start - begin, 0) : stop - begin]
                for begin, part in zip(begins, parts, strict=True)
                if begin < stop and start < begin + self.part_size
            ]
            weights[path] = jnp.concatenate(pieces).reshape(shape)
            start = stop
        return unflatten_dict(weights)

    def _module(self, layer: Layer, kind: str) -> Any:
        weights = layer if isinstance(layer, dict) else self._unpack(layer, kind=kind)
        return nnx.merge(self._graphdefs[kind], weights)

    def _embed(
        self, outer: Params, tokens_BT: Int[Array, "B T"], positions_3BT: Int[Array, "3 B T"]
    ) -> tuple[Float[Array, "B T D"], Rotary]:
        model = models.merge(self._outer, outer)
        return model.embed(self.walk, tokens_BT)[0], model.rotary(positions_3BT)

    def _prefill(
        self, layer: Layer, upcoming: Parts, x: Array, rotary: Rotary, packing: Packing, *, room: int, kind: str
    ) -> tuple[Float[Array, "B T D"], Parts, Kept | None]:
        """Computes a layer over packed rows. Returns (hidden states, `upcoming` on the device, what the layer keeps):
        keys and values, with `room` free columns behind each row, or the state after its last token (None: no room)."""
        segments_BT, branches_BT, runs = packing
        attend_rows = packed_attention(segments_BT, branches_BT)

        def attend(q: Array, k: Array, v: Array) -> tuple[Array, KeyValues | None]:
            widths = [(0, 0), (0, room), (0, 0), (0, 0)]
            return attend_rows(q, k, v), (jnp.pad(k, widths), jnp.pad(v, widths)) if room else None

        def recur(channels: DeltaInputs) -> tuple[Array, DeltaState | None]:
            assert self._delta is not None and runs is not None
            out, state = delta_rule(channels, self._delta, runs)
            return out, state if room else None

        fetched = _fetched(upcoming)
        x, kept = self._module(layer, kind)(x, rotary, Mix(attention=attend, delta=recur))
        return x, fetched, kept

    def _decode(
        self, layer: Layer, upcoming: Parts, x: Array, kept: Kept, rotary: Rotary, reach: Reach, *, kind: str
    ) -> tuple[Float[Array, "B 1 D"], Parts, Kept]:
        """Computes a layer over token `number` of each row's response. Keys and values of responses are in the columns
        from `first` on, keys and values of a row's prompt in its first `length_B` columns."""
        length_B, first, number = reach

        def attend(q: Array, k: Array, v: Array) -> tuple[Array, KeyValues]:
            assert not isinstance(kept, DeltaState)
            column_BS = jnp.broadcast_to(jnp.arange(kept[0].shape[1]), (x.shape[0], kept[0].shape[1]))
            reached_BS = (column_BS < length_B[:, None]) | ((column_BS >= first) & (column_BS <= first + number))
            keys, values = (
                jax.lax.dynamic_update_slice_in_dim(old, new, first + number, axis=1)
                for old, new in zip(kept, (k, v), strict=True)
            )
            return attention(q, keys, values, reached_BS[:, None]), (keys, values)

        def recur(channels: DeltaInputs) -> tuple[Array, DeltaState]:
            assert self._delta is not None and isinstance(kept, DeltaState)
            return delta_step(channels, self._delta, kept)

        fetched = _fetched(upcoming)
        x, after = self._module(layer, kind)(x, rotary, Mix(attention=attend, delta=recur))
        return x, fetched, after

    def _logprobs(
        self, outer: Params, x: Float[Array, "B T D"], before_BA: Int[Array, "B A"], tokens_BA: Int[Array, "B A"]
    ) -> Float[Array, "B A"]:
        """The log-probabilities of `tokens_BA`, in nats, each behind the column `before_BA` of its row."""
        model = models.merge(self._outer, outer)
        hidden_BAD = jnp.take_along_axis(x, before_BA[..., None], axis=1)
        hidden_BAD = model.final_norm(self.walk, hidden_BAD)
        return token_logprobs(hidden_BAD, model.head_weight(self.walk), tokens_BA)[0]

    def _likeliest(self, outer: Params, x: Float[Array, "B T D"], last_B: Int[Array, " B"]) -> Int[Array, " B"]:
        """The most probable token behind column `last_B` of each row; the lowest id of equally probable tokens."""
        model = models.merge(self._outer, outer)
        hidden_BD = model.final_norm(self.walk, jnp.take_along_axis(x, last_B[:, None, None], axis=1))[:, 0]
        head_VD = model.head_weight(self.walk)
        logits_BV = jnp.einsum("BD,VD->BV", hidden_BD, head_VD, preferred_element_type=jnp.float32)
        return jnp.argmax(logits_BV, axis=1).astype(jnp.int32)


def _fetched(parts: Sequence[Array]) -> Parts:
    return tuple(jax.device_put(part, jax.memory.Space.Device) for part in parts)


programs = functools.lru_cache(maxsize=8)(StreamedPrograms)  # models of one architecture share compiled programs
