"""Kernels of attention, of the gated delta rule, and of log-probs over the vocabulary."""
