"""Attention over packed rows and over streams of tiles."""
