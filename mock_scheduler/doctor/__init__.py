"""Finds where two runs of the same step first differ, by their operation logs, and the responsible setting.

Contract: imports no torch.
"""

from mock_scheduler.doctor.causes import Cause, SettingFound, State, find_cause
from mock_scheduler.doctor.comparison import RankComparison, StepComparison, compare_rank, compare_step
from mock_scheduler.doctor.differences import Difference, DifferenceKind, ReadableLog

__all__ = [
    "Cause",
    "Difference",
    "DifferenceKind",
    "RankComparison",
    "ReadableLog",
    "SettingFound",
    "State",
    "StepComparison",
    "compare_rank",
    "compare_step",
    "find_cause",
]
