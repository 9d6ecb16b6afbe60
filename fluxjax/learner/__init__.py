"""Gradients and optimizer steps, from the warm start through RL."""
