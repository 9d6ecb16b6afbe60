"""Qwen2.5-VL: vision tower, decoder with M-RoPE, weights in Hugging Face's names, positions of media tokens."""
