"""Carries out what the coordinator says: engines generate, the scorer scores, the trainer trains."""
