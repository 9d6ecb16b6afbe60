"""Scheduling policies, which decide the next instructions, one in each file; and helpers of policies."""
