"""Compares two replays of the same steps, finds their first difference, and names the setting that is responsible."""
