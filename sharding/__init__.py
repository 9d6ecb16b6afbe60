"""Spreads work and weights over devices. This package knows no model, no algorithm and no configuration."""
