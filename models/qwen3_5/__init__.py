"""Qwen3.5: three layers of Gated DeltaNet before each of gated attention, and Qwen3-VL's tower without DeepStack."""
