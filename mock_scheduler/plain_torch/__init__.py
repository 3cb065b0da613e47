"""Traces a training in plain torch, without Megatron: parameters, gradients and moments by the model's own names."""
