"""Weights on their way to rollout servers: versions, routes, and the proof that they arrived."""
