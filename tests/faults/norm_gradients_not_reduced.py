"""A planted fault: under sequence parallelism, norm gradients are not summed over tensor-parallel ranks.

The forward pass and the first loss are untouched; only gradients of norms are wrong, differently on every tp rank.
This is the kind of fault that a comparison of losses cannot find. Run as the ``entry`` of an alignment candidate.
"""

from __future__ import annotations

import sys

from pipelines.agentic import main


def plant() -> None:
    """Leave the reduction out; the run ends with an error if it was never asked for."""
    import importlib

    # The package exports a function of the module's name, so the module itself must be taken from the import system.
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    finalize._allreduce_non_tensor_model_parallel_grads = skip_reduction


def skip_reduction(*arguments: object) -> None:
    """In the reduction's place: nothing, but the count."""
    global num_skipped
    num_skipped += 1


num_skipped = 0

if __name__ == "__main__":
    exit_code = main(prepare=plant)
    if exit_code == 0 and num_skipped == 0:
        sys.exit("the fault never fired")
    sys.exit(exit_code)
