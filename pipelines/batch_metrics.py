"""Metrics of a rollout batch come from its content alone, so a replayed batch gives the same numbers.

Contract: a row is a trajectory, or one of its turns. The same episodes give the same numbers either way, except
``duplicate_rows``, which counts rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from mock_scheduler.batch import RolloutBatch, Termination
from mock_scheduler.batch.columns import TensorColumn
from mock_scheduler.batch.versions import count_mixed, measure_staleness, trajectory_index
from mock_scheduler.errors import BatchError
from mock_scheduler.support.tensor_bytes import shape_text
from pipelines.batching.trajectories import trajectory_bounds

#: Extra columns that are looked at: bool, whether the episode was solved; int, moves of its shortest solution, or -1.
SUCCESS_EXTRA = "success"
OPTIMAL_LENGTH_EXTRA = "optimal_length"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Trajectories:
    """Rows [``first_rows[i]``, ``last_rows[i]``] of the batch are trajectory i: int64 ``[N]`` each."""

    batch: RolloutBatch
    first_rows: torch.Tensor
    last_rows: torch.Tensor


def compute_batch_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Computes means over trajectories, in float64.

    - ``reward``: total reward, the sum over a trajectory's rows, rounded to float32 as a row's total is.
    - ``success``: fraction whose last row has the extra ``success``; without this extra, whose last turn has a positive
      reward (in FrozenLake the goal was reached).
    - ``num_turns``: turns. ``truncated``: fraction whose last row was cut, by a limit or its environment.
    - ``num_tokens``: tokens. Where a turn's row begins with the whole row before, the repeated tokens count once.
    - ``duplicate_rows``: number of rows whose content occurred before in the batch.
    - ``group_reward_std``: mean over groups of the population standard deviation of the total reward; 0 means that no
      group has anything to learn from.

    Raises ``BatchError`` for an extra ``success`` other than one bool per row.
    """
    trajectories = _find_trajectories(batch)
    rewards = _total_rewards(trajectories)
    num_turns = batch.turn_offsets[trajectories.last_rows + 1] - batch.turn_offsets[trajectories.first_rows]
    is_truncated = batch.terminations[trajectories.last_rows] == int(Termination.TRUNCATED)
    return {
        "reward": float(rewards.mean()),
        "success": float(_successes(trajectories).double().mean()),
        "num_turns": float(num_turns.double().mean()),
        "num_tokens": float(_new_tokens(batch).sum() / len(rewards)),
        "truncated": float(is_truncated.double().mean()),
        "duplicate_rows": float(batch.num_duplicate_rows),
        "group_reward_std": _group_reward_std(rewards, batch.group_index[trajectories.first_rows], batch.num_groups),
    }


def compute_version_metrics(batch: RolloutBatch, policy_version: int) -> dict[str, float]:
    """Computes the staleness of response tokens, and the number of trajectories of several policy versions.

    ``staleness_mean``, ``_min``, ``_max``: by how many versions the policy that sampled a token was older than
    ``policy_version``, as ``mock-scheduler inspect`` has it; left out where the batch does not tell.
    """
    staleness = measure_staleness(batch, policy_version)
    metrics = {"mixed_versions": float(count_mixed(batch))}
    if staleness is not None:
        metrics |= {
            "staleness_mean": staleness.mean,
            "staleness_min": float(staleness.minimum),
            "staleness_max": float(staleness.maximum),
        }
    return metrics


def compute_success_by_tag(batch: RolloutBatch) -> dict[str, float]:
    """Computes ``success/{tag}``, the success rate of a tag's trajectories, and ``episodes/{tag}``, their
    number.

    A trajectory has the tag of its last row. Raises as ``compute_batch_metrics``.
    """
    trajectories = _find_trajectories(batch)
    tags = [batch.tags[row] for row in trajectories.last_rows.tolist()]
    successes = _successes(trajectories).tolist()
    metrics: dict[str, float] = {}
    for tag in sorted(set(tags)):
        of_tag = [success for name, success in zip(tags, successes, strict=True) if name == tag]
        metrics[f"success/{tag}"] = sum(of_tag) / len(of_tag)
        metrics[f"episodes/{tag}"] = float(len(of_tag))
    return metrics


