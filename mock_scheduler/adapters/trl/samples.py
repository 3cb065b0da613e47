"""Samples of TRL's asynchronous trainer as a rollout batch and back, bit for bit.

The trainer takes ``RolloutSample`` objects from a queue, one by one. Contract: ``decode(encode(samples))`` has the
samples in their order, each field with every type and bit. ``native/{field}`` holds a field that the core fields do not
give back; of the three arrays it is null where they do. ``identity/row`` is a sample's place in the queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.adapters.plain_values import from_json, to_json
from mock_scheduler.adapters.token_lists import LARGEST_FLOAT32
from mock_scheduler.batch import IDENTITY_EXTRAS, RolloutBatch, SampleIdentity, SamplingParams, Termination, Trajectory
from mock_scheduler.batch.columns import JsonColumn, RowValue, TensorColumn
from mock_scheduler.errors import BatchError
from mock_scheduler.scheduler import RolloutRequest

#: A ``RolloutSample`` of TRL, whose attributes are read by name.
Sample: TypeAlias = Any

_ROW = f"{IDENTITY_EXTRAS}row"
_NATIVE = "native/"
_ARRAYS = ("input_ids", "completion_mask", "old_log_probs")
_FIELDS = ("prompt", "completion", "advantage", "model_version", "group_id", "metrics", "enqueued_at")


class SampleCodec:
    """A ``BatchCodec`` for AsyncGRPOTrainer. ``make_sample``: TRL's class; None: it is imported to decode."""

    def __init__(self, *, sampling: SamplingParams, make_sample: Callable[..., Sample] | None = None) -> None:
        self._sampling = sampling
        self._make_sample = make_sample

    def encode(self, native: Sequence[Sample], request: RolloutRequest) -> RolloutBatch:
        """Return the batch; raises ``BatchError`` for a sample of another form."""
        places: Counter[int] = Counter()
        rows = []
        for row, sample in enumerate(native):
            rows.append(self._encode_row(sample, row, places[sample.group_id], request))
            places[sample.group_id] += 1
        return RolloutBatch.from_trajectories(rows, sampling=self._sampling, group_size=None)

    def _encode_row(self, sample: Sample, row: int, place: int, request: RolloutRequest) -> Trajectory:
        arrays = {name: getattr(sample, name) for name in _ARRAYS}
        sizes = {name: value.shape for name, value in arrays.items() if isinstance(value, np.ndarray)}
        if len(sizes) < len(_ARRAYS) or len(set(sizes.values())) != 1 or sample.input_ids.ndim != 1:
            found = {name: sizes.get(name, type(value).__name__) for name, value in arrays.items()}
            raise BatchError(f"sample {row}: {found}; expected three NumPy arrays of one length")
        tokens = sample.input_ids.astype(np.int32)
        mask = sample.completion_mask != 0
        is_number = np.abs(sample.old_log_probs) <= LARGEST_FLOAT32
        logprobs = np.where(is_number, sample.old_log_probs, 0).astype(np.float32)[mask]
        core = _arrays_of(tokens, mask, logprobs)
        extras: dict[str, RowValue] = {
            f"{_NATIVE}{name}": None if _is_same(value, core[name]) else to_json(value, f"sample {row}: {name}")
            for name, value in arrays.items()
        }
        for name in _FIELDS:
            extras[f"{_NATIVE}{name}"] = to_json(getattr(sample, name), f"sample {row}: {name}")
        extras[_ROW] = torch.tensor(row, dtype=torch.int64)
        first = np.flatnonzero(mask)
        return Trajectory(
            identity=SampleIdentity(
                scheduler_id=request.scheduler_id, group_id=int(sample.group_id), episode_id=0, env_id=place, turn=0
            ),
            tokens=torch.from_numpy(tokens),
            response_mask=torch.from_numpy(mask),
            rollout_logprobs=torch.from_numpy(logprobs),
            turn_rewards=torch.zeros(1),
            policy_versions=torch.tensor([sample.model_version], dtype=torch.int32),
            termination=Termination.TERMINATED,
            prompt_length=int(first[0]) if len(first) else len(tokens),
            tag="trl",
            reward=_reward_of(sample),
            extras=extras,
        )

    def decode(self, batch: RolloutBatch) -> list[Sample]:
        """Return the samples in the order of the queue."""
        make_sample = self._make_sample
        if make_sample is None:
            from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

            make_sample = RolloutSample
        places = batch.extras[_ROW]
        assert isinstance(places, TensorColumn)
        rows = batch.rows()
        columns = {name: _items(batch, name) for name in (*_ARRAYS, *_FIELDS)}
        samples = []
        for row in np.argsort(places.values.numpy(), kind="stable").tolist():
            core = _arrays_of(
                rows[row].tokens.numpy(), rows[row].response_mask.numpy(), rows[row].rollout_logprobs.numpy()
            )
            values = {name: from_json(columns[name][row]) for name in _FIELDS}
            for name in _ARRAYS:
                item = columns[name][row]
                values[name] = core[name] if item is None else from_json(item)
            samples.append(make_sample(**values))
        return samples


def _arrays_of(
    tokens: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_], logprobs: npt.NDArray[np.float32]
) -> dict[str, npt.NDArray[Any]]:
    """Give the arrays that TRL's own worker makes of the core fields."""
    whole = np.zeros(len(tokens), dtype=np.float32)
    whole[mask] = logprobs
    return {"input_ids": tokens.astype(np.int64), "completion_mask": mask.astype(np.int64), "old_log_probs": whole}


def _is_same(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def _reward_of(sample: Sample) -> float | None:
    """Give the reward that the worker logs with a sample, where float32 has it, for those who look at the recording."""
    reward = sample.metrics.get("reward") if isinstance(sample.metrics, dict) else None
    return float(np.float32(reward)) if isinstance(reward, float) and abs(reward) <= LARGEST_FLOAT32 else None


def _items(batch: RolloutBatch, name: str) -> Sequence[Any]:
    column = batch.extras[f"{_NATIVE}{name}"]
    assert isinstance(column, JsonColumn)
    return column.items
