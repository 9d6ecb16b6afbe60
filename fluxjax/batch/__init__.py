"""Scored groups become the microbatches of a step: planned for the strategy, packed, written into arrays."""
