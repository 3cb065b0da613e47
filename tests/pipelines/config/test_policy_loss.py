"""Losses that cannot be computed as configured are refused, each with its reason."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from pipelines.config.algorithm import policy_loss_problems
from pipelines.config.schema import PipelineConfig

WITHOUT_CONFLICT = {
    "is_per_token": True,
    "shares_sequences": False,
    "packs_sequences": False,
    "has_rows_of_turns": False,
    "has_dual_clip": False,
    "is_bypass": False,
}


def test_losses_without_a_conflict_are_allowed() -> None:
    assert policy_loss_problems("ppo", "token-mean", **{**WITHOUT_CONFLICT, "is_per_token": False}) == []
    assert policy_loss_problems("ppo", "seq-mean-token-mean", **WITHOUT_CONFLICT) == []
    assert policy_loss_problems("gmpo", "seq-mean-token-sum", **WITHOUT_CONFLICT) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"shares_sequences": True}, "parallel.context_parallel_size above 1 shares sequences among ranks"),
        ({"packs_sequences": True}, "training.sequence_packing puts several sequences into a line"),
        ({"has_rows_of_turns": True}, "rollout_form step makes a row of every turn"),
        ({"has_dual_clip": True}, "dual_clip has no part in it"),
        ({"is_bypass": True}, "algorithm.rollout_correction.bypass_mode has losses of its own"),
    ],
)
def test_gmpo_needs_whole_sequences_on_one_rank(change: dict[str, bool], problem: str) -> None:
    assert policy_loss_problems("gmpo", "seq-mean-token-sum", **{**WITHOUT_CONFLICT, **change}) == [
        f"policy_loss gmpo: {problem}"
    ]


def test_every_reason_is_listed_when_the_configuration_loads() -> None:
    with pytest.raises(ValidationError) as caught:
        PipelineConfig.model_validate(
            {"exp_name": "x", "policy_loss": "gmpo", "dual_clip": 3.0, "rollout_form": "step"}
        )
    message = str(caught.value)
    assert "loss_agg_mode token-mean: set seq-mean-token-sum, the mean over sequences" in message
    assert "rollout_form step makes a row of every turn" in message
    assert "dual_clip has no part in it" in message


def test_means_over_sequences_need_the_loss_per_token() -> None:
    training = {"calculate_per_token_loss": False}
    with pytest.raises(ValidationError, match=r"training\.calculate_per_token_loss false makes means of micro-batches"):
        PipelineConfig.model_validate({"exp_name": "x", "loss_agg_mode": "seq-mean-token-sum", "training": training})


def test_the_routers_losses_are_means_over_all_response_tokens() -> None:
    model = {
        "num_moe_experts": 4,
        "moe_aux_loss_coeff": 0.01,
        "moe_router_load_balancing_type": "aux_loss",
    }
    algorithm = {"rollout_correction": {"rollout_is": "token", "rs_denominator": "kept"}}
    with pytest.raises(ValidationError, match="the routers' losses"):
        PipelineConfig.model_validate({"exp_name": "x", "model": model, "algorithm": algorithm})


@pytest.mark.parametrize(
    ("section", "mode", "problem"),
    [
        ({"bypass_mode": True}, "seq-mean-token-sum", "entropy and KL are over all response tokens"),
        ({"rollout_is": "token", "rollout_kl_coef": 0.1}, "token-mean", "would be divided by the kept ones"),
    ],
)
def test_terms_over_all_response_tokens_are_means_over_these_or_refused(
    section: dict[str, object], mode: str, problem: str
) -> None:
    """In bypass with kept tokens as the denominator a mean over sequences weighed the entropy of kept ones alone."""
    kept = {"exp_name": "x", "loss_agg_mode": mode, "algorithm": {"rollout_correction": section}}
    PipelineConfig.model_validate(kept)
    kept["algorithm"] = {"rollout_correction": {**section, "rs_denominator": "kept"}}
    with pytest.raises(ValidationError, match=problem):
        PipelineConfig.model_validate(kept)
