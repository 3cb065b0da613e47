"""Has the section ``algorithm.rollout_correction``, and compiles it to rules; imports no torch."""
