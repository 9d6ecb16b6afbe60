"""Prompts: their sources, the order in which they are drawn, and their preparation for the model."""
