"""Spreads work and weights over devices. This package refers to no model, no algorithm and no configuration."""
