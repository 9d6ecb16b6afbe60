"""Scheduling policies, which decide the next instructions, one in each file; and the helpers that they consult."""
