"""Qwen2.5-VL: a decoder whose placeholder tokens are replaced by the features of a vision tower."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from sharding.walk import Walk

from ..config import Qwen25VLConfig
from ..decoder import Decoder
from ..inputs import VisionInput
from .vision import VisionTower


class Qwen25VL(Decoder):
    """`Qwen2_5_VLForConditionalGeneration`. M-RoPE follows from the rope settings of the text config."""

    def __init__(self, config: Qwen25VLConfig, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs)
        self.visual = VisionTower(config.vision, rngs)

    def embed(
        self,
        walk: Walk,
        tokens_BT: Int[Array, "B T"],
        feature_index_BT: Int[Array, "B T"] | None = None,
        vision: VisionInput | None = None,
    ) -> Float[Array, "B T D"]:
        """Token embeddings, with row `feature_index_BT` of the tower's features where that is not negative.

        Without `vision` the tower does not run: text-only batches cost nothing extra.
        """
        x = walk.use(self.embedding)(tokens_BT)
        if vision is None:
            return x
        if feature_index_BT is None:
            raise ValueError("pixels without feature_index_BT: nothing says which tokens they belong to")
        features = self.visual(walk, vision).astype(x.dtype)
        if vision.route is not None:
            features = vision.route(features)
        is_feature = feature_index_BT >= 0
        return jnp.where(is_feature[..., None], features[jnp.maximum(feature_index_BT, 0)], x)
