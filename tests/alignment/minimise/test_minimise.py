"""Delta debugging on planted failures."""

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.alignment.minimise.minimise import Levels, minimise


def at_most(*bounds: int) -> Callable[[Levels], bool]:
    """A fault that shows while every dimension is at most so reduced."""
    return lambda levels: all(level <= bound for level, bound in zip(levels, bounds, strict=True))


@pytest.mark.parametrize(
    ("highest", "bounds", "most_runs"),
    [
        ((1,) * 12, (1,) * 7 + (0,) + (1,) * 4, 14),
        ((1,) * 12, (0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0), 40),
        ((3, 2, 5, 1, 4), (1, 2, 3, 0, 4), 30),
        ((4, 4), (0, 0), 12),
    ],
)
def test_a_planted_minimal_set_is_found(highest: Levels, bounds: Levels, most_runs: int) -> None:
    found = minimise(highest, at_most(*bounds), max_runs=1000)
    assert found.levels == bounds
    assert found.is_complete
    assert found.num_runs <= most_runs


def test_what_needs_nothing_is_reduced_whole_in_one_run() -> None:
    found = minimise((3, 1, 2), lambda levels: True, max_runs=10)
    assert (found.levels, found.num_runs) == ((3, 1, 2), 1)


def test_one_of_two_causes_is_enough() -> None:
    """Either of two flags shows the fault: one of them is left."""
    found = minimise((1, 1, 1), lambda levels: levels[0] == 0 or levels[2] == 0, max_runs=100)
    assert sum(1 - level for level in found.levels) == 1
    assert found.levels[1] == 1


def test_cases_that_cannot_be_run_cost_nothing_and_are_never_run() -> None:
    """Sequence parallelism (1) must go with or before tp (0): a case with it and without tp cannot be run."""
    asked: list[Levels] = []

    def fails(levels: Levels) -> bool:
        asked.append(levels)
        return levels[2] == 0

    def is_valid(levels: Levels) -> bool:
        return not (levels[0] == 1 and levels[1] == 0)

    found = minimise((1, 1, 1), fails, is_valid=is_valid, max_runs=100)
    assert found.levels == (1, 1, 0)
    assert all(map(is_valid, asked))
    assert found.num_runs == len(asked) == len(set(asked))


def test_the_number_of_runs_is_bounded_and_the_best_so_far_is_given() -> None:
    highest = (1,) * 16
    found = minimise(highest, at_most(*(0 if index % 5 == 0 else 1 for index in range(16))), max_runs=6)
    assert found.num_runs == 6
    assert not found.is_complete
    assert found.levels[0] == 0


def test_cases_that_are_the_same_run_once() -> None:
    asked: list[Levels] = []

    def fails(levels: Levels) -> bool:
        asked.append(levels)
        return levels[1] == 0

    # Levels 1 and above of the first dimension are one case.
    found = minimise((5, 1), fails, identify=lambda levels: (min(levels[0], 1), levels[1]), max_runs=100)
    assert found.levels == (5, 0)
    assert len(asked) == 2


@given(
    highest=st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple),
    failing=st.sets(st.integers(0, 255), max_size=80),
)
@settings(max_examples=200, deadline=None)
def test_answers_that_contradict_each_other_end_in_a_case_that_fails(highest: Levels, failing: set[int]) -> None:
    """Any set of failing cases at all: the end fails, and no single dimension can be raised to another that fails."""
    cases = list(product(*(range(level + 1) for level in highest)))
    fails = {case for index, case in enumerate(cases) if index in failing} | {cases[0]}
    found = minimise(highest, lambda levels: levels in fails, max_runs=len(cases))
    assert found.is_complete
    assert found.levels in fails
    for dimension, level in enumerate(found.levels):
        for raised in range(level + 1, highest[dimension] + 1):
            assert (*found.levels[:dimension], raised, *found.levels[dimension + 1 :]) not in fails
