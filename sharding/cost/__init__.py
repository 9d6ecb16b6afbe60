"""The cost model: seconds of attention, all-to-alls, linear work and vision tower, for planning and for simulation."""

from .fit import AttentionFit, CostError, Link
from .model import CostModel
from .tables import MODELS, QWEN2_5_VL_7B, ModelSizes

__all__ = ["MODELS", "QWEN2_5_VL_7B", "AttentionFit", "CostError", "CostModel", "Link", "ModelSizes"]
