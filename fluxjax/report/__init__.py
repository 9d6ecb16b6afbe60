"""The user's view of a run: live display, metrics files, pictures and the summary of a run."""
