"""Fuzzers: many random inputs of one kind, by count and seed."""
