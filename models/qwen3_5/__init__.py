"""Qwen3.5: three layers of Gated DeltaNet before each layer of gated attention, and the tower of Qwen3-VL without
DeepStack."""
