"""Sums by position in the sequence and by policy lag."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.correction.engine.states import BUCKET_SUMS, LAG_EDGES, POSITION_EDGES, FloatArray
from mock_scheduler.correction.engine.tokens import ResponseTokens
from mock_scheduler.correction.engine.units import Leveled, Runs, Units


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BucketRuns:
    """Runs of tokens of one sequence and one bucket; cells: int64 ``[R]``, sequence · num_buckets + bucket."""

    runs: Runs
    cells: npt.NDArray[np.int64]
    num_buckets: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BucketValues:
    """The values for ``BUCKET_SUMS``; log_ratio, k3: float64 ``[M]``. Weights are 1 where there are none."""

    log_ratio: torch.Tensor
    k3: torch.Tensor
    weights: Leveled | None
    kept: Leveled


def position_runs(tokens: ResponseTokens) -> BucketRuns:
    """Finds runs of tokens by their position among the response tokens of the sequence."""
    if tokens.positions is not None:
        return _find_runs(tokens, tokens.positions.long(), POSITION_EDGES)
    # Positions count from 0, so the lengths say everything.
    edges = torch.tensor([*POSITION_EDGES, torch.iinfo(torch.int64).max])
    lengths = tokens.lengths[:, None].clamp(edges[:-1], edges[1:]).sub(edges[:-1]).flatten()
    cells = lengths.nonzero().flatten()
    return BucketRuns(runs=Runs(lengths[cells]), cells=cells.numpy(), num_buckets=len(POSITION_EDGES))


def lag_runs(tokens: ResponseTokens) -> BucketRuns:
    """Finds runs of tokens by the lag of the sampling policy, in versions."""
    assert tokens.versions_behind is not None
    return _find_runs(tokens, tokens.versions_behind.long(), LAG_EDGES)


def _find_runs(tokens: ResponseTokens, numbers: torch.Tensor, edges: tuple[int, ...]) -> BucketRuns:
    limits = torch.tensor(edges[1:], device=numbers.device)
    by_token = tokens.sequence() * len(edges) + torch.bucketize(numbers, limits, right=True)
    cells, lengths = torch.unique_consecutive(by_token, return_counts=True)
    return BucketRuns(runs=Runs(lengths.cpu()), cells=cells.cpu().numpy(), num_buckets=len(edges))


def sum_by_bucket(buckets: BucketRuns, values: BucketValues, *, sequences: Units) -> FloatArray:
    """Sums values per sequence and bucket: float64 ``[S, num_buckets, len(BUCKET_SUMS)]``."""
    runs = buckets.runs
    counts = runs.lengths.double().numpy()
    sequence = buckets.cells // buckets.num_buckets

    def summed(item: Leveled) -> FloatArray:
        if item.units is sequences:
            return np.asarray(item.values.cpu().numpy()[sequence] * counts)
        return runs.reduce(item.by_token(), "sum").cpu().numpy()

    weights = values.weights
    squares = None if weights is None else Leveled(values=weights.values.square(), units=weights.units)
    columns = (
        counts,
        runs.reduce(values.log_ratio, "sum").cpu().numpy(),
        runs.reduce(values.k3, "sum").cpu().numpy(),
        counts if weights is None else summed(weights),
        counts if squares is None else summed(squares),
        summed(Leveled(values=~values.kept.values, units=values.kept.units)),
    )
    num_sequences = len(sequences.runs.lengths)
    table = np.zeros((num_sequences * buckets.num_buckets, len(BUCKET_SUMS)))
    np.add.at(table, buckets.cells, np.stack(columns, axis=1))
    return table.reshape(num_sequences, buckets.num_buckets, len(BUCKET_SUMS))
