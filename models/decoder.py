"""The decoder of Qwen2, Qwen2.5 and Qwen3 as a stack of layers: embed -> layer[i] ... -> norm -> head.

The caller hands to each layer the functions that mix tokens (`Mix`): masked for packed rows, with a cache for decoding.
The caller also chooses how to walk the stack (`sharding.walk`). The functions at the end of this file are the forward
pass over packed rows. A critic is the decoder of its policy with a head of a single row.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from sharding.kernels.attention import packed_attention
from sharding.kernels.delta_heads import DeltaHeads
from sharding.vocab import token_logprobs
from sharding.walk import Params, Stack, Walk
from sharding.weights import WeightSpec, weight, zeros

from .config import DecoderConfig, TextConfig
from .inputs import PackedTokens, VisionInput
from .layers import (
    Embedding,
    GatedMLP,
    RMSNorm,
    add_bias,
    kept_in_loop,
    normal,
    project,
    rotary_frequencies,
    rotate,
)

Rotary: TypeAlias = tuple[Array, Array]  # cosine and sine [B, T, R] of the rotated numbers of a head, float32
Aux = TypeVar("Aux")  # second result of a mix: keys and values, or a state; None in training


@dataclasses.dataclass(frozen=True)
class Mix(Generic[Aux]):
    """The functions that mix tokens. A layer calls the function that it needs, and returns the function's second
    result. `attention(q_BTNH, k_BTKH, v_BTKH) -> (out_BTNH, aux)` gets rotated q and k. `delta(inputs) -> (out_BTVJ,
    aux)` gets a `sharding.kernels.delta.DeltaInputs`. `delta` is None for models without Gated DeltaNet."""

    attention: Callable[[Array, Array, Array], tuple[Array, Aux]]
    delta: Callable[[Any], tuple[Array, Aux]] | None = None


class SelfAttention(nnx.Module):
    """Projections of grouped-query attention, with the biases, head norms and output gate that the configuration asks
    for. With a gate, axis `C` of `q` has each head's queries, then the head's gate."""

    def __init__(self, config: TextConfig, stack: int | None) -> None:
        D, N, K, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        init = normal(config.initializer_range)
        queries, axes = ((N, 2, H), ("N", "C", "H")) if config.output_gate else ((N, H), ("N", "H"))
        self.q = weight(WeightSpec((D, *queries), ("D", *axes), init, inputs=1), stack)
        self.k = weight(WeightSpec((D, K, H), ("D", "K", "H"), init, inputs=1), stack)
        self.v = weight(WeightSpec((D, K, H), ("D", "K", "H"), init, inputs=1), stack)
        self.o = weight(WeightSpec((N, H, D), ("N", "H", "D"), init, inputs=2), stack)
        self.config = config
        if config.qkv_bias:
            self.q_bias = weight(WeightSpec(queries, axes, zeros), stack)
            self.k_bias = weight(WeightSpec((K, H), ("K", "H"), zeros), stack)
            self.v_bias = weight(WeightSpec((K, H), ("K", "H"), zeros), stack)
        if config.o_bias:
            self.o_bias = weight(WeightSpec((D,), ("D",), zeros), stack)
        if config.head_norm:
            eps, zero_centred = config.rms_norm_eps, config.zero_centred_norms
            self.q_norm = RMSNorm(H, eps, stack, axis="H", zero_centred=zero_centred)
            self.k_norm = RMSNorm(H, eps, stack, axis="H", zero_centred=zero_centred)

    def __call__(self, x: Float[Array, "B T D"], rotary: Rotary, mix: Mix[Aux]) -> tuple[Float[Array, "B T D"], Aux]:
        q, k, v = project(x, self.q), project(x, self.k), project(x, self.v)
        if self.config.qkv_bias:
            q, k, v = add_bias(q, self.q_bias[...]), add_bias(k, self.k_bias[...]), add_bias(v, self.v_bias[...])
        gate = q[..., 1, :] if self.config.output_gate else None
        q = q if gate is None else q[..., 0, :]
        if self.config.head_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out, aux = mix.attention(rotate(q, rotary), rotate(k, rotary), v)
        out = project(out if gate is None else out * jax.nn.sigmoid(gate), self.o)
        return add_bias(out, self.o_bias[...]) if self.config.o_bias else out, aux


class DecoderLayer(nnx.Module):
    def __init__(self, config: TextConfig, stack: int | None = None) -> None:
        D, F, std = config.hidden_size, config.intermediate_size, config.initializer_range
        eps, zero_centred = config.rms_norm_eps, config.zero_centred_norms
        self.attention_norm = RMSNorm(D, eps, stack, zero_centred=zero_centred)
        self.attention = SelfAttention(config, stack)
        self.mlp_norm = RMSNorm(D, eps, stack, zero_centred=zero_centred)
        self.mlp = GatedMLP(D, F, bias=False, std=std, stack=stack)

    def __call__(self, x: Float[Array, "B T D"], rotary: Rotary, mix: Mix[Aux]) -> tuple[Float[Array, "B T D"], Aux]:
        out, aux = self.attention(self.attention_norm(x), rotary, mix)
        x = x + out
        return x + self.mlp(self.mlp_norm(x)), aux


@dataclasses.dataclass(frozen=True)
class DeepFeatures:
    """Features that are added to the hidden states behind the first layers, at the tokens of media (DeepStack).
    `index_BT` is each token's row of `features_MX`; a negative index means that the token has no row. A row holds the
    features of the first layer, then the features of the second layer, and so on."""

    features_MX: Float[Array, "M X"]
    index_BT: Int[Array, "B T"]

    def added(self, x_BTD: Float[Array, "B T D"], layer: Int[Array, ""] | int) -> Float[Array, "B T D"]:
        """The hidden states behind a layer, with the layer's features added."""
        D = x_BTD.shape[-1]

        def add(x_BTD: Array) -> Array:
            rows_MD = jax.lax.dynamic_slice_in_dim(self.features_MX, layer * D, D, axis=1).astype(x_BTD.dtype)
            return x_BTD + jnp.where(self.index_BT[..., None] >= 0, rows_MD[jnp.maximum(self.index_BT, 0)], 0)

        # `cond` skips the addition behind most layers, which have no features.
        return jax.lax.cond(layer < self.features_MX.shape[1] // D, add, lambda x_BTD: x_BTD, x_BTD)


class Decoder(nnx.Module):
    """The text models, and the base class of all other architectures, which replace `features` or `stack`. A model
    without `mrope_section` reads only row 0 of `positions_3BT`."""

    def __init__(self, config: DecoderConfig) -> None:
        text = config.text
        self.config = config
        self.rotary_dim = text.rotary_dim
        self.embedding = Embedding(text.vocab_size, text.hidden_size, text.initializer_range)
        self.layers = DecoderLayer(text, stack=len(text.attention_layers))
        self.norm = RMSNorm(text.hidden_size, text.rms_norm_eps, zero_centred=text.zero_centred_norms)
        if not text.tie_word_embeddings:
            self.head = Embedding(text.vocab_size, text.hidden_size, text.initializer_range)

    @property
    def stack(self) -> Stack:
        """The layers in their order. A kind of layer is named like the model's attribute that has its layers."""
        return Stack({"layers": self.layers}, ("layers",) * self.config.text.num_layers)

    def embed(
        self,
        walk: Walk,
        tokens_BT: Int[Array, "B T"],
        feature_index_BT: Int[Array, "B T"] | None = None,
        vision: VisionInput | None = None,
        features_MX: Float[Array, "M X"] | None = None,
    ) -> tuple[Float[Array, "B T D"], DeepFeatures | None]:
        """Returns (token embeddings, features that layers add). A token's `feature_index_BT`, if not negative, is a row
        of the features: of `vision`, or of `features_MX` if they were computed before. The row's first D numbers
        replace the token's embedding; layers add the rest. Raises ValueError for features without `feature_index_BT`,
        and for the `vision` of a text model."""
        x = walk.use(self.embedding)(tokens_BT)
        if vision is not None:
            features_MX = self.features(walk, vision).astype(x.dtype)
            if vision.route is not None:
                features_MX = vision.route(features_MX)
        if features_MX is None:
            return x, None
        if feature_index_BT is None:
            raise ValueError("pixels without feature_index_BT: nothing says which tokens they belong to")
        is_feature, D = feature_index_BT >= 0, x.shape[-1]
        first_MD = features_MX[:, :D].astype(x.dtype)
        x = jnp.where(is_feature[..., None], first_MD[jnp.maximum(feature_index_BT, 0)], x)
        return x, DeepFeatures(features_MX[:, D:], feature_index_BT) if features_MX.shape[1] > D else None

    def features(self, walk: Walk, vision: VisionInput) -> Float[Array, "M X"]:
        """The merged vision features, which `embed` takes instead of `vision`. A text model raises ValueError."""
        raise ValueError("this is a text model; it can't read images or videos")

    def rotary(self, positions_3BT: Int[Array, "3 B T"]) -> Rotary:
        """(cosine, sine) `[B, T, R]` float32, from positions (time, height, width), for the R rotated numbers of a
        head. Frequencies are dealt to the position axes in sections (M-RoPE), or in turn until an axis has its share
        (interleaved M-RoPE). A model without `mrope_section` has one section, of time."""
        rope = self.config.text.rope
        frequencies, factor = rotary_frequencies(rope, self.rotary_dim)
        sections = rope.mrope_section or (len(frequencies),)
        axis = np.repeat(np.arange(len(sections)) % 3, sections)
        if rope.interleaved:
            turn, kind = np.divmod(np.arange(len(frequencies)), 3)
            axis = np.where(turn < np.asarray(sections)[kind], kind, 0)
        angles = jnp.moveaxis(positions_3BT.astype(jnp.float32)[axis], 0, -1)
        angles = angles * jnp.broadcast_to(frequencies, angles.shape)
        angles = jnp.concatenate([angles, angles], axis=-1)
        return jnp.cos(angles) * factor, jnp.sin(angles) * factor

    def final_norm(self, walk: Walk, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return walk.use(self.norm)(x_BTD)

    def head_weight(self, walk: Walk) -> Float[Array, "V D"]:
        """The output projection; in a tied model it is the input embedding."""
        tied = self.config.text.tie_word_embeddings
        return walk.use(self.embedding if tied else self.head).table[...]


def split(model: Decoder) -> tuple[nnx.GraphDef[Decoder], Params]:
    """Returns (structure, parameters as a pure nested dict). The structure is hashable and static."""
    graphdef, state = nnx.split(model)
    return graphdef, nnx.to_pure_dict(state)


def merge(graphdef: nnx.GraphDef[Decoder], params: Params) -> Decoder:
    """The model of a structure and its parameters."""
    return nnx.merge(graphdef, params)


def shapes_only(model: Decoder) -> Decoder:
    """The abstract model (`jax.ShapeDtypeStruct` for weights) of `model`, which may hold weights."""
    graphdef, params = split(model)
    return merge(graphdef, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params))


def parameter_count(model: nnx.Module) -> int:
    """The number of weights of a model, which may be abstract."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def packed_mix(inputs: PackedTokens, queries: jax.ShapeDtypeStruct, heads: DeltaHeads | None = None) -> Mix[None]:
    """The mix of packed rows, under the attention rules of `PackedTokens`. `queries` have the head size and the dtype
    of all layers' queries. `heads` are the heads of layers with Gated DeltaNet, if any. Raises ValueError for `heads`
    with inputs that have neither `spread` nor `runs`."""
    segments_BT, branches_BT, recur = inputs.segments_BT, inputs.branches_BT, None
    if inputs.spread is not None:  # devices share sequences
        from sharding.spread.ulysses import spread_attention

        attend = spread_attention(inputs.spread, segments_BT, branches_BT, queries=queries)
        if heads is not None:
            from sharding.spread.recurrence import spread_delta

            recur = spread_delta(inputs.spread, heads, segments_BT.shape[1])
    else:
        attend = packed_attention(segments_BT, branches_BT, queries)
        if heads is not None:
            from sharding.kernels.delta import delta_rule

            if (runs := inputs.runs) is None:
                raise ValueError("a model with Gated DeltaNet needs the runs of its rows: see PackedTokens.with_runs")
            recur = lambda given: delta_rule(given, heads, runs)[0]  # noqa: E731
    delta = None if recur is None else lambda given: (recur(given), None)
    return Mix(attention=lambda q, k, v: (attend(q, k, v), None), delta=delta)


def hidden_states(model: Decoder, inputs: PackedTokens, walk: Walk) -> Float[Array, "B T D"]:
    """The normed hidden states of every token, under the attention rules of `PackedTokens`."""
    inputs = jax.tree.map(jnp.asarray, inputs)
    x, deep = model.embed(walk, inputs.tokens_BT, inputs.feature_index_BT, inputs.vision)
    rotary = model.rotary(inputs.positions_3BT)
    text = model.config.text
    queries = jax.ShapeDtypeStruct((*x.shape[:2], text.num_heads, text.head_dim), x.dtype)
    mix = packed_mix(inputs, queries, text.delta)

    def step(layer: Any, x: Array, number: Array | None) -> tuple[Array, None]:
        x, _ = layer(x, kept_in_loop(rotary, x), mix)
        return x if deep is None or number is None else deep.added(x, number), None

    numbers = None if deep is None else np.arange(text.num_layers, dtype=np.int32)
    x, _ = walk.scan(model.stack, x, step, numbers)
    return model.final_norm(walk, x)


def logprobs(
    model: Decoder,
    inputs: PackedTokens,
    walk: Walk,
    *,
    temperature: float = 1.0,
    never_sampled: tuple[int, ...] = (),
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(log-probability of each token given its predecessor's hidden state, entropy of that distribution), in nats,
    float32, under `softmax(logits / temperature)` without the ids `never_sampled`. Temperatures of `inputs`, if any,
    replace `temperature`. Without a predecessor (a segment's first token, padding) values are finite and meaningless.
    """
    hidden = hidden_states(model, inputs, walk)
    predecessor = jnp.asarray(inputs.predecessor_BT)
    if inputs.spread is not None:
        hidden = inputs.spread.with_exports(hidden)
    before = jnp.take_along_axis(hidden, jnp.maximum(predecessor, 0)[..., None], axis=1)
    head = model.head_weight(walk)
    allowed = np.ones(head.shape[0], bool)
    allowed[list(never_sampled)] = False
    return token_logprobs(
        before,
        head,
        jnp.asarray(inputs.tokens_BT),
        temperature=temperature if inputs.temperatures_BT is None else jnp.asarray(inputs.temperatures_BT),
        allowed_V=jnp.asarray(allowed),
    )


def value_model(policy: Decoder) -> Decoder:
    """The abstract critic of `policy`: the same decoder with a head of one row. `policy` may be abstract."""
    critic = shapes_only(policy)
    critic.head = Embedding(1, critic.config.text.hidden_size, 0.0)
    return critic


def first_weights(policy: Params, critic: Params) -> Params:
    """The weights that a critic begins with: the arrays of `policy`, and a head of zeros, so that all values are 0.
    The new head has the shape and sharding of the head in `critic`."""
    table = critic["head"]["table"]
    return {**policy, "head": {"table": jnp.zeros(table.shape, table.dtype, device=table.sharding)}}


def values(critic: Decoder, inputs: PackedTokens, walk: Walk) -> Float[Array, "B T"]:
    """The value, float32, of the state in which each token was chosen (the tokens before it). If a token has no
    predecessor (the first of a segment, padding), the number is finite and meaningless."""
    hidden = hidden_states(critic, inputs, walk)
    table = walk.use(critic.head).table[...]
    behind = jnp.einsum("BTD,VD->BTV", hidden, table, preferred_element_type=jnp.float32)
    if inputs.spread is not None:
        behind = inputs.spread.with_exports(behind)
    predecessor = jnp.maximum(jnp.asarray(inputs.predecessor_BT), 0)
    return jnp.take_along_axis(behind[..., 0], predecessor, axis=1)
