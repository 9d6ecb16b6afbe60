"""Values: the decoder with a head of one number a token, for a critic.

A critic is the decoder of its policy whose output table has a single row: the value of a state is that row times the
normed hidden state, as a logit would be. Everything else is the decoder's, strategies included.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from sharding.walk import Params, Walk

from .decoder import Decoder, hidden_states, shapes_only
from .inputs import PackedTokens
from .layers import Embedding


def value_model(policy: Decoder) -> Decoder:
    """The abstract critic of a policy, which may be abstract: the same decoder with a head of one row."""
    critic = shapes_only(policy)
    width = critic.config.text.hidden_size
    critic.head = nnx.eval_shape(lambda: Embedding(1, width, 0.0, nnx.Rngs(0)))
    return critic


def first_weights(policy: Params, critic: Params) -> Params:
    """The weights that a critic begins with: its policy's own arrays, and a head of zeros, so that all values are 0.
    The new head has the shape and sharding of the head in `critic`."""
    table = critic["head"]["table"]
    return {**policy, "head": {"table": jnp.zeros(table.shape, table.dtype, device=table.sharding)}}


def values(critic: Decoder, inputs: PackedTokens, walk: Walk) -> Float[Array, "B T"]:
    """The value, float32, of the state in which each token was chosen: the tokens before it.

    Where a token has no predecessor (the first of a segment, padding) the number is finite and meaningless.
    """
    hidden = hidden_states(critic, inputs, walk)
    table = walk.use(critic.head).table[...]
    behind = jnp.einsum("BTD,VD->BTV", hidden, table, preferred_element_type=jnp.float32)  # of the state behind a token
    if inputs.spread is not None:
        behind = inputs.spread.with_exports(behind)
    predecessor = jnp.maximum(jnp.asarray(inputs.predecessor_BT), 0)
    return jnp.take_along_axis(behind[..., 0], predecessor, axis=1)
