"""Writes the operation log in a training step where the configuration asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mock_scheduler.config.schema import PipelineConfig
from mock_scheduler.determinism.guard import read_back
from mock_scheduler.determinism.operations import OperationLogHeader, recorder
from pipelines.megatron.trainer import PolicyTrainer


@contextmanager
def record_operations(config: PipelineConfig, output_dir: Path, trainer: PolicyTrainer, *, step: int) -> Iterator[None]:
    """Write what this rank computes in the block to ``{output_dir}/operations``, where ``trace.operations`` is set.

    Every rank writes its own; it does not communicate. Raises ``OSError`` where the file cannot be written.
    """
    if not config.trace.operations:
        yield
        return
    header = OperationLogHeader(
        step=step,
        global_rank=trainer.runtime.global_rank,
        world_size=trainer.runtime.world_size,
        settings=read_back(os.environ),
    )
    modules = {"policy": trainer.policy}
    if trainer.reference is not None:
        modules["reference"] = trainer.reference
    with recorder.record_operations(output_dir, header, modules=modules):
        yield
