"""Gradients and optimizer steps: the learner, what it is given step by step, and the warm start before RL."""
