"""Ranks give each other the rows they played, so that every rank holds the same whole batch.

Rows travel as step files, the format of the recording: typed, checked by digest, and no pickle.
"""

from __future__ import annotations

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.recording.step.container import StepInfo, decode_step, encode_step


def gather_rows(batch: RolloutBatch | None, info: StepInfo, ranks: RankGroup) -> RolloutBatch:
    """The union of all ranks' rows, in canonical order, on every rank. ``None``: this rank played none. Collective."""
    parts = ranks.gather(encode_step(batch, info).to_bytes() if batch else b"")
    return RolloutBatch.concat([decode_step(part)[0] for part in parts if part])
