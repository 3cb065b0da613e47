"""What one recorded step says by itself, and sums by bucket as means."""

from __future__ import annotations

from mock_scheduler.batch import SamplingParams
from mock_scheduler.correction.comparable import VALID_COLUMN, zero_only_rows
from mock_scheduler.correction.engine.states import BUCKET_SUMS, FloatArray, bucket_names, exact_sum
from mock_scheduler.correction.report.scored_step import ScoredBatch
from mock_scheduler.correction.report.view import Bucket, StepHealth

#: A log-probability above 0 by no more than this is rounding.
ROUNDING = 1e-5


def recorded_health(step: ScoredBatch) -> StepHealth:
    """What needs no training log-probabilities."""
    batch, logprobs = step.batch, step.batch.rollout_logprobs
    versions, lags = batch.policy_versions, step.versions_behind
    return StepHealth(
        step=step.info.step,
        trajectories=batch.num_trajectories,
        rows=len(batch),
        response_tokens=len(logprobs),
        policy_version=step.info.policy_version,
        policy_versions=(int(versions.min()), int(versions.max())) if len(versions) else None,
        lag=None if lags is None or not len(lags) else (int(lags.min()), int(lags.max())),
        has_valid_column=VALID_COLUMN in batch.extras,
        invalid=0 if step.valid is None else int((~step.valid).sum()),
        zeros=int((logprobs == 0).sum()),
        positive=int((logprobs > ROUNDING).sum()),
        zero_rows=len(zero_only_rows(batch)),
    )


def describe_sampling(sampling: SamplingParams) -> str:
    """``temperature 1, top_p 1, top_k 0, log-probabilities processed``."""
    return (
        f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}, "
        f"log-probabilities {sampling.logprobs_mode}"
    )


def sum_buckets(table: FloatArray, edges: tuple[int, ...]) -> list[Bucket]:
    """The buckets that have tokens; table: float64 ``[S, len(edges), len(BUCKET_SUMS)]``."""
    buckets = []
    for index, name in enumerate(bucket_names(edges)):
        sums = {column: exact_sum(table[:, index, place]) for place, column in enumerate(BUCKET_SUMS)}
        tokens = sums["tokens"]
        if tokens:
            buckets.append(
                Bucket(
                    name=name,
                    tokens=int(tokens),
                    kl=-sums["log_ratio"] / tokens,
                    k3_kl=sums["k3"] / tokens,
                    mean_ratio=sums["weight"] / tokens,
                    effective_sample_size=min(sums["weight"] ** 2 / (tokens * sums["weight_squared"]), 1.0),
                )
            )
    return buckets
