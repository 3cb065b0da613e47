"""Rollout correction as other systems have it, by name: the values of ``rollout_correction`` and their source.

Contract: a preset is nothing but values; any key given beside ``preset`` counts in its place. ``remark`` has the parts
of a system's behaviour that values cannot express.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

_VERL_091 = "verl 0.9.1, verl/trainer/config/algorithm.py, RolloutCorrectionConfig"
_VERL_061 = "verl 0.6.1, verl/trainer/config/algorithm.py, RolloutCorrectionConfig"
_TRL = "TRL 1.16.0, GRPOTrainer, vllm_importance_sampling_mode"
_SLIME = "slime 624b824a, examples/train_infer_mismatch_helper"
_NEMO = "NeMo-RL 7ea279ab, ClippedPGLossFn"
_AREAL = "AReaL 4aef98d8, rejection_sampling"
_PRIME = "prime-rl 559b4477, loss functions of the trainer"

Values = Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Holds values of ``rollout_correction``, their source, and differences from it."""

    values: Values
    source: str
    remark: str = ""


def _is(level: str, threshold: object = 2.0) -> dict[str, object]:
    return {"rollout_is": level, "rollout_is_threshold": threshold}


def _rs(option: str, threshold: object) -> dict[str, object]:
    return {"rollout_rs": option, "rollout_rs_threshold": threshold}


_BYPASS_PG: Values = {"bypass_mode": True, "loss_type": "reinforce"}
_BYPASS_CLIP: Values = {"bypass_mode": True, "loss_type": "ppo_clip"}
_GEO = _rs("seq_mean_k1", "0.999_1.001")
_K3 = _rs("seq_mean_k3", 0.01)
_ICEPOP = _is("token", "0.5_5.0")

_VERL: Mapping[str, Values] = {
    "disabled": {},
    "decoupled_token_is": _is("token"),
    "decoupled_seq_is": _is("sequence"),
    "decoupled_token_icepop": _ICEPOP,
    "decoupled_seq_is_rs": {**_is("sequence"), **_rs("seq_sum_k1", "0.5_2.0")},
    "decoupled_geo_rs": _GEO,
    "decoupled_geo_rs_seq_tis": {**_is("sequence"), **_GEO},
    "decoupled_geo_rs_token_tis": {**_is("token"), **_GEO},
    "decoupled_k3_rs": _K3,
    "decoupled_k3_rs_seq_tis": {**_is("sequence"), **_K3},
    "decoupled_k3_rs_token_tis": {**_is("token"), **_K3},
    "bypass_ppo_clip": _BYPASS_CLIP,
    "bypass_ppo_clip_geo_rs": {**_BYPASS_CLIP, **_GEO},
    "bypass_ppo_clip_k3_rs": {**_BYPASS_CLIP, **_K3},
    "bypass_pg_is": {**_BYPASS_PG, **_is("sequence")},
    "bypass_pg_geo_rs": {**_BYPASS_PG, **_GEO},
    "bypass_pg_geo_rs_seq_tis": {**_BYPASS_PG, **_is("sequence"), **_GEO},
    "bypass_pg_geo_rs_token_tis": {**_BYPASS_PG, **_is("token"), **_GEO},
    "bypass_pg_token_icepop": {**_BYPASS_PG, **_ICEPOP},
}
_VERL_VETO: Values = {"rollout_token_veto_threshold": 1e-4}
#: Names of 0.6.1 that mean something else than the same name in 0.9.1, or are gone there.
_VERL_OLD: Mapping[str, Values] = {
    "verl_0.6.1_decoupled_token_is": _is("token"),
    "verl_0.6.1_decoupled_seq_is": _is("sequence"),
    "verl_0.6.1_decoupled_seq_is_rs": {**_is("sequence"), **_rs("sequence", 2.0)},
    "verl_0.6.1_decoupled_geo_rs": {**_rs("geometric", 1.001), **_VERL_VETO},
    "pg_is": {**_is("sequence"), "bypass_mode": True, "use_policy_gradient": True},
    "pg_rs": {**_rs("geometric", 1.001), **_VERL_VETO, "bypass_mode": True, "use_policy_gradient": True},
    "ppo_is_bypass": {**_is("token"), "bypass_mode": True},
}


