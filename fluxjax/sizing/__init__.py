"""Computes a run's memory on each device before the run, by compiling its programs without data, weights or GPUs."""
