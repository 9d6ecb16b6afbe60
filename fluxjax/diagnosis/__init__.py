"""Checks of an installation, of data and rewards, and of a server beside the trainer: see `fluxjax.doctor`."""