def compute_success_by_length(batch: RolloutBatch) -> dict[str, float]:
    """Computes ``success/length_{n}`` and ``episodes/length_{n}`` of the trajectories whose shortest solution has n
    moves.

    n is the extra ``optimal_length`` of a trajectory's last row; a negative one is unknown and counts nowhere, and a
    batch without the extra gives nothing. Raises ``BatchError`` where it is not one int per row, and as
    ``compute_batch_metrics``.
    """
    trajectories = _find_trajectories(batch)
    lengths, successes = _last_values(trajectories, OPTIMAL_LENGTH_EXTRA, "int"), _successes(trajectories)
    if lengths is None:
        return {}
    metrics: dict[str, float] = {}
    for length in sorted({length for length in lengths.tolist() if length >= 0}):
        chosen = successes[lengths == length]
        metrics[f"success/length_{length}"] = float(chosen.double().mean())
        metrics[f"episodes/length_{length}"] = float(len(chosen))
    return metrics


def _find_trajectories(batch: RolloutBatch) -> _Trajectories:
    bounds = trajectory_bounds(trajectory_index(batch))
    return _Trajectories(batch=batch, first_rows=bounds[:-1], last_rows=bounds[1:] - 1)


def _total_rewards(trajectories: _Trajectories) -> torch.Tensor:
    """Adds up the reward of each trajectory, float64 ``[N]``, exact in float32; a single row keeps its stated total."""
    rewards: list[float] = trajectories.batch.rewards.tolist()
    bounds = zip(trajectories.first_rows.tolist(), trajectories.last_rows.tolist(), strict=True)
    totals = [math.fsum(rewards[first : last + 1]) for first, last in bounds]
    return torch.tensor(totals, dtype=torch.float32).double()


def _successes(trajectories: _Trajectories) -> torch.Tensor:
    """Whether each trajectory succeeded, bool ``[N]``."""
    stated = _last_values(trajectories, SUCCESS_EXTRA, "bool")
    if stated is not None:
        return stated
    batch = trajectories.batch
    starts, ends = batch.turn_offsets[trajectories.first_rows], batch.turn_offsets[trajectories.last_rows + 1]
    has_turns = ends > starts
    successes = torch.zeros(len(ends), dtype=torch.bool)
    successes[has_turns] = batch.turn_rewards[ends[has_turns] - 1] > 0
    return successes


def _new_tokens(batch: RolloutBatch) -> torch.Tensor:
    """Counts the tokens of each row that its trajectory's row before did not have, float64 ``[B]``."""
    new = batch.lengths.double()
    rows, index = torch.split(batch.tokens, batch.lengths.tolist()), trajectory_index(batch)
    for row in (np.flatnonzero(np.diff(index) == 0) + 1).tolist():
        before = rows[row - 1]
        if torch.equal(rows[row][: len(before)], before):
            new[row] -= len(before)
    return new


def _group_reward_std(rewards: torch.Tensor, group_index: torch.Tensor, num_groups: int) -> float:
    sizes = rewards.new_zeros(num_groups).index_add(0, group_index, torch.ones_like(rewards))
    means = rewards.new_zeros(num_groups).index_add(0, group_index, rewards) / sizes
    squares = (rewards - means[group_index]).square()
    variances = rewards.new_zeros(num_groups).index_add(0, group_index, squares) / sizes
    return float(variances.sqrt().mean())


def _last_values(trajectories: _Trajectories, name: str, kind: Literal["bool", "int"]) -> torch.Tensor | None:
    """Reads the extra of each trajectory's last row, ``[N]``, from a tensor or JSON column; ``None`` where there is
    none.
    """
    column = trajectories.batch.extras.get(name)
    if column is None:
        return None
    if isinstance(column, TensorColumn):
        values, offsets = column.values, column.offsets
        is_kind = values.dtype is torch.bool if kind == "bool" else not _is_bool_or_real(values)
        if offsets is None and values.dim() == 1 and is_kind:
            return values[trajectories.last_rows]
        found = f"{'ragged ' if offsets is not None else ''}{shape_text(values)}"
    else:
        types = {type(item) for item in column.items}
        if types == {bool if kind == "bool" else int}:
            return torch.tensor(column.items)[trajectories.last_rows]
        found = f"JSON of {', '.join(sorted(found_type.__name__ for found_type in types))}"
    raise BatchError(f"extra {name!r} is {found}; expected one {kind} per row, from which the metrics are computed")


def _is_bool_or_real(values: torch.Tensor) -> bool:
    return values.dtype is torch.bool or values.is_floating_point() or values.is_complex()
