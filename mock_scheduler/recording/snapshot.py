"""A copy of a step that nothing else refers to, so that it can be written while the training loop goes on.

Contract: what is mutable (tensors, and lists and dicts in JSON) is copied; what is not is shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.columns import Column, JsonColumn, TensorColumn
from mock_scheduler.digests import JSON
from mock_scheduler.recording.step_info import StepInfo


def copy_batch(batch: RolloutBatch) -> RolloutBatch:
    """An equal batch with its own memory."""
    return replace(
        batch,
        tokens=batch.tokens.clone(),
        row_offsets=batch.row_offsets.clone(),
        response_mask=batch.response_mask.clone(),
        rollout_logprobs=batch.rollout_logprobs.clone(),
        turn_offsets=batch.turn_offsets.clone(),
        turn_rewards=batch.turn_rewards.clone(),
        policy_versions=batch.policy_versions.clone(),
        rewards=batch.rewards.clone(),
        terminations=batch.terminations.clone(),
        prompt_lengths=batch.prompt_lengths.clone(),
        extras={name: _copy_column(column) for name, column in batch.extras.items()},
        meta={name: _copy_json(value) for name, value in batch.meta.items()},
    )


def copy_info(info: StepInfo) -> StepInfo:
    """An equal info with its own JSON."""
    return replace(
        info,
        metrics=dict(info.metrics),
        scheduler_state={name: _copy_json(value) for name, value in info.scheduler_state.items()},
        data_cursor=_copy_json(info.data_cursor),
    )


def _copy_column(column: Column) -> Column:
    if isinstance(column, JsonColumn):
        return JsonColumn(items=tuple(_copy_json(item) for item in column.items))
    offsets = None if column.offsets is None else column.offsets.clone()
    return TensorColumn(values=column.values.clone(), offsets=offsets)


def _copy_json(value: JSON) -> JSON:
    if isinstance(value, Mapping):
        return {name: _copy_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy_json(item) for item in value]
    return value
