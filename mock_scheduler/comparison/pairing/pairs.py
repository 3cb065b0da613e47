"""One tensor of two traces, brought into the same order, and the reasons it cannot be compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType

import torch

from mock_scheduler.comparison.findings import Finding, NotFinite, OtherDtype, OtherPlaces, OtherShape, finding
from mock_scheduler.comparison.measure.distance import count_non_finite
from mock_scheduler.comparison.measure.figures import PairSums, sum_values
from mock_scheduler.comparison.pairing.tokens import TokenAlignment
from mock_scheduler.comparison.tensors import TensorDifference
from mock_scheduler.comparison.thresholds import CHUNK_ELEMENTS
from mock_scheduler.errors import TraceError
from mock_scheduler.support.tensor_bytes import dtype_name
from mock_scheduler.trace.entries import DimName, TraceKey
from mock_scheduler.trace.full.reader import MergedTensor, TraceReader
from mock_scheduler.trace.full.whole import WholeTensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TensorPair:
    """Holds a tensor of both runs, in the baseline's order of tokens.

    Args:
        key: Its canonical key.
        values: Whole tensors of baseline and candidate, of one shape.
        dims: What each dimension counts.
        present: bool, of the tensors' shape or ``[T, 1, ...]``: elements of both runs; ``None``: all of them.
        sums: Of the present elements; of two dtypes, of their values in float64.
        ours: The elements of the baseline by itself.
        theirs: The elements of the candidate by itself, in the baseline's order.
        is_doubtful: Digests in the files say equal where bits differ, or the other way round.
    """

    key: TraceKey
    values: tuple[WholeTensor, WholeTensor]
    dims: tuple[DimName, ...]
    present: torch.Tensor | None
    sums: PairSums
    ours: torch.Tensor | None = None
    theirs: torch.Tensor | None = None
    is_doubtful: bool = False

    @property
    def baseline(self) -> torch.Tensor:
        """Returns the baseline's tensor, put together in one place."""
        return self.values[0].whole()

    @property
    def candidate(self) -> torch.Tensor:
        """Returns the candidate's tensor, put together in one place."""
        return self.values[1].whole()

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Returns the dtypes of baseline and candidate."""
        return self.values[0].dtype, self.values[1].dtype

    @property
    def is_equal(self) -> bool:
        """Whether all bits of the present elements are equal."""
        return self.dtypes[0] == self.dtypes[1] and not self.sums.figures.num_different

    def without_tokens(self, left_out: torch.Tensor) -> TensorPair:
        """Returns the pair without these tokens; ``left_out``: bool ``[T]``."""
        kept = _by_token(~left_out, self.values[0])
        present = kept if self.present is None else self.present & kept
        return replace(self, present=present, sums=sum_values(*self.values, present))


class TracePair:
    """Two open traces whose tensors are read at the same time, one thread for each; a context manager."""

    def __init__(self, baseline: TraceReader, candidate: TraceReader) -> None:
        self.readers = (baseline, candidate)
        self._executor = ThreadPoolExecutor(max_workers=1)

    def merge(self, key: TraceKey) -> tuple[MergedTensor, MergedTensor]:
        """Reads the whole tensor of both; each reader is only ever used by one thread at a time.

        The candidate may lack tokens, which is a difference; a baseline without some is no reference, which is an
        error.

        Raises:
            TraceError: A file is damaged, or tokens of the baseline are missing.
        """
        if self._is_small(key):
            return self.readers[0].merge(key), self.readers[1].merge(key, may_lack_tokens=True)
        # One thread for each side: reading waits for the disk, and the two files are independent.
        theirs = self._executor.submit(self.readers[1].merge, key, may_lack_tokens=True)
        try:
            ours = self.readers[0].merge(key)
        finally:
            # Waited for even where the baseline failed: the reader must not be in use when it is closed.
            other = theirs.result()
        return ours, other

    def _is_small(self, key: TraceKey) -> bool:
        """Whether to wake a thread would take longer than to read both sides."""
        _, shape = self.readers[0].dtype_and_shape(key)
        return math.prod(shape) <= CHUNK_ELEMENTS

    def check_digests(self, key: TraceKey) -> None:
        """Checks the SHA-256 of every piece of a tensor, of both sides.

        Raises:
            TraceError: A piece has another digest; names file and tensor.
        """
        for reader in self.readers:
            reader.check_digests(key)

    def __enter__(self) -> TracePair:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._executor.shutdown()


def pair_up(key: TraceKey, merged: tuple[MergedTensor, MergedTensor], tokens: TokenAlignment) -> TensorPair | Finding:
    """Brings both sides into the baseline's order; a finding where their shapes do not fit each other."""
    ours, theirs = merged
    left, right = ours.values, theirs.values
    if left.dtype.is_complex or right.dtype.is_complex:
        raise TraceError(f"{key.describe()}: values of {left.dtype} and {right.dtype} cannot be compared")
    is_by_token = ours.dims[:1] == ("token",) and theirs.dims[:1] == ("token",)
    their_presence = theirs.present
    shared: torch.Tensor | None = None
    if is_by_token and tokens.covers(left, right) and left.shape[1:] == right.shape[1:]:
        right = WholeTensor.of(tokens.in_baseline_order(theirs.tensor))
        their_presence = None if their_presence is None else tokens.in_baseline_order(their_presence)
        # Tokens of one run only have no counterpart in any tensor.
        shared = None if tokens.is_shared is None else _by_token(tokens.is_shared, left)
    if left.shape != right.shape:
        return finding(key, OtherShape(baseline=tuple(left.shape), candidate=tuple(right.shape)))
    present = all_of([ours.present, their_presence, shared])
    pair = TensorPair(
        key=key,
        values=(left, right),
        dims=ours.dims,
        present=present,
        ours=all_of([ours.present, shared]),
        theirs=all_of([their_presence, shared]),
        sums=sum_values(left, right, present),
    )
    # Digests are of the stored order, so that tokens put in another order have none.
    return replace(pair, is_doubtful=right is theirs.values and _contradict(ours, theirs, is_equal=pair.is_equal))


