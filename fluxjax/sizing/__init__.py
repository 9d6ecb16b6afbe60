"""Finds out what a run needs of each device before it runs: its programs compiled without data, weights or GPUs."""
