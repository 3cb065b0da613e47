"""Trains the real Megatron model behind HTTP."""
