"""Prompts: where they come from, in which order they are drawn, and how they are made ready for the model."""
