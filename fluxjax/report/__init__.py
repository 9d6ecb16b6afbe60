"""The live display, metrics files, pictures and the summary of a run."""
