"""The section ``algorithm.rollout_correction`` and the rules that it compiles to; imports no torch."""
