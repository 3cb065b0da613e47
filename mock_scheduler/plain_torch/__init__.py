"""Traces a training in plain torch, without Megatron: parameters, gradients and optimizer state by the model's names."""
