"""Values that were rounded to fewer bits than their type has are recognised, and honest ones are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mock_scheduler.comparison.explain.narrowing import count_bits, find_narrowing, find_sums
from mock_scheduler.comparison.explain.residual import classify_residual
from mock_scheduler.comparison.findings import FewerBits, Finding, NarrowedState
from mock_scheduler.comparison.tensors import TensorComparison
from mock_scheduler.comparison.walk.traces import compare_trace_folders
from mock_scheduler.trace.entries import TraceEntry
from mock_scheduler.trace.shards import whole
from mock_scheduler.verdict.wording.findings import describe_finding
from mock_scheduler.verdict.wording.residuals import describe_residual
from tests.comparison.stated import stated
from tests.rank_traces import save_rank_trace


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cut(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Rounds to this many bits of mantissa beside the leading one."""
    mantissas, exponents = torch.frexp(values)
    return torch.ldexp(torch.round(mantissas * 2.0 ** (bits + 1)) / 2.0 ** (bits + 1), exponents)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 7), (torch.float16, 10), (torch.float32, 23)])
def test_the_bits_of_a_type_are_counted(dtype: torch.dtype, bits: int) -> None:
    assert count_bits(draw(4096).to(dtype).float()) == bits


@pytest.mark.parametrize("values", [torch.ones(64), torch.tensor([0.5, 2.0] * 32), draw(8), torch.arange(64)])
def test_few_numbers_and_integers_have_no_bits_to_count(values: torch.Tensor) -> None:
    """Ratios of exactly 1 are short and were not rounded."""
    assert count_bits(values) is None


@pytest.mark.parametrize(
    ("bits", "name"), [(7, " (bfloat16)"), (10, " (float16 or TF32)"), (3, " (float8_e4m3)"), (12, "")]
)
def test_a_difference_of_that_size_is_named(bits: int, name: str) -> None:
    values = draw(1024)
    found = classify_residual(values, cut(values, bits))
    assert found is not None
    assert describe_residual(found) == (f"candidate is narrowed to {bits} bits of mantissa{name}, baseline has 23 bits")


def test_what_is_no_rounding_to_fewer_bits_is_not_called_so() -> None:
    values = draw(1024)
    # Narrow, and twice as large: its type is not why.
    found = classify_residual(values, cut(values, 7) * 2)
    assert found is not None
    assert found.kind == "ratio"
    # Both sides are as narrow.
    assert find_narrowing(cut(values, 7), cut(values * 1.01, 7)) is None
    assert find_narrowing(values, values * (1 + 2.0**-8)) is None


def test_sums_of_rounded_gradients_are_found_by_their_divisor() -> None:
    """Two ranks' sums, each rounded to bfloat16 before the reduction, divided by 39 tokens behind it."""
    parts = draw(4, 4096)
    honest = (parts.bfloat16().float().sum(0)) / 39
    faulty = (parts[:2].sum(0).bfloat16().float() + parts[2:].sum(0).bfloat16().float()) / 39
    found = find_sums(faulty)
    assert found is not None
    assert found.divisor % 39 == 0
    same = find_sums(honest, divisor=found.divisor)
    assert same is not None
    assert same.bits - found.bits > 1.0
    full = find_sums(draw(4096))
    assert full is not None
    assert full.short < 0.1
    assert find_sums(draw(64)) is None


def compare(
    tmp_path: Path, moments: tuple[torch.Tensor, torch.Tensor], gradients: tuple[torch.Tensor, torch.Tensor]
) -> TensorComparison:
    """Two runs of one update, with a moment and parameters that follow the gradients."""
    start = draw(128, 32, seed=7)
    folders = []
    for name, moment, gradient in zip(("a", "b"), moments, gradients, strict=True):
        entries = [
            TraceEntry(update=0, kind=kind, spec=whole(own, tuple(value.shape)), tensor=value)
            for kind, own, value in (
                ("initial", "w", start),
                *(("gradient", f"w{number}", gradient[number::8]) for number in range(8)),
                ("gradient", "w", gradient),
                ("optimizer", "w.exp_avg", moment),
                ("optimizer", "w.exp_avg_sq", start.abs()),
                ("parameter", "w", start - 1e-3 * gradient),
            )
        ]
        save_rank_trace(tmp_path / name, step=0, global_rank=0, world_size=1, coordinates={"tp": 0}, entries=entries)
        folders.append(tmp_path / name)
    return compare_trace_folders(*folders, bounds=stated(activation=1.0, gradient=1.0, update=1.0))


def narrowed(found: TensorComparison) -> list[Finding]:
    return [item for item in found.findings if isinstance(item.fact, NarrowedState)]


def test_moments_that_are_kept_in_bfloat16_are_a_fault_within_every_bound(tmp_path: Path) -> None:
    gradient = draw(128, 32)
    (found,) = narrowed(compare(tmp_path, (gradient, gradient.bfloat16().float()), (gradient, gradient)))
    assert describe_finding(found) == (
        "optimizer of w.exp_avg at step 0, update 0 is narrowed to 7 bits of mantissa (bfloat16) in the candidate; the "
        "baseline has 23 bits"
    )


def test_rounding_of_another_order_is_no_narrowing(tmp_path: Path) -> None:
    gradient = draw(128, 32)
    other = gradient * (1 + 1e-3 * draw(128, 32, seed=3))
    found = compare(tmp_path, (gradient, other), (gradient, other))
    assert narrowed(found) == []
    assert not any(isinstance(note, FewerBits) for note in found.notes)


def test_gradients_of_coarser_sums_are_said_and_no_fault(tmp_path: Path) -> None:
    """They depend on kernels and micro-batches too."""
    parts = draw(8, 128, 32)
    honest = parts.bfloat16().float().sum(0) / 39
    faulty = (parts[:4].sum(0).bfloat16().float() + parts[4:].sum(0).bfloat16().float()) / 39
    found = compare(tmp_path, (honest, honest), (honest, faulty))
    (note,) = (note for note in found.notes if isinstance(note, FewerBits))
    assert (note.step, note.update, note.divisor % 39) == (0, 0, 0)
    assert narrowed(found) == []


def test_one_gradient_alone_is_looked_at_as_closely_as_many(tmp_path: Path) -> None:
    """Only its buffer was rounded, after each micro-batch."""
    honest = draw(4, 128, 32).bfloat16().float().sum(0)
    start = draw(128, 32, seed=7)
    folders = []
    for side, gradient in (("a", honest), ("b", honest.bfloat16().float())):
        values = {f"w{number}": honest[number::8] for number in range(7)} | {"w7": gradient[7::8]}
        entries = [
            TraceEntry(update=0, kind=kind, spec=whole(name, tuple(value.shape)), tensor=value)
            for name, of_name in values.items()
            for kind, value in (("initial", start[:16]), ("gradient", of_name), ("parameter", start[16:32]))
        ]
        save_rank_trace(tmp_path / side, step=0, global_rank=0, world_size=1, coordinates={"tp": 0}, entries=entries)
        folders.append(tmp_path / side)
    found = compare_trace_folders(*folders, bounds=stated(activation=1.0, gradient=1.0, update=1.0))
    (note,) = (note for note in found.notes if isinstance(note, FewerBits))
    assert (note.only, note.divisor) == ("w7", 1)
    assert note.num_bits < 6.0 < 8.0 < note.baseline_bits
