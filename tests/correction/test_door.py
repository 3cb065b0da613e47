"""``correct``: plain tensors and a preset's name give the weights, the mask and the metrics of training."""

from __future__ import annotations

import doctest
import math
import subprocess
import sys

import pytest
import torch

import mock_scheduler.correction
from mock_scheduler.correction import (
    CorrectionInputs,
    compute_correction,
    correct,
    correction_metrics,
    door,
)
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from mock_scheduler.errors import ConfigError, CorrectionError

#: Ratios 1, 3 and 1/2, then 1 at a token that is no response.
TRAIN = torch.tensor([[0.5, 0.75, 0.25, 0.9]]).log()
ROLLOUT = torch.tensor([[0.5, 0.25, 0.5, 0.9]]).log()
MASK = torch.tensor([[True, True, True, False]])


def test_example_of_the_docstring() -> None:
    results = doctest.testmod(door)
    assert results.attempted == 6
    assert results.failed == 0


def test_preset_truncates_weights() -> None:
    found = correct(TRAIN, ROLLOUT, MASK, "decoupled_token_is")
    torch.testing.assert_close(found.weights, torch.tensor([[1.0, 2.0, 0.5, 0.0]]))
    assert found.mask.tolist() == MASK.tolist()
    assert found.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(3.5 / 3)
    assert found.metrics["rollout_corr/kl"] == pytest.approx(-math.log(1.5) / 3)


def test_keys_reject_tokens() -> None:
    found = correct(TRAIN, ROLLOUT, MASK, {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_4.0"})
    assert found.weights is None
    assert found.mask.tolist() == [[True, True, False, False]]
    assert found.metrics["rollout_corr/kept_fraction"] == pytest.approx(2 / 3)


def test_packed_tensors_give_the_same_as_padded_ones() -> None:
    offsets = torch.tensor([0, 4])
    padded = correct(TRAIN, ROLLOUT, MASK, "slime_mis")
    packed = correct(TRAIN[0], ROLLOUT[0], MASK[0], "slime_mis", cu_seqlens=offsets)
    assert padded.weights is not None
    assert packed.weights is not None
    assert packed.weights.tolist() == padded.weights[0].tolist()
    assert packed.mask.tolist() == padded.mask[0].tolist()
    assert packed.metrics == padded.metrics


@pytest.mark.parametrize("preset", ["decoupled_geo_rs_token_tis", "areal_token_mask", "roll_segment"])
def test_gives_what_training_computes(preset: str) -> None:
    spec = RolloutCorrectionConfig(preset=preset).spec
    result = compute_correction(
        CorrectionInputs(train_logprobs=TRAIN, rollout_logprobs=ROLLOUT, response_mask=MASK), spec
    )
    for correction in (preset, {"preset": preset}, spec):
        found = correct(TRAIN, ROLLOUT, MASK, correction)
        assert found.weights is not None
        assert result.weights is not None
        assert torch.equal(found.weights, result.weights)
        assert torch.equal(found.mask, result.mask)
        assert found.metrics == correction_metrics(result.states, spec)


def test_release_of_verl_gives_its_own_metrics() -> None:
    found = correct(TRAIN, ROLLOUT, MASK, {"verl_compat": "0.6.0", "rollout_is": "token"})
    assert found.metrics["mismatch/rollout_is_max"] == pytest.approx(3.0)
    assert "rollout_corr/num_tokens" not in found.metrics


def test_states_of_a_release_with_batch_normalisation_have_metrics() -> None:
    """A run with ``verl_compat`` and ``rollout_is_batch_normalize`` ended with KeyError: 'factor' at its first step."""
    keys = {"verl_compat": "0.9.1", "rollout_is": "token", "rollout_is_batch_normalize": True}
    spec = RolloutCorrectionConfig.model_validate(keys).spec
    result = compute_correction(
        CorrectionInputs(train_logprobs=TRAIN, rollout_logprobs=ROLLOUT, response_mask=MASK), spec
    )
    assert result.release_metrics is not None
    assert result.release_metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(3.5 / 3)
    metrics = correction_metrics(result.states, spec)
    assert metrics["rollout_corr/rollout_is_applied_mean"] == pytest.approx(1.0)
    assert "rollout_corr/rollout_is_batch_norm_factor" not in metrics


def test_unknown_preset_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as raised:
        correct(TRAIN, ROLLOUT, MASK, "decoupled_token_si")
    start = (
        "rollout correction cannot be read:\n  - preset: there is no 'decoupled_token_si'; nearest: decoupled_token_is;"
    )
    assert str(raised.value).startswith(start)


def test_tensors_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(CorrectionError, match="expected \\[B, T\\], or \\[N\\] with cu_seqlens"):
        correct(TRAIN[0], ROLLOUT[0], MASK[0], "decoupled_token_is")


def test_package_imports_no_torch_before_a_name_is_asked_for() -> None:
    code = (
        "import sys, mock_scheduler.correction.config.algorithm; print('torch' in sys.modules); "
        "from mock_scheduler.correction import correct; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_package_has_the_names_that_it_lists_and_no_other() -> None:
    names = mock_scheduler.correction.__all__
    assert all(getattr(mock_scheduler.correction, name).__name__ == name for name in names)
    assert set(names) <= set(dir(mock_scheduler.correction))
    with pytest.raises(AttributeError, match="has no attribute 'corect'"):
        _ = mock_scheduler.correction.corect  # type: ignore[attr-defined]
