"""Turns scored groups into the microbatches of a step."""
