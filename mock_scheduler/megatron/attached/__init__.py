"""Attaches the instruments to a training on Megatron-core that somebody else wrote."""
