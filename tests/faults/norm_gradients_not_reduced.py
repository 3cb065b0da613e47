"""A planted fault: under sequence parallelism, norm gradients are not summed over tensor-parallel ranks.

The forward pass and the first loss are untouched; only gradients of norms are wrong, differently on every tp rank.
This is the kind of fault that a comparison of losses cannot find. Run as the ``entry`` of an alignment candidate.
"""

from __future__ import annotations

from typing import Any

from tests.faults.harness import Fired, run_with_fault


def plant(fired: Fired) -> None:
    """Leave the reduction out."""
    import importlib

    def skip_reduction(*arguments: object) -> None:
        fired.count += 1

    # The package exports a function of the module's name, so the module itself must be taken from the import system.
    finalize: Any = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    finalize._allreduce_non_tensor_model_parallel_grads = skip_reduction


if __name__ == "__main__":
    run_with_fault(plant)
