"""The sizes of a model that its cost depends on, and what a GPU of its cluster is assumed to achieve."""

import dataclasses

from ..spread.heads import deal_heads

PEAK_FLOPS = 989e12  # dense bfloat16 of an H800 or H200 (NVIDIA's data sheets)
LINEAR_UTILISATION = 0.5  # assumed: of it, in the large matrix products of projections and MLPs


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """The sizes that a model's cost depends on. `value_bytes` is the size of an activation on the wire, 2 in bfloat16;
    without `share_kv`, heads are neither filled up nor copied for groups that they can't be dealt to evenly."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int = 0
    vocabulary: int = 0
    vision_layers: int = 0
    vision_width: int = 0
    vision_mlp: int = 0
    patch_values: int = 3 * 2 * 14 * 14  # numbers in a patch: channels x frames x height x width
    patches_per_token: int = 4
    value_bytes: int = 2
    share_kv: bool = True

    def linear_flops(self) -> float:
        """FLOPs a token of one forward pass of everything but attention scores: projections, MLPs, output head."""
        channels = self.heads * self.head_size, self.kv_heads * self.head_size
        layer = self.width * (2 * channels[0] + 2 * channels[1] + 3 * self.mlp)
        return 2.0 * (self.layers * layer + self.width * self.vocabulary)

    def vision_flops(self) -> float:
        """FLOPs a patch of one forward pass of the vision tower and its merger. Attention scores are left out: most
        layers see windows of 64 patches, 2 % of the rest."""
        tower = self.vision_layers * (4 * self.vision_width**2 + 3 * self.vision_width * self.vision_mlp)
        merged = self.patches_per_token * self.vision_width  # a token's patches side by side
        merger = (merged**2 + merged * self.width) / self.patches_per_token if self.vision_layers else 0.0
        return 2.0 * (self.patch_values * self.vision_width + tower + merger)

    def heads_of(self, degree: int) -> tuple[int, int]:
        """Returns (query heads, KV heads) that travel to all devices of a group and are computed there: see
        `sharding.spread.heads`. Raises PlanError for a degree above the number of query heads."""
        if not self.share_kv:
            return self.heads, self.kv_heads
        deal = deal_heads(self.heads, self.kv_heads, degree)
        return deal.local_queries * degree, deal.local_kv * degree

    def wire_bytes(self, degree: int) -> float:
        """Bytes a token of one attention in the all-to-alls of `degree` devices: queries and output, keys and values,
        those that stay on their device included. Raises PlanError like `heads_of`."""
        return 2.0 * sum(self.heads_of(degree)) * self.head_size * self.value_bytes
