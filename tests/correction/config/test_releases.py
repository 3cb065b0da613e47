"""``verl_compat`` with keys that the release lacks: every message."""

from __future__ import annotations

import pytest

from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from tests.correction.config.configs import problems_of

REJECT = {"level": "token", "action": "reject_token"}
TOKEN = {"rollout_is": "token"}
ABSENT = "reproduces a release that has no such key"

OF_0_6_1 = "known options of verl 0.6.1: token, sequence, geometric"
OF_0_9_1 = (
    "known options of verl 0.9.1: token_k1, token_k2, token_k3, seq_sum_k1, seq_sum_k2, seq_sum_k3, seq_mean_k1, "
    "seq_mean_k2, seq_mean_k3, seq_max_k2, seq_max_k3"
)
#: The nearest name of 0.9.1 to token was token_k3, of another statistic.
OTHER_NAMES = (
    ("0.9.1", "token", f"rollout_rs: unknown option token; nearest: token_k1; {OF_0_9_1}"),
    ("0.9.1", "sequence", f"rollout_rs: unknown option sequence; nearest: seq_sum_k1; {OF_0_9_1}"),
    ("0.9.1", "geometric", f"rollout_rs: unknown option geometric; nearest: seq_mean_k1; {OF_0_9_1}"),
    ("0.9.1", "toke_k2", f"rollout_rs: unknown option toke_k2; nearest: token_k2; {OF_0_9_1}"),
    ("0.6.1", "seq_sum_k1", f"rollout_rs: unknown option seq_sum_k1; nearest: sequence; {OF_0_6_1}"),
    ("0.6.1", "seq_mean_k1", f"rollout_rs: unknown option seq_mean_k1; nearest: geometric; {OF_0_6_1}"),
    ("0.6.1", "token_k3", f"rollout_rs: unknown option token_k3; {OF_0_6_1}"),
)


@pytest.mark.parametrize(
    ("release", "correction", "problem"),
    [
        (
            "0.9.1",
            {"rules": [{**REJECT, "upper": 2}]},
            f"rules: is given, and verl_compat 0.9.1 {ABSENT}; leave it out",
        ),
        ("0.9.1", {"nan_policy": "error"}, f"nan_policy: is 'error', and verl_compat 0.9.1 {ABSENT}; leave it out"),
        ("0.9.1", {"rollout_kl_coef": 0.1}, f"rollout_kl_coef: is 0.1, and verl_compat 0.9.1 {ABSENT}; leave it out"),
        (
            "0.9.1",
            {"rollout_token_veto_threshold": 1e-4},
            f"rollout_token_veto_threshold: is 0.0001, and verl_compat 0.9.1 {ABSENT}; nearest: rollout_rs seq_max_k2, "
            "which is two-sided",
        ),
        (
            "0.7.1",
            {"rollout_is_threshold_lower": 0.5, **TOKEN},
            f"rollout_is_threshold_lower: is 0.5, and verl_compat 0.7.1 {ABSENT}; only 0.6.0 has one; in 0.9.1 "
            "rollout_is_threshold 'lo_hi'",
        ),
        (
            "0.7.1",
            {"use_policy_gradient": True, "bypass_mode": True},
            f"use_policy_gradient: is true, and verl_compat 0.7.1 {ABSENT}; since 0.7.0 it is loss_type reinforce",
        ),
        (
            "0.6.1",
            {"loss_type": "ratio", "bypass_mode": True},
            "loss_type: is ratio; verl_compat 0.6.1 has ppo_clip, reinforce",
        ),
        (
            "e7cdce1c",
            {"rollout_is_batch_normalize": True, **TOKEN},
            f"rollout_is_batch_normalize: is true, and verl_compat e7cdce1c {ABSENT}; leave it out",
        ),
        (
            "0.6.1",
            {"rollout_is_mode": "mask", **TOKEN},
            f"rollout_is_mode: is 'mask', and verl_compat 0.6.1 {ABSENT}; it only truncates, and 0.9.1 has "
            "rollout_is_threshold 'lo_hi'",
        ),
        (
            "0.7.1",
            {
                "rollout_rs": "token_k1",
                "rollout_rs_threshold": 2.0,
                "rs_denominator": "kept",
                "loss_type": "ratio",
                "bypass_mode": True,
            },
            "loss_type: is ratio; verl_compat 0.7.1 has ppo_clip, reinforce",
        ),
        ("0.9.1", {"rollout_is": "geometric"}, "rollout_is: is geometric; verl_compat 0.9.1 has token, sequence"),
        (
            "0.6.0",
            {"rollout_is": "segment"},
            "rollout_is: is segment; verl_compat 0.6.0 has token, sequence, geometric",
        ),
        (
            "0.7.1",
            {**TOKEN, "rollout_is_threshold": "0.5_5.0"},
            "rollout_is_threshold: is '0.5_5.0'; verl_compat 0.7.1 takes one number",
        ),
        (
            "0.6.1",
            {"rollout_rs": "token", "rollout_rs_threshold": "0.5_2.0"},
            "rollout_rs_threshold: is '0.5_2.0'; verl_compat 0.6.1 takes one number, and a lower one as "
            "rollout_rs_threshold_lower",
        ),
        (
            "0.6.1",
            {"rollout_rs": "token,sequence", "rollout_rs_threshold": 2.0},
            "rollout_rs: is 'token,sequence'; verl_compat 0.6.1 takes one option",
        ),
        (
            "0.6.1",
            {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0},
            "rollout_rs: unknown option token_k1; nearest: token; known options of verl 0.6.1: token, sequence, "
            "geometric",
        ),
        *((older, {"rollout_rs": given, "rollout_rs_threshold": 2.0}, text) for older, given, text in OTHER_NAMES),
    ],
)
def test_a_release_is_only_asked_for_what_it_had(release: str, correction: dict[str, object], problem: str) -> None:
    assert problems_of({"verl_compat": release, **correction}) == [problem]


