"""Writes and reads recordings of rollouts: the step file, the manifest with its contract."""
