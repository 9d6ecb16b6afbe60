"""Qwen3.5: three layers of Gated DeltaNet to one of gated attention, the tower of Qwen3-VL without DeepStack."""