def _rule(level: str, action: str, **fields: object) -> dict[str, object]:
    return {"level": level, "action": action, **fields}


def _rules(level: str | None, *rules: Values, **fields: object) -> dict[str, object]:
    """Returns weights of a level without a bound of their own, and rules."""
    weights = {} if level is None else _is(level, "inf")
    return {**weights, "rules": [dict(rule) for rule in rules], **fields}


_OTHERS: Mapping[str, Preset] = {
    "trl_token_truncate": Preset(values=_is("token", 3.0), source=_TRL),
    "trl_token_mask": Preset(
        values=_rules("token", _rule("token", "zero_weight", upper=3.0)),
        source=_TRL,
    ),
    "trl_sequence_truncate": Preset(values=_is("sequence", 3.0), source=_TRL),
    "trl_sequence_mask": Preset(
        values=_rules("sequence", _rule("sequence", "zero_weight", upper=3.0)),
        source=f"{_TRL}, its default",
        remark="TRL takes ratio 1 where the sampling log-probability is NaN: nan_policy ratio_one",
    ),
    "trl_opsm": Preset(
        values=_rules(
            None,
            _rule(
                "sequence",
                "reject_sequence",
                estimator="k1",
                aggregation="mean",
                upper=1e-4,
                when="negative_advantage",
            ),
            bypass_mode=True,
        ),
        source="DeepSeek-V3.2, section 3.1; TRL off_policy_mask_threshold, slime --use-opsm",
        remark="TRL's default threshold is none; set upper of the rule",
    ),
    "slime_tis": Preset(values=_is("token"), source="slime 624b824a, vanilla_tis_function: --use-tis, tis-clip 2.0"),
    "slime_mis": Preset(
        values={
            **_is("token"),
            "rollout_rs": "token",
            "rollout_rs_threshold": 2.0,
            "rollout_rs_threshold_lower": 0.5,
            "rollout_token_veto_threshold": 1e-4,
            "rollout_is_batch_normalize": True,
        },
        source=f"{_SLIME}, mis.yaml",
    ),
    "icepop": Preset(values=_ICEPOP, source="Ring-1T, arXiv 2510.18855, IcePop with α 0.5 and β 5"),
    "icepop_prime": Preset(values=_is("token", "0.2_5.0"), source=f"{_PRIME}, IcePop with 0.2 and 5"),
    "nemo_tis": Preset(values=_is("token"), source=f"{_NEMO}, truncated_importance_sampling_type tis"),
    "nemo_icepop": Preset(values=_ICEPOP, source=f"{_NEMO}, truncated_importance_sampling_type icepop"),
    "nemo_seq_mask_tis": Preset(
        values=_rules("token", _rule("geometric", "zero_weight", lower=0.999, upper=1.002)),
        source=f"{_NEMO}, truncated_importance_sampling_type seq-mask-tis",
    ),
    "areal_token_mask": Preset(
        values=_rules(
            "token",
            _rule("token", "zero_weight", upper=5.0),
            _rule("token", "reject_token", upper=5.0),
            nan_policy="ratio_one",
        ),
        source=f"{_AREAL}, level token, action mask, metric ratio, upper 5.0",
    ),
    "areal_sequence_mask": Preset(
        values=_rules(
            "geometric",
            _rule("geometric", "zero_weight", upper=5.0),
            _rule("geometric", "reject_sequence", upper=5.0),
            nan_policy="ratio_one",
        ),
        source=f"{_AREAL}, level sequence, action mask, metric ratio, agg mean, upper 5.0",
    ),
    "areal_sequence_clamp": Preset(
        values=_rules("geometric", _rule("geometric", "truncate", upper=5.0), nan_policy="ratio_one"),
        source=f"{_AREAL}, level sequence, action clamp, metric ratio, agg mean, upper 5.0",
    ),
    "aipo": Preset(
        values={**_BYPASS_PG, **_is("token")},
        source="LlamaRL, arXiv 2505.24034, AIPO: −min(π_θ/μ, δ)·A·log π_θ",
        remark="the paper's δ is 2 to 10; it is rollout_is_threshold",
    ),
    "cispo": Preset(
        values={**_BYPASS_PG, **_rules("token", _rule("token", "clip", lower=0.8, upper=1.2))},
        source="MiniMax-M1, arXiv 2506.13585, CISPO: −sg(clip(ρ, 1 − ε_low, 1 + ε_high))·A·log π_θ",
        remark="the paper bounds from above alone, with a large ε_low",
    ),
    "prime_legacy": Preset(
        values={
            **_BYPASS_PG,
            **_rules(
                "token",
                _rule("token", "reject_token", lower=0.125, upper=8.0),
                _rule("geometric", "reject_sequence", lower=0.1, upper=10.0),
                _rule("token", "reject_sequence", upper=100.0),
            ),
        },
        source="prime-rl until February 2026: token ratio in [0.125, 8], geometric in [0.1, 10], no token above 100",
        remark="its −τ·ρ·ℓ term is rollout_kl_in_advantage",
    ),
    "prime_dppo": Preset(
        values=_rules(
            None,
            _rule(
                "token", "reject_token", estimator="prob_diff", upper=0.2, when="positive_advantage", name="dppo_high"
            ),
            _rule(
                "token",
                "reject_token",
                estimator="prob_diff",
                lower=-0.2,
                when="not_positive_advantage",
                name="dppo_low",
            ),
            bypass_mode=True,
            loss_type="ratio",
            rollout_kl_coef=1e-3,
        ),
        source=f"{_PRIME}, default_loss_fn",
    ),
    "prime_ipo": Preset(
        values=_rules(
            None,
            _rule("token", "reject_token", estimator="prob_diff", lower=-0.1, upper=0.1, name="ipo"),
            bypass_mode=True,
            loss_type="ratio",
            rollout_kl_coef=1e-3,
        ),
        source=f"{_PRIME}, ipo_loss_fn",
    ),
    "roll_token": Preset(
        values={**_is("token", 1.2), "rules": [_rule("token", "reject_token", lower=0.8, upper=1.2)]},
        source="ROLL, train_infer_correction: is_weight token, clamp 0 to 1.2, a token filter on the ratio",
    ),
    "roll_segment": Preset(
        values={
            **_is("segment", 1.2),
            "rules": [_rule("segment", "reject_token", aggregation="mean", lower=0.8, upper=1.2)],
        },
        source="ROLL, train_infer_correction: is_weight segment (one turn), clamp 0 to 1.2, a segment filter",
    ),
    "roll_prob_diff": Preset(
        values={
            **_is("token", 1.2),
            "rules": [_rule("token", "reject_token", estimator="prob_diff", lower=-0.2, upper=0.2)],
        },
        source="ROLL, train_infer_correction: a token filter on the difference of probabilities",
    ),
    "megatron_lm": Preset(
        values=_is("token"),
        source="Megatron-LM, --rl-inference-logprobs-is-correction, --rl-importance-sampling-truncation-coef",
    ),
    "xtuner": Preset(
        values={**_is("token"), **_rs("token_k1", 5.0)},
        source="XTuner, rollout importance sampling: TIS and a token mask together, each with its own threshold",
    ),
}

PRESETS: Mapping[str, Preset] = {
    **{name: Preset(values=values, source=_VERL_091) for name, values in _VERL.items()},
    **{name: Preset(values=values, source=_VERL_061) for name, values in _VERL_OLD.items()},
    **_OTHERS,
}


def preset_values(name: str) -> dict[str, object]:
    """Looks up the values of a preset; raises ``ValueError`` with the nearest name for an unknown one."""
    preset = PRESETS.get(name)
    if preset is not None:
        return dict(preset.values)
    nearest = get_close_matches(name, PRESETS, n=1, cutoff=0.5)
    hint = f"; nearest: {nearest[0]}" if nearest else ""
    raise ValueError(f"there is no {name!r}{hint}; there are: {', '.join(sorted(PRESETS))}")
