"""Computes a run's memory on each device before it runs, from its programs compiled without data, weights or GPUs."""
