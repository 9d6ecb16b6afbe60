"""Weights on their way to rollout servers: versions, routes, and the proof that what arrived is what was sent."""
