"""Trains as train.py does, with a kernel of mine in it: the candidate `my-kernel` of align.yaml runs this file."""

import torch
import train

calls = 0


class MySilu(torch.autograd.Function):
    """Computes x * sigmoid(x). Put your kernel here: its forward pass and its backward pass."""

    @staticmethod
    def forward(ctx, x):
        global calls
        calls += 1
        gate = torch.sigmoid(x)
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx, grad):
        x, gate = ctx.saved_tensors
        # To see a fault found, leave `(1 - gate)` out: the losses hardly move, and the verdict is `diverged`.
        return grad * gate * (1 + x * (1 - gate))


def main() -> None:
    train.activation = MySilu.apply  # before the model is built: what is built already keeps the old function
    try:
        train.main()
    except SystemExit as end:  # an aligned run ends itself in this way after its last step
        if end.code:
            raise
    if not calls:  # else a kernel that never ran would look like a perfect one
        raise SystemExit("my_kernel.py: the kernel was never called, so the run shows nothing about it")
    print(f"my_kernel.py: the kernel was called {calls} times in this process")


if __name__ == "__main__":
    main()
