"""The forward pass over packed rows: hidden states, log-probabilities of the packed tokens, whole logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sharding.kernels.attention import Mask, attention
from sharding.spread.ulysses import Attention, spread_attention
from sharding.vocab import token_logprobs
from sharding.walk import Walk

from .decoder import Decoder, DecoderLayer
from .inputs import PackedTokens


def hidden_states(model: Decoder, inputs: PackedTokens, walk: Walk) -> Float[Array, "B T D"]:
    """The normed hidden states of every token, under the attention rules of `PackedTokens`."""
    inputs = jax.tree.map(jnp.asarray, inputs)
    x = model.embed(walk, inputs.tokens_BT, inputs.feature_index_BT, inputs.vision)
    rotary = model.rotary(inputs.positions_3BT)
    attend: Attention = functools.partial(attention, mask=Mask(inputs.segments_BT, inputs.branches_BT))
    if inputs.spread is not None:  # over the groups of devices that share sequences
        attend = spread_attention(inputs.spread, inputs.segments_BT, inputs.branches_BT)

    def step(layer: DecoderLayer, x: Array, _: None) -> tuple[Array, None]:
        return layer(x, rotary, lambda q, k, v: (attend(q, k, v), None))

    x, _ = walk.scan(model.layers, x, step)
    return model.final_norm(walk, x)


def logits(model: Decoder, inputs: PackedTokens, walk: Walk) -> Float[Array, "B T V"]:
    """The next-token logits of every token, float32. They are whole in memory: for tests and small models."""
    hidden = hidden_states(model, inputs, walk)
    return jnp.einsum("BTD,VD->BTV", hidden, model.head_weight(walk), preferred_element_type=jnp.float32)


def logprobs(
    model: Decoder,
    inputs: PackedTokens,
    walk: Walk,
    *,
    temperature: float = 1.0,
    vocab_chunk: int = 0,
    never_sampled: tuple[int, ...] = (),
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(log-probability of each token given its predecessor's hidden state, entropy of that distribution), in nats.

    Both are float32, under `softmax(logits / temperature)`, with the token's own temperature where `inputs` has them.
    Where a token has no predecessor (the first of a segment, padding) the values are finite and meaningless.
    `vocab_chunk` bounds the tokens whose logits exist at once; 0 chooses. The softmax leaves `never_sampled` ids out,
    as the engine does.
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
        chunk=vocab_chunk,
        temperature=temperature if inputs.temperatures_BT is None else jnp.asarray(inputs.temperatures_BT),
        allowed_V=jnp.asarray(allowed),
    )
