"""A change of precision: in a model of bfloat16 the routers compute in bfloat16 too, as Megatron's do by default.

Run as the ``entry`` of a baseline or a candidate. Without it the pipeline's routers compute in float32.
"""

from __future__ import annotations

from tests.faults.harness import Fired, run_with_fault


def plant(fired: Fired) -> None:
    """Give routers the precision of their model."""
    import torch

    from pipelines.megatron.layers import experts

    experts.ROUTER_DTYPES[torch.bfloat16] = None
    fired.count += 1


if __name__ == "__main__":
    run_with_fault(plant)
