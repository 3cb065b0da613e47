"""Recordings of rollouts: the step file, the manifest with its contract, writing and reading."""
