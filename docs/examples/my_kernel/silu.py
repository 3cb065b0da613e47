"""The kernel: SiLU with a backward pass of its own, and a backward pass that is wrong."""

import torch


class MySilu(torch.autograd.Function):
    """Computes x * sigmoid(x); rounds otherwise than torch's own."""

    @staticmethod
    def forward(ctx, x):
        gate = torch.sigmoid(x)
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx, grad):
        x, gate = ctx.saved_tensors
        return grad * gate * (1 + x * (1 - gate))


class WrongSilu(MySilu):
    """Forgets a factor in the backward pass; the forward pass is right."""

    @staticmethod
    def backward(ctx, grad):
        x, gate = ctx.saved_tensors
        return grad * gate * (1 + x)


def my_silu(x, inplace=False):
    return MySilu.apply(x)


def wrong_silu(x, inplace=False):
    return WrongSilu.apply(x)