def test_a_release_without_rejection_says_what_it_has_in_its_place() -> None:
    correction = {"verl_compat": "0.6.0", "rollout_rs": "token", "rollout_rs_threshold": 2.0}
    found = problems_of(correction)
    assert found[:2] == [
        f"rollout_rs: is 'token', and verl_compat 0.6.0 {ABSENT}; use rollout_is_mode mask",
        f"rollout_rs_threshold: is 2, and verl_compat 0.6.0 {ABSENT}; use rollout_is_mode mask",
    ]


@pytest.mark.parametrize(("alias", "release"), [("0.9.0", "0.9.1"), ("0.7.0", "0.6.1"), ("0.7.1", "0.7.1")])
def test_a_release_with_the_helper_of_another_is_that_one(alias: str, release: str) -> None:
    section = RolloutCorrectionConfig.model_validate({"verl_compat": alias, "rollout_is": "token"})
    assert (section.verl_compat, section.spec.release) == (release, release)


def test_the_key_of_0_7_0_says_what_the_one_of_0_6_1_does() -> None:
    loss = {"bypass_mode": True, "loss_type": "reinforce"}
    newer = RolloutCorrectionConfig.model_validate({"verl_compat": "0.7.0", **loss})
    older = RolloutCorrectionConfig.model_validate(
        {"verl_compat": "0.6.1", "bypass_mode": True, "use_policy_gradient": True}
    )
    assert newer.spec == older.spec


def test_of_a_release_with_neither_name_the_given_one_is_named() -> None:
    assert problems_of({"verl_compat": "e7cdce1c", "bypass_mode": True, "use_policy_gradient": True}) == [
        f"bypass_mode: is true, and verl_compat e7cdce1c {ABSENT}; leave it out",
        f"use_policy_gradient: is true, and verl_compat e7cdce1c {ABSENT}; since 0.7.0 it is loss_type reinforce",
    ]


def test_a_preset_that_a_release_cannot_be_is_named() -> None:
    assert problems_of({"preset": "trl_sequence_mask", "verl_compat": "0.9.1"}) == [
        f"rules: is given by preset trl_sequence_mask, and verl_compat 0.9.1 {ABSENT}; leave it out"
    ]
