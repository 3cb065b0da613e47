"""``rollout_correction``: every message of a key that is wrong, or that has no effect beside the others."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mock_scheduler.correction.config.presets import PRESETS
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from tests.correction.config.configs import SECTION, problems_of, problems_of_text

KNOWN_KEYS = ", ".join(sorted(RolloutCorrectionConfig.model_fields))
REJECT = {"level": "token", "action": "reject_token"}
TOKEN = {"rollout_is": "token"}
RS = {"rollout_rs": "token_k1"}
OPTIONS = (
    "token, sequence, geometric, token_k1, token_k2, token_k3, seq_sum_k1, seq_sum_k2, seq_sum_k3, seq_mean_k1, "
    "seq_mean_k2, seq_mean_k3, seq_max_k2, seq_max_k3"
)
RELEASES = "0.9.1 (also as 0.9.0), 0.7.1, 0.6.1 (also as 0.7.0), e7cdce1c, 0.6.0"
BELOW_ONE = "below 1: a policy that has not moved, whose ratio is 1, would be beyond it"

WITHOUT_ONE = (
    "leaves out 1: a policy that has not moved, whose ratio is 1, would be outside; use `rules`, which take any bound"
)
VETO_ABOVE = (
    ", and a veto is below 1: a policy that has hardly moved would lose its sequences; write one such as 1e-4, or use "
    "`rules`, which take any bound"
)
ABOVE_ONE = (
    "above 1: a policy that has not moved, whose ratio is 1, would be below it; use `rules`, which take any bound"
)


@pytest.mark.parametrize(
    ("correction", "problem"),
    [
        (
            {"rollout_is": "tokens"},
            "rollout_is: unknown value 'tokens'; known values: token, segment, sequence, geometric",
        ),
        (
            {"rollout_is": True},
            "rollout_is: is true, the switch that verl 0.6.0 has flat in `algorithm`; name the level here: token, "
            "segment, sequence or geometric, or null for no weights",
        ),
        ({"rollout_is_mode": "clip", **TOKEN}, "rollout_is_mode: unknown value 'clip'; known values: truncate, mask"),
        ({"loss_type": "pg"}, "loss_type: unknown value 'pg'; known values: ppo_clip, reinforce, ratio"),
        ({"nan_policy": "skip"}, "nan_policy: unknown value 'skip'; known values: error, reject, ratio_one"),
        ({"rs_denominator": "all"}, "rs_denominator: unknown value 'all'; known values: original, kept"),
        ({"lone_survivor": "one"}, "lone_survivor: unknown value 'one'; known values: reward, zero"),
        (
            {"verl_compat": "0.8.0"},
            f"verl_compat: unknown release '0.8.0'; known releases: {RELEASES}",
        ),
        ({"verl_compat": 0.9}, f"verl_compat: unknown release 0.9; known releases: {RELEASES}"),
        (
            {"rollout_rs": ["token_k1", 2], "rollout_rs_threshold": 2.0},
            "rollout_rs: is a list with 2, of type int; expected texts",
        ),
        (
            {"rollout_is_treshold": 2.0},
            f"rollout_is_treshold: unknown key; nearest known key: {SECTION}.rollout_is_threshold; known keys of "
            f"{SECTION}: {KNOWN_KEYS}",
        ),
        (
            {"loss_mode": "bypass_mode"},
            f"loss_mode: unknown key; nearest known key: {SECTION}.bypass_mode; known keys of {SECTION}: {KNOWN_KEYS}",
        ),
        (
            {"preset": "slime"},
            f"preset: there is no 'slime'; nearest: slime_tis; there are: {', '.join(sorted(PRESETS))}",
        ),
        ({"preset": 3}, f"preset: there is no '3'; there are: {', '.join(sorted(PRESETS))}"),
        ("token", f"{SECTION}: is 'token', should be a section: keys with their values"),
    ],
)
def test_an_unknown_key_or_value_comes_with_the_known_ones(correction: object, problem: str) -> None:
    assert problems_of(correction) == [problem]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "is True, of type bool; expected a number, or a text such as '0.5_2.0'"),
        ([2.0], "is [2.0], of type list; expected a number, or a text such as '0.5_2.0'"),
        (math.nan, "is not a number (NaN), which nothing is above or below"),
        ("nan", "'nan' is no finite number above 0"),
        (0, "0.0 is no finite number above 0"),
        (-1.0, "-1.0 is no finite number above 0"),
        (-math.inf, "-inf is no finite number above 0"),
        ("", "'' is no number; write one, or a pair of bounds such as '0.5_2.0'"),
        ("a_b", "'a' is no number; write one, or a pair of bounds such as '0.5_2.0'"),
        ("2.0_0.5", "'2.0_0.5' has its lower bound above the upper one: nothing would be within"),
        ("1.5_3", f"'1.5_3' {WITHOUT_ONE}"),
        ("0.5_0.9", f"'0.5_0.9' {WITHOUT_ONE}"),
        ("1_2_3", "'1_2_3' has 3 parts; write two bounds, as in '0.5_2.0'"),
        (0.5, f"is 0.5, {BELOW_ONE}; write both bounds, as in '0.5_1.5', or use `rules`, which take any bound"),
        (
            0.55,
            f"is 0.55, {BELOW_ONE} (an unquoted 0.5_5 is this number to YAML); write both bounds, as in '0.55_1.5', or "
            "use `rules`, which take any bound",
        ),
        (
            510,
            "is 510: YAML reads an unquoted 5_10 as that number; quote a pair of bounds, as in '5.0_10.0', or write "
            "510.0 for the number",
        ),
    ],
)
@pytest.mark.parametrize("key", ["rollout_is_threshold", "rollout_rs_threshold"])
def test_a_threshold_that_is_none_is_refused(key: str, value: object, text: str) -> None:
    switch = TOKEN if key == "rollout_is_threshold" else RS
    if value == "" and key == "rollout_rs_threshold":
        text = "is empty; give one threshold, or one for each of token_k1"
    assert problems_of({**switch, key: value}) == [f"{key}: {text}"]


@pytest.mark.parametrize(
    "key", ["rollout_is_threshold_lower", "rollout_rs_threshold_lower", "rollout_token_veto_threshold"]
)
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "is 0; expected a number above 0"),
        (-0.5, "is -0.5; expected a number above 0"),
        (True, "is True, of type bool; expected one number"),
        ([0.5], "is [0.5], of type list; expected one number"),
        ("0.5_5", "is '0.5_5', of type str; expected one number"),
        (math.nan, "is nan; expected a finite number"),
        (math.inf, "is inf; expected a finite number"),
    ],
)
def test_a_bound_of_one_number_is_one_above_0(key: str, value: object, text: str) -> None:
    assert problems_of({key: value}) == [f"{key}: {text}"]


@pytest.mark.parametrize(
    ("correction", "problem"),
    [
        (
            {**TOKEN, "rollout_is_threshold": None},
            "rollout_is_threshold: is null, which bounds no weight; give a number such as 2.0, a pair such as "
            "'0.5_5.0', or inf for weights without a bound",
        ),
        (
            {**TOKEN, "rollout_is_threshold": "inf", "rollout_is_mode": "mask"},
            "rollout_is_threshold: is inf, and rollout_is_threshold_lower or rollout_is_mode mask needs a bound",
        ),
        (
            {**TOKEN, "rollout_is_threshold": "0.5_2.0", "rollout_is_mode": "truncate"},
            "rollout_is_threshold: '0.5_2.0' makes weights outside it 0; with rollout_is_mode truncate give one number",
        ),
        (
            {**TOKEN, "rollout_is_threshold": "0.5_2.0", "rollout_is_threshold_lower": 0.4},
            "rollout_is_threshold: '0.5_2.0' has a lower bound, and rollout_is_threshold_lower is 0.4; give one of "
            "them",
        ),
        (
            {**TOKEN, "rollout_is_threshold": 2.0, "rollout_is_threshold_lower": 3.0},
            f"rollout_is_threshold_lower: is 3, {ABOVE_ONE}",
        ),
        (
            {**TOKEN, "rollout_is_threshold": 2.0, "rollout_is_threshold_lower": 1.5, "rollout_is_mode": "truncate"},
            f"rollout_is_threshold_lower: is 1.5, {ABOVE_ONE}",
        ),
        (
            {"rollout_rs": "geometric", "rollout_rs_threshold": 1.01, "rollout_rs_threshold_lower": 1.001},
            f"rollout_rs_threshold_lower: is 1.001, {ABOVE_ONE}",
        ),
        ({"rollout_token_veto_threshold": 2.0}, f"rollout_token_veto_threshold: is 2{VETO_ABOVE}"),
        (
            {"verl_compat": "0.6.1", "rollout_token_veto_threshold": 1},
            f"rollout_token_veto_threshold: is 1{VETO_ABOVE}",
        ),
        (
            {"rollout_is_threshold": 3.0},
            "rollout_is_threshold: is 3 and has no effect without rollout_is; set rollout_is, or leave it out",
        ),
        (
            {"rollout_is_threshold_lower": 0.5},
            "rollout_is_threshold_lower: is 0.5 and has no effect without rollout_is; set rollout_is, or leave it out",
        ),
        (
            {"rollout_is_mode": "mask"},
            "rollout_is_mode: is 'mask' and has no effect without rollout_is; set rollout_is, or leave it out",
        ),
        (
            {"rollout_is_batch_normalize": True},
            "rollout_is_batch_normalize: is true and has no effect without rollout_is; set rollout_is, or leave it out",
        ),
        (
            {"rollout_rs_threshold": 2.0},
            "rollout_rs_threshold: is 2 and has no effect without rollout_rs; set rollout_rs, or leave it out",
        ),
        (
            {"rollout_rs_threshold_lower": 0.5},
            "rollout_rs_threshold_lower: is 0.5 and has no effect without rollout_rs; set rollout_rs, or leave it out",
        ),
        ({"rollout_rs": ""}, "rollout_rs: is empty; name at least one option, or leave it null"),
        (
            {"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2.0},
            f"rollout_rs: unknown option seq_max_k1; nearest: seq_max_k3; known options: {OPTIONS}",
        ),
        (
            {"rollout_rs": "turn, tokens,token_k1", "rollout_rs_threshold": 2.0},
            f"rollout_rs: unknown options turn, tokens; nearest: token; known options: {OPTIONS}",
        ),
        (RS, "rollout_rs_threshold: is null, and rollout_rs 'token_k1' rejects nothing without it; give it"),
        (
            {**RS, "rollout_rs_threshold": 2.0, "rollout_rs_threshold_lower": 0.5},
            "rollout_rs_threshold_lower: belongs to the options token, sequence, geometric; give token_k1 both bounds "
            "as rollout_rs_threshold: 'lo_hi'",
        ),
        (
            {"rollout_rs": "token_k1,seq_max_k2", "rollout_rs_threshold": "1,2,3"},
            "rollout_rs_threshold: '1,2,3' has 3 thresholds, and rollout_rs 2 options (token_k1, seq_max_k2); give one "
            "for all, or one for each",
        ),
        (
            {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2.0"},
            "rollout_rs_threshold: token_k2 is never negative and has an upper bound alone; '0.5_2.0' has two",
        ),
        ({"loss_type": "reinforce"}, "loss_type: reinforce is a loss of two policies; set bypass_mode true"),
        ({"use_policy_gradient": True}, "use_policy_gradient: true is a loss of two policies; set bypass_mode true"),
        (
            {"use_policy_gradient": True, "loss_type": "ratio", "bypass_mode": True},
            "use_policy_gradient: true is loss_type reinforce, and loss_type is ratio; give one of them",
        ),
        (
            {"use_policy_gradient": False, "loss_type": "reinforce", "bypass_mode": True},
            "use_policy_gradient: false is loss_type ppo_clip, and loss_type is reinforce; give one of them",
        ),
        (
            {"use_policy_gradient": True, "loss_type": "ppo_clip", "bypass_mode": True},
            "use_policy_gradient: true is loss_type reinforce, and loss_type is ppo_clip; give one of them",
        ),
        (
            {"preset": "pg_is", "use_policy_gradient": True, "loss_type": "ppo_clip"},
            "use_policy_gradient: true is loss_type reinforce, and loss_type is ppo_clip; give one of them",
        ),
        (
            {"use_policy_gradient": False, "loss_type": "ratio", "bypass_mode": True},
            "use_policy_gradient: false is loss_type ppo_clip, and loss_type is ratio; give one of them",
        ),
        (
            {"rollout_kl_in_advantage": 0.1, "bypass_mode": True},
            "rollout_kl_in_advantage: is 0.1, and belongs to loss_type reinforce, whose advantage has no ratio beside "
            "it; loss_type is ppo_clip",
        ),
        ({"rollout_kl_coef": True}, "rollout_kl_coef: is True, of type bool; expected one number"),
        ({"rollout_kl_coef": -0.1}, "rollout_kl_coef: is -0.1, should be greater than or equal to 0"),
        ({"max_rejected_fraction": 1.5}, "max_rejected_fraction: is 1.5, should be less than or equal to 1"),
        ({"max_rejected_fraction": True}, "max_rejected_fraction: is True, of type bool; expected one number"),
        ({"max_rejected_fraction": math.nan}, "max_rejected_fraction: is nan; expected a finite number"),
        (
            {"max_rejected_fraction": 1},
            "max_rejected_fraction: is 1, and no more than all can be rejected; leave it out",
        ),
        (
            {"max_rejected_fraction": 0.5, "nan_policy": "ratio_one"},
            "max_rejected_fraction: is 0.5, and nothing here rejects; set rollout_rs or a rule that rejects",
        ),
        (
            {"rs_denominator": "kept", "nan_policy": "error", **TOKEN},
            "rs_denominator: is 'kept', and nothing here rejects; set rollout_rs or a rule that rejects",
        ),
        (
            {"lone_survivor": "zero", "exclude_rejected_from_baseline": False},
            "lone_survivor: is zero and has no effect with exclude_rejected_from_baseline false, which leaves nobody "
            "alone",
        ),
        (
            {"lone_survivor": "zero", "bypass_mode": True},
            "lone_survivor: is 'zero' and has no effect with bypass_mode: tokens are rejected update by update, after "
            "advantages",
        ),
        (
            {"exclude_rejected_from_baseline": False, "bypass_mode": True},
            "exclude_rejected_from_baseline: is false and has no effect with bypass_mode: tokens are rejected update "
            "by update, after advantages",
        ),
    ],
)
def test_what_cannot_work_or_has_no_effect_is_refused(correction: dict[str, object], problem: str) -> None:
    assert problems_of(correction) == [problem]


@pytest.mark.parametrize("bounds", ["1_3", "0.5_1", "1_1"])
def test_bounds_may_end_at_1(bounds: str) -> None:
    section = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=bounds)
    lower, upper = bounds.split("_")
    assert section.spec.weight_bounds == (float(lower), float(upper))


def test_rules_take_bounds_that_leave_out_1() -> None:
    rules = [{**REJECT, "lower": 1.5, "upper": 3}, {"level": "token", "action": "reject_sequence", "lower": 2}]
    spec = RolloutCorrectionConfig.model_validate({"rules": rules}).spec
    assert [(rule.lower, rule.upper) for rule in spec.rules] == [(1.5, 3.0), (2.0, None)]


@pytest.mark.parametrize(
    ("values", "loss_type", "older"),
    [
        ({"use_policy_gradient": True, "bypass_mode": True}, "reinforce", True),
        ({"use_policy_gradient": "true", "bypass_mode": True}, "reinforce", True),
        ({"use_policy_gradient": False}, "ppo_clip", False),
        ({"preset": "pg_is"}, "reinforce", True),
        ({"preset": "pg_is", "loss_type": "ppo_clip"}, "ppo_clip", None),
        ({"preset": "pg_rs", "loss_type": "ppo_clip"}, "ppo_clip", None),
        ({"preset": "pg_rs", "loss_type": "ratio"}, "ratio", None),
        ({"preset": "pg_is", "use_policy_gradient": False}, "ppo_clip", False),
        ({"preset": "bypass_pg_is", "use_policy_gradient": False}, "ppo_clip", False),
        ({"preset": "bypass_ppo_clip", "use_policy_gradient": True}, "reinforce", True),
    ],
)
def test_the_loss_is_what_was_given_last_under_either_name(
    values: dict[str, object], loss_type: str, older: bool | None
) -> None:
    """preset pg_is with loss_type ppo_clip trained reinforce, as the preset has use_policy_gradient."""
    section = RolloutCorrectionConfig.model_validate(values)
    assert (section.loss_type, section.spec.loss_type, section.use_policy_gradient) == (loss_type, loss_type, older)
    assert RolloutCorrectionConfig.model_validate(section.model_dump()) == section


def test_options_of_rejection_may_be_a_list() -> None:
    section = RolloutCorrectionConfig.model_validate(
        {"rollout_rs": ["token_k1", "seq_max_k2"], "rollout_rs_threshold": "2,3"}
    )
    assert section.rollout_rs == "token_k1,seq_max_k2"
    assert [(rule.label, rule.upper) for rule in section.spec.rules] == [("token_k1", 2.0), ("seq_max_k2", 3.0)]


def test_all_problems_of_a_section_are_listed_at_once() -> None:
    correction = {
        "rollout_is": "token",
        "rollout_is_threshold": "a_b",
        "rollout_rs": "tokn",
        "rollout_rs_threshold": 2.0,
        "loss_type": "reinforce",
        "rules": [{**REJECT, "upper": 2}, {"level": "sequence", "action": "truncate", "upper": 3}],
    }
    assert problems_of(correction) == [
        "loss_type: reinforce is a loss of two policies; set bypass_mode true",
        "rollout_is_threshold: 'a' is no number; write one, or a pair of bounds such as '0.5_2.0'",
        f"rollout_rs: unknown option tokn; nearest: token; known options: {OPTIONS}",
        "rules.1: action truncate cuts weights at level sequence; rollout_is, the level of weights, is token",
    ]


def test_types_and_unknown_keys_are_listed_together() -> None:
    rules = [{"levle": "token"}, {**REJECT, "upper": "x"}]
    found = problems_of({"rollout_is": "tokn", "rules": rules, "bypass": True})
    assert [problem.split(":")[0] for problem in found] == [
        "rollout_is",
        "rules.0.level",
        "rules.0.action",
        "rules.0.levle",
        "rules.1.upper",
        "bypass",
    ]


def test_keys_of_the_algorithm_beside_it_that_have_no_effect_are_refused() -> None:
    correction = {"bypass_mode": True, "loss_type": "reinforce"}
    assert problems_of(correction, dual_clip=3.0, pg_clip_high=0.3) == [
        f"dual_clip: is 3 and has no effect: {SECTION}.loss_type reinforce has no clip; leave it out",
        f"pg_clip_high: is 0.3 and has no effect: {SECTION}.loss_type reinforce has no clip; leave it out",
    ]
    compared = {"adv_estimator": "gae", "reward_normalization": {"method": "none"}}
    for key, value in (("lone_survivor", "zero"), ("exclude_rejected_from_baseline", False)):
        assert problems_of({key: value}, **compared) == [
            f"{key}: has no effect: adv_estimator gae with reward_normalization.method none compares no rewards"
        ]


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("bypass_mode: true", f"{SECTION}.bypass_mode"),
        ("gamma: 1.0", "gamma"),
        ("rollout_corection: {}", SECTION),
        ("rollout_is_treshold: 2.0", f"{SECTION}.rollout_is_threshold"),
    ],
)
def test_a_key_at_the_wrong_level_comes_with_the_right_one(tmp_path: Path, text: str, nearest: str) -> None:
    name = text.split(":")[0]
    assert problems_of_text(tmp_path, f"algorithm: {{{text}}}\n") == [
        f"algorithm.{name}: unknown key; nearest known key: {nearest}; known keys of algorithm: flat_keys, "
        "rollout_correction"
    ]
