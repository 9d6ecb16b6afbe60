"""A run from its configuration to its summary: `FluxTrainer`, checkpoints, callbacks, reports."""
