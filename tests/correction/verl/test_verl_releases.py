"""verl's releases, bug for bug: every golden case, and what the golden cases leave open."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mock_scheduler.correction.verl import ReleaseCorrection, correct
from mock_scheduler.correction.verl.releases import VerlRelease

_GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "rollout_correction.json").read_text(encoding="utf-8"))
_FUNCTIONS = ("compute_rollout_correction_and_rejection_mask", "compute_rollout_importance_weights")
_RELEASES: dict[str, VerlRelease] = {
    "0.9.1": "0.9.1",
    "0.7.1": "0.7.1",
    "0.6.1": "0.6.1",
    "seedrev": "e7cdce1c",
    "0.6.0": "0.6.0",
}
_CASES = {case["id"]: case for case in _GOLDEN["cases"] if case["function"] in _FUNCTIONS}
_RAISED: dict[str, type[Exception]] = {
    error.__name__: error for error in (ValueError, TypeError, ZeroDivisionError, AssertionError)
}


def _tensor(rows: list[list[float | str]], dtype: str) -> torch.Tensor:
    return torch.tensor([[float(value) for value in row] for row in rows], dtype=getattr(torch, dtype))


def _run(case: dict[str, Any]) -> ReleaseCorrection:
    inputs = case["inputs"]
    return correct(
        _RELEASES[case["verl_version"]],
        old_log_prob=_tensor(inputs["old_log_prob"], inputs["log_prob_dtype"]),
        rollout_log_prob=_tensor(inputs["rollout_log_prob"], inputs["log_prob_dtype"]),
        response_mask=_tensor(inputs["response_mask"], inputs["mask_dtype"]),
        arguments=case["params"],
    )


def _assert_near(found: torch.Tensor, rows: list[list[float | str]], case: dict[str, Any]) -> None:
    torch.testing.assert_close(found.double(), _tensor(rows, "float64"), equal_nan=True, **case["tolerance"])


@pytest.mark.parametrize("case_id", _CASES)
def test_golden_release(case_id: str) -> None:
    case = _CASES[case_id]
    expected = case["expected"]
    if "raises" in expected:
        with pytest.raises(_RAISED[expected["raises"]]) as raised:
            _run(case)
        assert raised.type is _RAISED[expected["raises"]]
        return
    found = _run(case)
    if expected["rollout_is_weights"] is None:
        assert found.weights is None
    else:
        assert found.weights is not None
        assert found.weights.dtype == getattr(torch, expected["weights_dtype"])
        _assert_near(found.weights, expected["rollout_is_weights"], case)
    if "modified_response_mask" in expected:
        assert found.mask.dtype == getattr(torch, expected["modified_mask_dtype"])
        assert torch.equal(found.mask.double(), _tensor(expected["modified_response_mask"], "float64"))
    else:
        assert torch.equal(found.mask, _tensor(case["inputs"]["response_mask"], case["inputs"]["mask_dtype"]))
    assert set(found.metrics) == set(expected["metrics"])
    for name, value in expected["metrics"].items():
        assert type(found.metrics[name]) is float
        tolerance = {"rel": case["tolerance"]["rtol"], "abs": case["tolerance"]["atol"]}
        assert found.metrics[name] == pytest.approx(float(value), nan_ok=True, **tolerance), name


def test_golden_releases_are_all_here() -> None:
    assert len(_CASES) == 88
    assert {case["verl_version"] for case in _CASES.values()} == set(_RELEASES)


def _correct(
    release: VerlRelease, log_ratios: list[list[float]], mask: list[list[int]] | None = None, **arguments: object
) -> ReleaseCorrection:
    rows = torch.tensor(log_ratios)
    return correct(
        release,
        old_log_prob=rows - 1.0,
        rollout_log_prob=torch.full_like(rows, -1.0),
        response_mask=torch.ones_like(rows) if mask is None else torch.tensor(mask, dtype=torch.float32),
        arguments=arguments,
    )


def test_batch_normalisation_counts_empty_rows_in_0_6_1_only() -> None:
    """Sequence weights 2 and 1, and a row with no token: (2 + 1 + 0) / 3 = 1, against (2 + 1) / 2 = 1.5."""
    rows, mask = [[math.log(2.0)], [0.0], [0.0]], [[1], [1], [0]]
    arguments = {"rollout_is": "sequence", "rollout_is_threshold": 4.0, "rollout_is_batch_normalize": True}
    older = _correct("0.6.1", rows, mask, **arguments)
    newer = _correct("0.7.1", rows, mask, **arguments)
    assert older.metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(1.0)
    assert newer.metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(1.5)
    torch.testing.assert_close(older.weights, torch.tensor([[2.0], [1.0], [0.0]]))
    torch.testing.assert_close(newer.weights, torch.tensor([[4 / 3], [2 / 3], [0.0]]))


def test_batch_normalisation_is_off_without_a_word_where_a_weight_is_nan() -> None:
    found = _correct(
        "0.9.1", [[math.log(2.0), math.nan]], rollout_is="token", rollout_is_threshold=4.0, rollout_is_batch_normalize=1
    )
    assert found.metrics["rollout_corr/rollout_is_batch_norm_factor"] == 1.0
    torch.testing.assert_close(found.weights, torch.tensor([[2.0, math.nan]]), equal_nan=True)


def test_icepop_with_every_token_outside_divides_by_zero() -> None:
    with pytest.raises(ZeroDivisionError):
        _correct("0.9.1", [[1.0, 1.0]], rollout_is="token", rollout_is_threshold="0.9_1.1")


def test_bounds_in_a_text_are_of_0_9_1_only() -> None:
    found = _correct("0.9.1", [[0.0, 1.0]], rollout_is="token", rollout_is_threshold="0.5_2.0")
    torch.testing.assert_close(found.weights, torch.tensor([[1.0, 0.0]]))
    with pytest.raises(TypeError, match=r"rollout_is_threshold is '0\.5_2\.0'"):
        _correct("0.7.1", [[0.0, 1.0]], rollout_is="token", rollout_is_threshold="0.5_2.0")


def test_crossed_k1_bounds_reject_everything_until_0_9_1_refuses_them() -> None:
    arguments = {"rollout_rs": "token_k1", "rollout_rs_threshold": "2.0_0.5"}
    assert _correct("0.7.1", [[0.0, 0.1]], **arguments).mask.tolist() == [[0.0, 0.0]]
    with pytest.raises(ValueError, match="lower at most upper"):
        _correct("0.9.1", [[0.0, 0.1]], **arguments)


def test_a_sum_is_clamped_after_adding_in_0_6_1_and_before_in_0_7_1() -> None:
    """ℓ = (−60, 20, 20, 20) adds up to 0, which is kept; with −60 clamped to −20 it is 40, which is not."""
    rows = [[-60.0, 20.0, 20.0, 20.0]]
    older = _correct("0.6.1", rows, rollout_rs="sequence", rollout_rs_threshold=2.0)
    newer = _correct("0.7.1", rows, rollout_rs="seq_sum_k1", rollout_rs_threshold=2.0)
    assert older.mask.tolist() == [[1.0] * 4]
    assert newer.mask.tolist() == [[0.0] * 4]


def test_geometric_fractions_count_tokens_before_0_6_1() -> None:
    """Rows of 3 tokens above the bound and 1 token within: 3 of 4 tokens, 1 of 2 rows."""
    rows, mask = [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]], [[1, 1, 1], [1, 0, 0]]
    arguments = {"rollout_rs": "geometric", "rollout_rs_threshold": 1.5}
    older = _correct("e7cdce1c", rows, mask, **arguments).metrics["mismatch/rollout_rs_ratio_fraction_high"]
    newer = _correct("0.6.1", rows, mask, **arguments).metrics["rollout_corr/rollout_rs_ratio_fraction_high"]
    assert (older, newer) == (pytest.approx(0.75), pytest.approx(0.5))


def test_rejection_without_a_threshold_is_skipped_by_e7cdce1c_only() -> None:
    arguments = {"rollout_rs": "token", "rollout_rs_threshold": None}
    found = _correct("e7cdce1c", [[5.0]], **arguments)
    assert found.mask.tolist() == [[1.0]]
    assert not any("rollout_rs" in name for name in found.metrics)
    with pytest.raises(ValueError, match="rollout_rs_threshold is None"):
        _correct("0.6.1", [[5.0]], **arguments)


def test_weights_of_e7cdce1c_carry_a_gradient() -> None:
    carries: dict[VerlRelease, bool] = {"e7cdce1c": True, "0.6.1": False, "0.9.1": False}
    for release, has_gradient in carries.items():
        old = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        found = correct(
            release,
            old_log_prob=old,
            rollout_log_prob=torch.tensor([[-1.5, -2.0]]),
            response_mask=torch.ones(1, 2),
            arguments={"rollout_is": "token"},
        )
        assert found.weights is not None
        assert found.weights.requires_grad is has_gradient


def test_overflow_at_padding_is_0_in_e7cdce1c_and_nan_later() -> None:
    """exp(15) is inf in float16: truncated to 2 before the mask, it becomes 0; inf times 0 is NaN."""
    padding: dict[VerlRelease, float] = {"e7cdce1c": 0.0, "0.6.1": math.nan}
    for release, at_padding in padding.items():
        found = correct(
            release,
            old_log_prob=torch.tensor([[-1.0, -1.0]], dtype=torch.float16),
            rollout_log_prob=torch.tensor([[-1.0, -16.0]], dtype=torch.float16),
            response_mask=torch.tensor([[1, 0]]),
            arguments={"rollout_is": "token"},
        )
        assert found.weights is not None
        expected = torch.tensor([[1.0, at_padding]], dtype=torch.float16)
        torch.testing.assert_close(found.weights, expected, equal_nan=True, rtol=0, atol=0)


def test_0_6_0_vetoes_by_weights_and_leaves_the_mask() -> None:
    found = _correct("0.6.0", [[0.0, -10.0], [0.0, -9.0]], rollout_is_threshold=2.0)
    assert found.weights is not None
    torch.testing.assert_close(found.weights, torch.tensor([[0.0, 0.0], [1.0, math.exp(-9.0)]]))
    assert found.mask.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert found.metrics["mismatch/rollout_is_veto_fraction"] == 0.5
    without = _correct("0.6.0", [[0.0, -10.0]], rollout_is_threshold=2.0, rollout_is_veto_threshold=None)
    torch.testing.assert_close(without.weights, torch.tensor([[1.0, math.exp(-10.0)]]))


def test_0_6_0_asserts_a_token_and_refuses_half_precision() -> None:
    with pytest.raises(AssertionError, match=r"0\.6\.0 asserts"):
        _correct("0.6.0", [[0.0]], [[0]], rollout_is_threshold=2.0)
    half = torch.zeros(1, 2, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="quantile"):
        correct(
            "0.6.0",
            old_log_prob=half,
            rollout_log_prob=half,
            response_mask=torch.ones(1, 2),
            arguments={"rollout_is_threshold": 2.0},
        )


def test_a_bound_that_float16_cannot_hold_matters_from_two_tokens_on() -> None:
    """Nothing is clamped for the standard deviation of a single token, which is 0 by definition."""
    one, two = (torch.zeros(1, length, dtype=torch.float16) for length in (1, 2))
    arguments = {"rollout_rs": "token_k2", "rollout_rs_threshold": 1e9}
    found = correct(
        "0.9.1", old_log_prob=one, rollout_log_prob=one, response_mask=torch.ones(1, 1), arguments=arguments
    )
    assert found.metrics["rollout_corr/rollout_rs_token_k2_std"] == 0.0
    with pytest.raises(RuntimeError, match="overflow"):
        correct("0.9.1", old_log_prob=two, rollout_log_prob=two, response_mask=torch.ones(1, 2), arguments=arguments)


def test_an_argument_of_another_release_is_refused_by_name() -> None:
    with pytest.raises(
        TypeError, match="unexpected arguments rollout_token_veto_threshold; this release has rollout_is,"
    ):
        _correct("0.9.1", [[0.0]], rollout_token_veto_threshold=1e-4)
    with pytest.raises(TypeError, match="unexpected arguments rollout_is_batch_normalize"):
        _correct("e7cdce1c", [[0.0]], rollout_is_batch_normalize=True)
