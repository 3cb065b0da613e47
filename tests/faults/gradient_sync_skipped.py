"""A planted fault: data-parallel rank 1 leaves out its first reduction of gradients.

Its next collective meets the reduction of the others, which aborts a rank or hangs. Run as the ``entry`` of an
alignment candidate.
"""

from __future__ import annotations

from typing import Any

from tests.faults.harness import Fired, run_with_fault


def plant(fired: Fired) -> None:
    """Replaces the start of the reduction of a group of buckets."""
    from megatron.core import parallel_state
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    start = _ParamAndGradBucketGroup.start_grad_sync

    def start_or_skip(self: Any, *arguments: Any, **options: Any) -> None:
        if parallel_state.get_data_parallel_rank() == 1 and not fired.count:
            fired.count += 1
            return
        start(self, *arguments, **options)

    _ParamAndGradBucketGroup.start_grad_sync = start_or_skip


if __name__ == "__main__":
    run_with_fault(plant)
