"""Sequences that are spread over devices: the places of their tokens, attention over them, routes of features."""
