"""Sequences spread over devices: where their tokens lie, attention over them, the way of vision features."""
