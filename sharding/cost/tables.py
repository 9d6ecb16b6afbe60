"""Published measurements that the default cost model is fitted to, and the hardware and model figures beside them.

Source of the measurements: FlexRL, appendix B (Table 3) and appendix C (Tables 4 and 5). Table 4 is the 262144-token
part of Table 5.
"""

import dataclasses

from ..spread.heads import deal_heads


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


QWEN2_5_VL_7B = ModelSizes(
    "qwen2.5-vl-7b",
    layers=28,
    width=3584,
    heads=28,
    kv_heads=4,
    head_size=128,
    mlp=18944,
    vocabulary=152064,
    vision_layers=32,
    vision_width=1280,
    vision_mlp=3420,
)
MODELS = {QWEN2_5_VL_7B.name: QWEN2_5_VL_7B}

# --- FlexRL, Table 3: forward flash_attn_var_len on one H800, 65536 tokens in all ---------------------

TABLE3_MODEL = ModelSizes("FlexRL Table 3", layers=1, width=8192, heads=64, kv_heads=8, head_size=128)
TABLE3_MS = {  # (sequences, tokens of each): milliseconds
    (1, 65536): 182.9,
    (4, 16384): 46.6,
    (8, 8192): 24.0,
    (16, 4096): 12.7,
    (32, 2048): 7.0,
    (64, 1024): 4.3,
}

# --- FlexRL, Table 5 (and 4): SeqAlltoAll of GQA attention, whole sequence length ---------------------

# No copied KV heads: with them, 32 devices would send 4/3 of the bytes of 16 in all, which their times do not show.
TABLE5_MODEL = ModelSizes("FlexRL Table 5", layers=1, width=4096, heads=32, kv_heads=8, head_size=128, share_kv=False)
NODE = 8  # GPUs a node, in both clusters
TABLE5_TOKENS = (131072, 262144, 524288, 1048576)  # the last were measured at some degrees only


def _cells(rows_ms: dict[int, tuple[float, ...]]) -> dict[tuple[int, int], float]:
    return {(p, tokens): ms for p, row in rows_ms.items() for tokens, ms in zip(TABLE5_TOKENS, row, strict=False)}


TABLE5_MS = {  # cluster: {(degree, tokens): milliseconds}
    "h200": _cells(
        {
            2: (9.970, 23.401, 52.472),
            4: (6.547, 16.107, 47.361),
            8: (3.501, 8.513, 22.462, 64.878),
            16: (7.871, 14.639, 36.554, 68.558),
            32: (6.355, 11.030, 24.150, 48.356),
        }
    ),
    "h800": _cells(
        {
            2: (11.079, 18.245, 60.709),
            4: (6.943, 16.480, 44.372),
            8: (6.360, 12.543, 28.686, 119.293),
            16: (12.333, 19.644, 41.430, 104.011),
            32: (17.219, 16.558, 31.089, 69.296),
        }
    ),
}

# --- assumed, because no table has it -----------------------------------------------------------------

PEAK_FLOPS = 989e12  # dense bfloat16 of an H800 or H200 (NVIDIA's data sheets)
LINEAR_UTILISATION = 0.5  # of it, in the large matrix products of projections and MLPs
VISION_UTILISATION = 0.4  # in the vision tower, whose matrices are a tenth of their size
ALPHA_WITHIN = 100e-6  # seconds that starting the all-to-alls of an attention costs within a node, at most
