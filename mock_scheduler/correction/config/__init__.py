"""The section ``algorithm.rollout_correction``, and its compilation to rules; imports no torch."""
