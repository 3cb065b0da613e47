"""Traces a training in plain torch, without Megatron: parameters, gradients and optimizer state by their own names."""
