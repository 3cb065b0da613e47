"""A planted fault: positions run on through a packed line, instead of starting from 0 with every row.

Rows still attend within themselves. Rotary embeddings turn queries and keys by the difference of positions, so that
with them alone nothing changes but rounding; it is learned positions that show the fault. Run as the ``entry`` of an
alignment candidate.
"""

from __future__ import annotations

from typing import Any

from tests.faults.harness import Fired, run_with_fault


def plant(fired: Fired) -> None:
    """Give the model the columns of the line as positions."""
    from dataclasses import replace

    import torch

    from pipelines.batching.plan import MicroBatch
    from pipelines.megatron import learner
    from pipelines.megatron.places import OwnBatch, own_batch
    from pipelines.megatron.process_of_rank import Runtime

    def own_batch_by_column(batch: MicroBatch, runtime: Runtime, **options: Any) -> OwnBatch:
        own = own_batch(batch, runtime, **options)
        columns = torch.arange(batch.tokens.shape[1], device=runtime.device).expand_as(own.inputs.tokens)
        fired.count += 1
        return replace(own, inputs=replace(own.inputs, positions=columns))

    learner.own_batch = own_batch_by_column  # type: ignore[attr-defined]


if __name__ == "__main__":
    run_with_fault(plant)
