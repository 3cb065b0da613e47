"""Sums, maxima and minima over runs of consecutive tokens.

Contract: what a run gives depends on its own values alone, to the last bit, wherever it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from mock_scheduler.correction.engine.states import FloatArray

Reduction = Literal["sum", "max", "min"]

#: Of a run without values.
EMPTY = {"sum": 0.0, "max": -torch.inf, "min": torch.inf}

_UFUNCS = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class Runs:
    """R runs that follow one another, and how long each is: ``lengths``, int64 ``[R]`` on the CPU."""

    def __init__(self, lengths: torch.Tensor) -> None:
        self.lengths = lengths
        self.num_values = int(lengths.sum())
        counts = lengths.numpy()
        filled = counts > 0
        self._starts = (counts.cumsum() - counts)[filled]
        self._filled = None if filled.all() else filled

    def counts(self, device: torch.device) -> torch.Tensor:
        """float64 ``[R]``: how long each is."""
        return self._counts if device.type == "cpu" else self._counts.to(device)

    @cached_property
    def _counts(self) -> torch.Tensor:
        return self.lengths.double()

    def reduce(self, values: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        """float64 ``[R]`` of values, on their device. Of bool ones the sum is the number of those that are True.

        0, -inf or inf for an empty run.
        """
        if values.is_cpu:
            return torch.from_numpy(self.reduce_to_arrays(values, (reduction,))[0])
        lengths = self.lengths.to(values.device)
        return torch.segment_reduce(values.double(), reduction, lengths=lengths, initial=EMPTY[reduction], unsafe=True)

    def reduce_to_arrays(self, values: torch.Tensor, reductions: Sequence[Reduction]) -> list[FloatArray]:
        """The same by several reductions, on the CPU."""
        if not values.is_cpu:
            return [self.reduce(values, reduction).cpu().numpy() for reduction in reductions]
        array = values.numpy()
        if array.dtype == np.bool_ and reductions == ("sum",):
            # A third of the time that converting them takes, and exact: no run has 2^31 tokens.
            reduced = [np.add.reduceat(array.view(np.uint8), self._starts, dtype=np.int32).astype(np.float64)]
        else:
            array = array.astype(np.float64, copy=False)
            reduced = [_UFUNCS[reduction].reduceat(array, self._starts) for reduction in reductions]
        if self._filled is None:
            return reduced
        return [self._fill(column, EMPTY[reduction]) for column, reduction in zip(reduced, reductions, strict=True)]

    def _fill(self, column: FloatArray, empty: float) -> FloatArray:
        assert self._filled is not None
        every = np.full(len(self._filled), empty)
        every[self._filled] = column
        return every

    def where_filled(self, values: torch.Tensor, empty: float) -> torch.Tensor:
        """Values ``[R]``, and ``empty`` for runs without a token."""
        if self._filled is None:
            return values
        return torch.where(torch.from_numpy(self._filled).to(values.device), values, empty)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Values ``[R]``, each as often as its run is long."""
        if values.is_cpu:
            return torch.from_numpy(np.repeat(values.numpy(), self.lengths.numpy()))
        return torch.repeat_interleave(values, self.lengths.to(values.device), output_size=self.num_values)
