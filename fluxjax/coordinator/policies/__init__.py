"""Scheduling policies decide what happens when: one a file, and beside them what they consult."""
