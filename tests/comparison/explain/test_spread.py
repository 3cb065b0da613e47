"""How a difference is spread: a direction of its own, equal rows, equal pieces of ranks."""

import pytest
import torch

from mock_scheduler.comparison.explain.spread import measure_spread
from mock_scheduler.comparison.residuals import Spread
from mock_scheduler.comparison.thresholds import LARGEST_Z
from tests.comparison.rounding import rounded_otherwise


def spread_of(baseline: torch.Tensor, candidate: torch.Tensor, **options: object) -> Spread:
    found = measure_spread(baseline, candidate, **options)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_another_kernel_has_no_direction_and_leaves_no_row(hidden: torch.Tensor) -> None:
    found = spread_of(hidden, rounded_otherwise(hidden))
    assert found.direction_z < 3.0
    assert (found.num_rows, found.num_equal_rows, found.row_size) == (300, 0, 64)
    assert found.density == pytest.approx(1 / 3, abs=0.05)
    assert found.num_bits == 7


def test_a_factor_near_one_has_a_direction_in_rows_and_columns(hidden: torch.Tensor) -> None:
    """Of 0.9978 times a value bfloat16 shows no more than one number in four, and all of them are smaller."""
    shrunk = (hidden.float() * 0.9978).bfloat16()
    found = spread_of(hidden, shrunk)
    assert found.density < 0.3
    assert found.direction_z > LARGEST_Z


def test_roundings_that_rows_or_columns_share_are_no_direction(hidden: torch.Tensor) -> None:
    """A divisor of each row, or a weight of each column, rounded another way: the other side alone would be sure."""
    signs = torch.where(torch.rand(300, 1, generator=torch.Generator().manual_seed(6)) < 0.5, 0.996, 1.004)
    by_row = (hidden.float() * signs).bfloat16()
    assert spread_of(hidden, by_row).direction_z < 3.0
    assert spread_of(hidden.T, by_row.T).direction_z < 3.0


def test_equal_rows_count_as_one() -> None:
    """One token met a hundred times, by chance rounded up in it, is no sum of a hundred chances."""
    row = torch.randn(1, 64, generator=torch.Generator().manual_seed(7)).bfloat16()
    many = row.repeat(100, 1)
    found = spread_of(many, (many.float() * 1.004).bfloat16())
    assert found.direction_z == pytest.approx(1.0)


def test_rows_and_pieces_that_are_equal_are_counted(hidden: torch.Tensor) -> None:
    half = hidden.clone()
    half[150:, 32:] = rounded_otherwise(hidden)[150:, 32:]
    found = spread_of(hidden, half, boundaries={1: (0, 32)})
    assert (found.num_equal_rows, found.num_parts, found.num_equal_parts) == (150, 2, 1)
    assert found.density == pytest.approx(1 / 6, abs=0.03)
    whole = spread_of(hidden, rounded_otherwise(hidden), boundaries={1: (0, 32), 0: (0, 150)})
    assert (whole.num_parts, whole.num_equal_parts) == (2, 0)


def test_absent_elements_and_rows_of_zeros_have_no_say(hidden: torch.Tensor) -> None:
    hidden[:100] = 0.0
    changed = rounded_otherwise(hidden)
    changed[:100] = 0.0
    present = torch.ones(300, 1, dtype=torch.bool)
    present[100:200] = False
    found = spread_of(hidden, changed, present=present)
    assert (found.num_rows, found.num_equal_rows) == (100, 0)


def test_numbers_of_float32_are_told_from_those_of_bfloat16() -> None:
    values = torch.tensor([1.5, 0.1, -3.0])
    assert spread_of(values, values + 1.0).num_bits == 23
    assert spread_of(values.bfloat16().float(), values).num_bits == 7


@pytest.mark.parametrize(
    "values", [torch.tensor(1.0), torch.tensor([1, 2]), torch.zeros(3, 0), torch.tensor([float("inf"), 1.0])]
)
def test_what_has_no_rounding_or_no_size_has_no_spread(values: torch.Tensor) -> None:
    assert measure_spread(values, values + 1) is None


def test_of_a_large_tensor_evenly_spaced_rows_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, hidden: torch.Tensor
) -> None:
    monkeypatch.setattr("mock_scheduler.comparison.explain.spread.PLACE_SAMPLE_ELEMENTS", 100 * 64)
    assert spread_of(hidden, rounded_otherwise(hidden)).num_rows == 100
