"""Every golden case of the other systems, by the preset that carries its formula, with the bounds of the case.

Weights are compared at response tokens: they are 0 elsewhere here, and some systems leave that to the reduction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from mock_scheduler.correction import CorrectionInputs, CorrectionResult, compute_correction, correction_metrics
from mock_scheduler.correction.config.presets import PRESETS
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from pipelines.algorithm.losses import PolicyLossConfig, PolicyLossInputs, compute_policy_loss
from tests.correction.golden_cases import OTHERS, golden_inputs, tensor


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A preset with other values. bounds: of its rules, in their order; ``None`` takes a bound away."""

    preset: str
    values: Mapping[str, object] = field(default_factory=dict)
    bounds: tuple[Mapping[str, object], ...] = ()

    def section(self) -> RolloutCorrectionConfig:
        values: dict[str, object] = {"preset": self.preset, **self.values}
        if self.bounds:
            rules = PRESETS[self.preset].values["rules"]
            assert isinstance(rules, list)
            values["rules"] = [{**rule, **changes} for rule, changes in zip(rules, self.bounds, strict=True)]
        return RolloutCorrectionConfig.model_validate(values)


def _with_token_weights(action: str, **fields: object) -> Variant:
    """Weights of tokens without a bound, and one rule: what ``slime_tis`` and others become with further options."""
    rule = {"level": "token", "action": action, **fields}
    return Variant(preset="slime_tis", values={"rollout_is_threshold": "inf", "rules": [rule]})


_REVERSE_K3 = {"estimator": "k3", "level": "sequence", "aggregation": "mean", "reverse": True, "upper": 0.05}
#: k1 = −ℓ, and AReaL's kl_k1 is +ℓ.
_REVERSE_K1 = {"estimator": "k1", "level": "sequence", "aggregation": "sum", "reverse": True, "upper": 0.3}
_TOKEN_K2 = {"estimator": "k2", "upper": 0.05}
_GEO_BAND = {"lower": 0.85, "upper": 1.15}

VARIANTS: dict[str, Variant] = {
    "prime_ipo_loss_fn": Variant(preset="prime_ipo", bounds=({"lower": -0.05, "upper": 0.05},)),
    "prime_default_loss_fn": Variant(preset="prime_dppo", bounds=({"upper": 0.05}, {"lower": -0.05})),
    # Divergences leave the weights of tokens, which are those of rollout_is token.
    "areal_seq_mask_k3_mean": Variant(
        preset="areal_sequence_mask", values={"rollout_is": "token"}, bounds=(_REVERSE_K3, _REVERSE_K3)
    ),
    "areal_seq_mask_k1_sum": Variant(
        preset="areal_sequence_mask", values={"rollout_is": "token"}, bounds=(_REVERSE_K1, _REVERSE_K1)
    ),
    "areal_token_mask_k2": Variant(preset="areal_token_mask", bounds=(_TOKEN_K2, _TOKEN_K2)),
    "areal_seq_clamp_geo": Variant(preset="areal_sequence_clamp", bounds=({"upper": 1.1},)),
    "areal_seq_mask_geo": Variant(preset="areal_sequence_mask", bounds=(_GEO_BAND, _GEO_BAND)),
    "slime_token_tis_token_rs_veto_bn": Variant(
        preset="slime_mis", values={"rollout_rs_threshold": 1.5, "rollout_rs_threshold_lower": 0.7}
    ),
    "slime_icepop_function_0.8_1.2": Variant(preset="slime_tis", values={"rollout_is_threshold": "0.8_1.2"}),
    "slime_vanilla_tis_function_0.0_1.2": Variant(preset="slime_tis", values={"rollout_is_threshold": 1.2}),
    "slime_geometric_mask": Variant(
        preset="slime_tis",
        values={
            "rollout_is": "geometric",
            "rollout_is_threshold": "inf",
            "rollout_rs": "geometric",
            "rollout_rs_threshold": "0.85_1.2",
        },
    ),
    "slime_token_mask_0.8_1.2": _with_token_weights("reject_token", lower=0.8, upper=1.2),
    "slime_token_truncate": Variant(preset="slime_tis"),
    "nemo_icepop": Variant(preset="nemo_icepop", values={"rollout_is_threshold": "0.8_1.2"}),
    "nemo_tis_0.8_1.2": _with_token_weights("clip", lower=0.8, upper=1.2),
    "nemo_tis_1.2": Variant(preset="nemo_tis", values={"rollout_is_threshold": 1.2}),
    "nemo_none": Variant(preset="nemo_tis", values={"rollout_is_threshold": "inf"}),
    "nemo_seq_tis": Variant(preset="nemo_tis", values={"rollout_is": "sequence", "rollout_is_threshold": 1.2}),
    "trl_sequence_mask_max1.2": Variant(preset="trl_sequence_mask", bounds=({"upper": 1.2},)),
    "trl_token_truncate_max1.2": Variant(preset="trl_token_truncate", values={"rollout_is_threshold": 1.2}),
    "trl_sequence_truncate_max1.2": Variant(preset="trl_sequence_truncate", values={"rollout_is_threshold": 1.2}),
    "trl_token_truncate_0.8_1.2": _with_token_weights("clip", lower=0.8, upper=1.2),
    "trl_sequence_truncate_0.8_1.2": Variant(
        preset="trl_sequence_truncate",
        values={
            "rollout_is_threshold": "inf",
            "rules": [{"level": "sequence", "action": "clip", "lower": 0.8, "upper": 1.2}],
        },
    ),
    "trl_nan_sampling_logprob": Variant(preset="trl_token_truncate", values={"nan_policy": "ratio_one"}),
}
LOSSES = ("prime_ipo_loss_fn", "prime_default_loss_fn")


