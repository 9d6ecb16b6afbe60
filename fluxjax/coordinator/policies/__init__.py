"""Scheduling policies, one in each file, and their helpers. A policy decides the next instructions."""
