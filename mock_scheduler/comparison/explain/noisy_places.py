"""Whether a place in a tensor is noisy by itself: its own difference among the perturbed runs.

A place (a token, a head, an expert, a rank's piece) stands out in a candidate where its relative difference is 5 times
the usual one of its tensor, as ``locality`` finds it. Ill-conditioned places do so in any honest run, so the perturbed
runs' traces are read again for just these: the place is suspicious where it differs by more than 3 times its difference
in any of them. So large traces cost nothing unless something stands out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

import torch

from mock_scheduler.comparison.bounds.measured import NoiseBounds
from mock_scheduler.comparison.findings import Finding
from mock_scheduler.comparison.pairing.pairs import TensorPair, pair_up
from mock_scheduler.comparison.pairing.tokens import align_tokens
from mock_scheduler.comparison.residuals import Locality
from mock_scheduler.comparison.thresholds import SAFETY
from mock_scheduler.trace.entries import DimName
from mock_scheduler.trace.full.reader import TraceReader, open_trace
from mock_scheduler.trace.sketch.files import has_full


class PlaceNoise:
    """Opens the perturbed runs' traces for reading places; a context manager."""

    def __init__(self, noise: NoiseBounds | None) -> None:
        self._noise = noise
        self._stack = ExitStack()
        self._readers: list[TraceReader] = []

    def __enter__(self) -> PlaceNoise:
        for path in self._noise.trace_dirs if self._noise is not None else ():
            # A sketch has no places, and a trace may have been removed since the noise was measured.
            if path.is_dir() and has_full(path):
                self._readers.append(self._stack.enter_context(open_trace(path)))
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def is_known(self) -> bool:
        """Whether there is a whole trace of any perturbed run."""
        return bool(self._readers)

    def confirm(
        self, found: Sequence[Locality], pair: TensorPair, dims: tuple[DimName, ...], baseline: TraceReader
    ) -> tuple[Locality, ...]:
        """Returns the places differing by more than their own noise allows, with both figures.

        Args:
            found: Places standing out.
            pair: Of the candidate, in the baseline's order.
            dims: What each dimension counts.
            baseline: Reader of the baseline's trace.

        Raises:
            TraceError: A file is damaged.
        """
        assert self._noise is not None
        confirmed = []
        noisy = self._read(pair, baseline) if found else []
        for place in found:
            own = _relative(pair, dims.index(place.dim), place)
            # Without any run to compare with, every place counts as noisy.
            usual = max((_relative(other, dims.index(place.dim), place) for other in noisy), default=math.inf)
            # SAFETY times the worst run, as whole tensors are bounded.
            if own > SAFETY * max(usual, self._noise.smallest):
                confirmed.append(replace(place, relative=own, noise=usual))
        return tuple(confirmed)

    def _read(self, pair: TensorPair, baseline: TraceReader) -> list[TensorPair]:
        """Reads the same tensor of the perturbed runs, each with the baseline."""
        key, found = pair.key, []
        ours = baseline.merge(key)
        for reader in self._readers:
            if key.step in reader.steps and reader.has(key):
                # Places are indices of the baseline, so its order of tokens holds for every run.
                tokens = align_tokens(baseline.footer(key.step).rows, reader.footer(key.step).rows)
                other = pair_up(key, (ours, reader.merge(key)), tokens)
                if not isinstance(other, Finding):
                    found.append(other)
        return found


def _relative(pair: TensorPair, dim: int, place: Locality) -> float:
    """Returns ||a - b|| / ||a|| of the indices of a place; infinite where only the baseline is 0."""
    count = place.last - place.first + 1
    mine, other = (side.narrow(dim, place.first, count).double() for side in (pair.baseline, pair.candidate))
    if pair.present is not None:
        kept = pair.present.expand_as(pair.baseline).narrow(dim, place.first, count)
        mine, other = (torch.where(kept, side, 0.0) for side in (mine, other))
    distance, size = float((mine - other).norm()), float(mine.norm())
    return distance / size if size else (math.inf if distance else 0.0)