def _correct(case_id: str) -> tuple[CorrectionResult, dict[str, float]]:
    spec = VARIANTS[case_id].section().spec
    result = compute_correction(golden_inputs(OTHERS[case_id]), spec)
    return result, correction_metrics(result.states, spec)


def _at_tokens(case: dict[str, Any], rows: list[list[float | str]]) -> torch.Tensor:
    """The case's values, broadcast and 0 outside of the response."""
    mask = tensor(case["inputs"]["response_mask"], torch.float64)
    return tensor(rows, torch.float64).expand(mask.shape) * mask


@pytest.mark.parametrize("case_id", [name for name in OTHERS if name not in LOSSES])
def test_golden_other_system(case_id: str) -> None:
    case = OTHERS[case_id]
    expected = case["expected"]
    result, metrics = _correct(case_id)
    named = [name for name in ("weights", "importance_weights", "importance_sampling_ratio") if name in expected]
    assert len(named) == 1
    assert result.weights is not None
    wanted = _at_tokens(case, expected[named[0]])
    kept = (result.mask != 0).double()
    torch.testing.assert_close(result.weights.double(), wanted, rtol=1e-6, atol=1e-7)
    mask = expected.get("modified_response_mask", case["inputs"]["response_mask"])
    assert torch.equal(kept, tensor(mask, torch.float64))
    if expected.get("is_oob_ratio") is not None:
        assert math.isclose(_fraction_outside(case, result, metrics), expected["is_oob_ratio"], rel_tol=1e-6)
    if "filtered_fraction" in expected:
        num_tokens = float(tensor(case["inputs"]["response_mask"], torch.float64).sum())
        changed = num_tokens - float(kept.sum()) if "clamp" not in case_id else float((wanted >= 1.1).sum())
        assert changed / num_tokens == pytest.approx(expected["filtered_fraction"], rel=1e-12)
        if "clamp" not in case_id:
            assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(expected["filtered_fraction"])


def _fraction_outside(case: dict[str, Any], result: CorrectionResult, metrics: dict[str, float]) -> float:
    """NeMo-RL's ``is_oob_ratio``: the response tokens whose weight its bounds have changed."""
    if "rollout_corr/rollout_is_oob_ratio" in metrics:
        return metrics["rollout_corr/rollout_is_oob_ratio"]
    if case["params"]["sequence_level_importance_ratios"]:
        # One of three sequences, with four of nine tokens: ours counts sequences.
        assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1.0 / 3.0)
        assert result.weights is not None
        return float((result.weights == 1.2).sum()) / 9.0
    low = 0.0 if case["params"]["ratio_min"] is None else metrics["rollout_corr/rollout_is_ratio_fraction_low"]
    return metrics["rollout_corr/rollout_is_ratio_fraction_high"] + low


