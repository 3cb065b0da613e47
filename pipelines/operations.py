"""Writes the operation log in a training step where the configuration asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mock_scheduler.determinism.guard import read_back
from mock_scheduler.determinism.operations import OperationLogHeader, recorder
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.learner import Learner


@contextmanager
def record_operations(config: PipelineConfig, output_dir: Path, learner: Learner, *, step: int) -> Iterator[None]:
    """Write what this rank computes in the block to ``{output_dir}/operations``, where ``trace.operations`` is set.

    Every rank writes its own; it does not communicate. Raises ``OSError`` where the file cannot be written.
    """
    if not config.trace.operations:
        yield
        return
    header = OperationLogHeader(
        step=step,
        global_rank=learner.runtime.global_rank,
        world_size=learner.runtime.world_size,
        settings=read_back(os.environ),
    )
    chunks = {name: model.chunks for name, model in learner.models.items()}
    if learner.policy.reference is not None:
        chunks["reference"] = learner.policy.reference
    modules = {
        name if len(of_model) == 1 else f"{name}.chunk{index}": chunk
        for name, of_model in chunks.items()
        for index, chunk in enumerate(of_model)
    }
    with recorder.record_operations(output_dir, header, modules=modules):
        yield
