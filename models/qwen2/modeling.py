"""Qwen2 and Qwen2.5 text: the plain decoder, nothing added."""

from __future__ import annotations

from ..decoder import Decoder


class Qwen2(Decoder):
    """`Qwen2ForCausalLM`: rotary positions have one axis, so only row 0 of `positions_3BT` is read."""
