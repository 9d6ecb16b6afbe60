"""Attention over packed rows and over streams of tiles; log-probabilities over the vocabulary on NVIDIA GPUs."""
