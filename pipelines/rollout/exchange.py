"""Ranks give each other the rows they played, so that every rank holds the same whole batch.

Rows travel as step files, the format of the recording: typed, checked by digest, and no pickle.
"""

from __future__ import annotations

from collections.abc import Sequence

from mock_scheduler.batch import RolloutBatch, SamplingParams, Trajectory
from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.recording.step.step_file import decode_step, encode_step
from mock_scheduler.recording.step.step_info import StepInfo


def gather_rows(
    rows: Sequence[Trajectory], info: StepInfo, ranks: RankGroup, *, sampling: SamplingParams, group_size: int
) -> RolloutBatch:
    """The union of all ranks' rows, in canonical order, on every rank; a rank may have none. Collective.

    Raises ``BatchError`` where the groups of all ranks' rows together are not whole.
    """
    if ranks.world_size == 1:
        return RolloutBatch.from_trajectories(rows, sampling=sampling, group_size=group_size)
    # A block of one rank may hold a part of a group, so only the union is asked for whole groups.
    own = RolloutBatch.from_trajectories(rows, sampling=sampling, group_size=None) if rows else None
    parts = ranks.gather(encode_step(own, info).to_bytes() if own else b"")
    gathered = [row for part in parts if part for row in decode_step(part)[0].rows()]
    return RolloutBatch.from_trajectories(gathered, sampling=sampling, group_size=group_size)
