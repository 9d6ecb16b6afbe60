"""Qwen3-VL: a vision tower with DeepStack, interleaved M-RoPE, weights in Hugging Face's names."""
