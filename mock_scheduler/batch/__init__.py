"""Defines the rollout batch: trajectories, named columns beside them, and the checks that make a batch consistent."""

from mock_scheduler.batch.checks import TENSOR_FIELDS
from mock_scheduler.batch.rollout_batch import IDENTITY_EXTRAS, PaddedBatch, RolloutBatch
from mock_scheduler.batch.row_digests import compute_prompt_digest
from mock_scheduler.batch.trajectory import (
    GroupKey,
    SampleIdentity,
    SamplingParams,
    Termination,
    Trajectory,
    sampling_as_json,
)

__all__ = [
    "GroupKey",
    "IDENTITY_EXTRAS",
    "PaddedBatch",
    "RolloutBatch",
    "SampleIdentity",
    "SamplingParams",
    "TENSOR_FIELDS",
    "Termination",
    "Trajectory",
    "compute_prompt_digest",
    "sampling_as_json",
]
