"""A planted fault: gradients are clipped at a norm 2 % above the configured one."""

from __future__ import annotations

from tests.faults.harness import Fired, run_with_fault


def plant(fired: Fired) -> None:
    """Move the threshold that the optimizer clips by."""
    from megatron.core.optimizer import optimizer

    clip = optimizer.clip_grad_by_total_norm_fp32

    def clip_later(parameters: object, max_norm: float, *arguments: object, **named: object) -> None:
        fired.count += 1
        clip(parameters, 1.02 * max_norm, *arguments, **named)

    optimizer.clip_grad_by_total_norm_fp32 = clip_later


if __name__ == "__main__":
    run_with_fault(plant)
