"""A copy of a step that nothing else refers to, so that it can be written while the training loop goes on.

Contract: what is mutable (tensors, and lists and dicts in JSON) is copied; what is not is shared. Nothing is checked
again: the training loop waits for the copy.
"""

from __future__ import annotations

from dataclasses import replace

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.columns import copy_json
from mock_scheduler.recording.step.step_info import StepInfo


def copy_batch(batch: RolloutBatch) -> RolloutBatch:
    """An equal batch with its own memory."""
    return batch.copy()


def copy_info(info: StepInfo) -> StepInfo:
    """An equal info with its own JSON."""
    return replace(
        info,
        metrics=dict(info.metrics),
        scheduler_state={name: copy_json(value) for name, value in info.scheduler_state.items()},
        data_cursor=copy_json(info.data_cursor),
    )
