"""Two precisions side by side: which dtypes follow from them, and the one start that a narrower run may have."""

import pytest
import torch

from mock_scheduler.comparison.findings import Finding, OtherStart, RoundedOtherwise, RoundingRule
from mock_scheduler.comparison.pairing.precision import check_rounded, explains_dtypes, find_narrow
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.verdict.wording.findings import describe_finding

WIDE = torch.randn(999, generator=torch.Generator().manual_seed(1))
NEAREST = WIDE.bfloat16().float()
CUT = (WIDE.view(torch.int32) & -65536).view(torch.float32)
MIXED = torch.where(torch.arange(999) % 2 == 0, NEAREST, CUT)
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


@pytest.mark.parametrize("side", [0, 1])
def test_a_start_that_is_rounded_to_nearest_is_the_same_start(side: int) -> None:
    values = (NEAREST, WIDE) if side == 0 else (WIDE, NEAREST)
    assert check_rounded(values, (side, BF16)) is None


@pytest.mark.parametrize(
    ("start", "how"),
    [(CUT, "towards zero"), (MIXED, "to a neighbour"), (WIDE * 1.1, "other values"), (-NEAREST, "other values")],
)
def test_another_rounding_is_named(start: torch.Tensor, how: RoundingRule) -> None:
    found = check_rounded((WIDE, start), (1, BF16))
    assert found == RoundedOtherwise(
        side="candidate",
        dtype="bfloat16",
        num_different=int((start != NEAREST).sum()),
        num_elements=999,
        how=how,
    )


def test_a_wrong_rounding_is_said_with_its_kind_and_side() -> None:
    rounded = RoundedOtherwise(side="candidate", dtype="bfloat16", num_different=4, num_elements=9, how="towards zero")
    found = Finding(kind="initial", step=0, update=0, name="w", fact=OtherStart(rounded=rounded))
    assert describe_finding(found) == (
        "parameter of w before step 0 is not the baseline's, rounded to bfloat16, in the candidate: 4 of 9 elements "
        "differ, all cut off towards zero; a run in bfloat16 must start from the same weights, rounded to nearest"
    )


@pytest.mark.parametrize(
    ("kind", "dtypes", "precisions", "is_explained"),
    [
        ("activation", (F32, BF16), ("float32", "bfloat16"), True),
        ("loss", (F32, F32), ("float32", "bfloat16"), True),
        ("activation", (F64, BF16), ("float32", "bfloat16"), False),
        # Main gradients and moments are float32 in every precision below float64.
        ("gradient", (F32, BF16), ("float32", "bfloat16"), False),
        ("gradient", (F32, F64), ("float32", "float64"), True),
        # Of one precision: a float32 router in a bfloat16 model is no less exact, and a bfloat16 one is.
        ("router", (BF16, F32), ("bfloat16", "bfloat16"), True),
        ("router", (F32, BF16), ("bfloat16", "bfloat16"), False),
        ("gradient", (BF16, F32), ("bfloat16", "bfloat16"), False),
        ("activation", (F32, BF16), ("", ""), False),
        ("activation", (torch.int64, F32), ("float32", "float32"), False),
    ],
)
def test_a_dtype_follows_from_a_stated_precision_or_is_wider(
    kind: TraceKind, dtypes: tuple[torch.dtype, torch.dtype], precisions: tuple[str, str], is_explained: bool
) -> None:
    assert explains_dtypes(kind, dtypes, precisions) is is_explained


def test_the_narrower_side_is_the_one_with_weights_of_its_own_or_the_stated_one() -> None:
    assert find_narrow((None, BF16), ("", "")) == (1, BF16)
    # A float32 island in a bfloat16 candidate: its start may be unrounded, the baseline's is.
    assert find_narrow((BF16, None), ("bfloat16", "bfloat16")) == (0, BF16)
    assert find_narrow((None, None), ("float32", "bfloat16")) == (1, BF16)
    assert find_narrow((None, None), ("float64", "float32")) == (1, F32)
    assert find_narrow((BF16, BF16), ("bfloat16", "bfloat16")) is None
    assert find_narrow((None, None), ("float32", "float32")) is None
