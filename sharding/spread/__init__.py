"""Sequences that several devices share: positions of their tokens, attention over them, routes of features."""