def _contradict(ours: MergedTensor, theirs: MergedTensor, *, is_equal: bool) -> bool:
    """Whether the digests of two tensors, both cut alike, say other than their bits."""
    if ours.stated is None or theirs.stated is None or ours.stated.keys() != theirs.stated.keys():
        return False
    return (ours.stated == theirs.stated) != is_equal


def find_other_places(pair: TensorPair) -> OtherPlaces | None:
    """Counts elements of a tensor of which one run alone has a value; ``None`` where both have the same elements."""
    if pair.ours is None and pair.theirs is None:
        return None
    # One element stands for a side that has all, and broadcasts against the other's mask.
    whole = torch.ones((), dtype=torch.bool)
    ours, theirs = (whole if mask is None else mask for mask in (pair.ours, pair.theirs))
    only = [int((mine & ~other).sum()) for mine, other in ((ours, theirs), (theirs, ours))]
    if not any(only):
        return None
    is_by_token = pair.dims[:1] == ("token",)
    return OtherPlaces(what="token" if is_by_token else "element", num_baseline=only[0], num_candidate=only[1])


def find_other_dtype(pair: TensorPair) -> OtherDtype | None:
    """Returns both dtypes where they differ."""
    mine, other = map(dtype_name, pair.dtypes)
    return None if mine == other else OtherDtype(baseline=mine, candidate=other)


def find_not_finite(pair: TensorPair) -> NotFinite | None:
    """Counts NaN and infinities among the compared elements of each side; ``None`` where all are finite."""
    if pair.sums.is_finite:
        return None
    sides = (pair.baseline, pair.candidate)
    if pair.present is not None:
        # NaN in padding is no fault.
        kept = pair.present.expand_as(pair.baseline)
        sides = (pair.baseline[kept], pair.candidate[kept])
    mine, other = map(count_non_finite, sides)
    return None if mine is None and other is None else NotFinite(baseline=mine, candidate=other)


def locate(
    difference: TensorDifference, pair: TensorPair, traces: TracePair, tokens: TokenAlignment
) -> TensorDifference:
    """Adds sample, position and ranks to the worst element of a difference, where there is one."""
    figures = difference.figures
    if figures is None or figures.worst is None:
        return difference
    worst = figures.worst
    index, their_index = worst.index, worst.index
    sample, position = worst.sample, worst.position
    if pair.dims[:1] == ("token",) and pair.values[0].shape[:1] == (tokens.rows.num_tokens,):
        sample, position = tokens.find(index[0])
        # The candidate's ranks hold its own order of tokens.
        if not tokens.is_same_order:
            their_index = (int(tokens.index[index[0]]), *index[1:])
    worst = replace(
        worst,
        sample=sample,
        position=position,
        baseline_ranks=traces.readers[0].holders(pair.key, index),
        candidate_ranks=traces.readers[1].holders(pair.key, their_index),
    )
    return replace(difference, figures=replace(figures, worst=worst))


def all_of(masks: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Returns where all masks are True; ``None`` where this is everywhere, as in a mask of ``None``."""
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    result = given[0]
    for mask in given[1:]:
        result = result & mask
    return None if bool(result.all()) else result


def _by_token(mask: torch.Tensor, like: WholeTensor) -> torch.Tensor:
    """Returns bool ``[T, 1, ...]`` from ``[T]``."""
    return mask.view(-1, *([1] * (like.dim() - 1)))
