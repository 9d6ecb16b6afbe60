"""The cost model: seconds of attention, all-to-alls, linear work and vision tower, for planning and for simulation."""

from .model import AttentionFit, CostError, CostModel, Link
from .sizes import ModelSizes

__all__ = ["AttentionFit", "CostError", "CostModel", "Link", "ModelSizes"]
