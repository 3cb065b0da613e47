"""Finds the smallest failing case by greedy delta debugging over dimensions with levels; pure logic.

A case is a level for each dimension: 0 as it was given, higher ones more reduced. Subsets of dimensions, first all,
then halves, then single ones, go to their highest level at once (Zeller and Hildebrandt 2002, "Simplifying and
Isolating Failure-Inducing Input"); a dimension with resistance goes as far as it can alone; all again until nothing
changes.

Contract: levels only rise, and no case is asked twice; so the search ends for any answers, contradictory ones
included. Where answers are monotone (a less reduced case than a failing one fails) the result is
minimal; in any case no single dimension of the result could be reduced further.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

Levels = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Minimum:
    """Holds the most reduced failing case.

    ``num_runs``: cases run for it. ``is_complete``: False where the runs were used up before all was tried.
    """

    levels: Levels
    num_runs: int
    is_complete: bool


class _OutOfRunsError(Exception):
    """No run is left; caught here only."""


@dataclass(slots=True)
class _Search:
    highest: Levels
    fails: Callable[[Levels], bool]
    is_valid: Callable[[Levels], bool]
    identify: Callable[[Levels], Hashable]
    max_runs: int
    current: Levels
    num_runs: int = 0
    _known: dict[Hashable, bool] = field(default_factory=dict)

    def try_levels(self, levels: Levels) -> bool:
        """Take the case if it fails."""
        if levels == self.current or not self._ask(levels):
            return False
        self.current = levels
        return True

    def _ask(self, levels: Levels) -> bool:
        case = self.identify(levels)
        if case not in self._known and not self.is_valid(levels):
            self._known[case] = False
        if case not in self._known:
            if self.num_runs == self.max_runs:
                raise _OutOfRunsError
            self.num_runs += 1
            self._known[case] = self.fails(levels)
        return self._known[case]

    def raise_subset(self, dimensions: Sequence[int]) -> bool:
        """Returns dimensions at their highest level at once."""
        return self.try_levels(
            tuple(self.highest[index] if index in dimensions else level for index, level in enumerate(self.current))
        )

    def raise_one(self, dimension: int) -> None:
        """Raises one dimension to the highest level at which the case still fails."""
        # From the most reduced level down: the first that fails is the best for this dimension.
        for level in range(self.highest[dimension], self.current[dimension], -1):
            if self.try_levels((*self.current[:dimension], level, *self.current[dimension + 1 :])):
                return

    def open_dimensions(self) -> list[int]:
        """Lists the dimensions below their highest level."""
        return [index for index, level in enumerate(self.current) if level < self.highest[index]]


def minimise(
    highest: Levels,
    fails: Callable[[Levels], bool],
    *,
    is_valid: Callable[[Levels], bool] = lambda levels: True,
    identify: Callable[[Levels], Hashable] = lambda levels: levels,
    max_runs: int,
) -> Minimum:
    """Reduces the case at level 0, a known failure.

    ``highest``: the last level of every dimension. ``fails``: runs a case; False too where it cannot tell.
    ``is_valid``: whether a case can be run at all; asked at no cost. ``identify``: equal for equal cases.
    """
    search = _Search(
        highest=highest,
        fails=fails,
        is_valid=is_valid,
        identify=identify,
        max_runs=max_runs,
        current=tuple(0 for _ in highest),
    )
    try:
        before = None
        while before != search.current:
            before = search.current
            # Large steps first: most dimensions have no part in a fault, and fall together in few runs.
            for subset in _subsets(search):
                search.raise_subset(subset)
            for dimension in search.open_dimensions():
                search.raise_one(dimension)
    except _OutOfRunsError:
        return Minimum(levels=search.current, num_runs=search.num_runs, is_complete=False)
    return Minimum(levels=search.current, num_runs=search.num_runs, is_complete=True)


def _subsets(search: _Search) -> Iterator[list[int]]:
    """Yields all open dimensions, then halves of them, and so on down to two, without any reduced meanwhile."""
    dimensions = search.open_dimensions()
    size = len(dimensions)
    while size > 1:
        for start in range(0, len(dimensions), size):
            is_open = set(search.open_dimensions())
            subset = [index for index in dimensions[start : start + size] if index in is_open]
            if len(subset) > 1:
                yield subset
        size = (size + 1) // 2