@pytest.mark.parametrize("case_id", LOSSES)
def test_golden_other_system_loss(case_id: str) -> None:
    """The sum of each row's loss, its gradient, and what was masked: prime-rl divides by the tokens of all ranks."""
    case = OTHERS[case_id]
    section = VARIANTS[case_id].section()
    assert (section.loss_type, section.rollout_kl_coef) == ("ratio", case["params"]["kl_tau"])
    train, rollout, mask = (
        tensor(case["inputs"][name], torch.float32) for name in ("log_prob", "rollout_log_prob", "response_mask")
    )
    for row, expected in enumerate(case["expected"]):
        advantages = torch.full((1, train.shape[1]), case["inputs"]["advantages"][row])
        inputs = CorrectionInputs(
            train_logprobs=train[row : row + 1],
            rollout_logprobs=rollout[row : row + 1],
            response_mask=mask[row : row + 1],
            advantages=advantages,
        )
        result = compute_correction(inputs, section.spec)
        new_logprobs = train[row : row + 1].clone().requires_grad_()
        loss = compute_policy_loss(
            PolicyLossInputs(
                new_logprobs=new_logprobs,
                entropy=torch.zeros_like(train[row : row + 1]),
                old_logprobs=inputs.rollout_logprobs,
                ref_logprobs=None,
                advantages=advantages,
                response_mask=inputs.response_mask.bool(),
                kept_mask=result.mask.bool(),
                rollout_logprobs=inputs.rollout_logprobs,
            ),
            PolicyLossConfig(
                pg_clip=0.2,
                loss_type=section.loss_type,
                rollout_kl_coef=section.rollout_kl_coef,
                term_mask="response",
            ),
        )
        assert float(loss.total.detach()) == pytest.approx(expected["loss_sum"], rel=1e-5, abs=1e-7)
        loss.total.backward()  # type: ignore[no-untyped-call]
        assert new_logprobs.grad is not None
        wanted = torch.tensor([expected["grad"]])
        torch.testing.assert_close(new_logprobs.grad, wanted, rtol=1e-5, atol=1e-8)
        _assert_masked(correction_metrics(result.states, section.spec), expected["metrics"])


def _assert_masked(metrics: dict[str, float], expected: dict[str, float]) -> None:
    """prime-rl has 0 for the mean of no token, which is left out here."""
    prefix = "rollout_corr/"
    assert metrics[f"{prefix}rollout_rs_masked_fraction"] == pytest.approx(expected["is_masked"])
    for name, theirs in (("rejected_k3_kl", "masked_mismatch_kl"), ("kept_k3_kl", "unmasked_mismatch_kl")):
        assert metrics.get(f"{prefix}{name}", 0.0) == pytest.approx(expected[theirs], rel=1e-4, abs=1e-6)
    for name, theirs in (("dppo_low", "is_masked_low"), ("dppo_high", "is_masked_high")):
        if theirs in expected:
            assert metrics[f"{prefix}rollout_rs_{name}_masked_fraction"] == pytest.approx(expected[theirs])


def test_golden_other_systems_are_all_here() -> None:
    assert len(OTHERS) == 24
    assert VARIANTS.keys() == OTHERS.keys()


def test_golden_other_systems_find_a_wrong_bound() -> None:
    """Negative control: with 1.3 in the place of 1.2 the first weight beyond it is not the one expected."""
    case = OTHERS["nemo_tis_1.2"]
    spec = Variant(preset="nemo_tis", values={"rollout_is_threshold": 1.3}).section().spec
    weights = compute_correction(golden_inputs(case), spec).weights
    assert weights is not None
    difference = (weights.double() - _at_tokens(case, case["expected"]["importance_weights"])).abs()
    assert difference.flatten().argmax() == 2
    assert float(difference.max()) == pytest.approx(0.1, rel=1e-5)
