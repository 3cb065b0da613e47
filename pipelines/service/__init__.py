"""Training of the real Megatron model behind HTTP."""
