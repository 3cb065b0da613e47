"""verl's older keys, flat in ``algorithm`` or with the actor, become ``rollout_correction``, or are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from mock_scheduler.correction.config.algorithm import describe_correction
from mock_scheduler.correction.config.rules import CorrectionSpec, Rule
from tests.correction.config.configs import (
    SECTION,
    VETO,
    cut,
    load_algorithm,
    load_text,
    nested,
    outside,
    problems_of_text,
    spec_of,
)

ACTOR = "actor_rollout_ref.actor"


# Keys of older releases, flat in `algorithm`


def test_weights_of_060_are_those_of_its_level_and_mode(tmp_path: Path) -> None:
    flat = {"rollout_is": True, "rollout_is_level": "geometric", "rollout_is_mode": "mask"}
    bounds = {"rollout_is_threshold": 1.0002, "rollout_is_threshold_lower": 0.9998}
    config = load_algorithm(tmp_path, {**flat, **bounds, "rollout_is_veto_threshold": 1e-4})
    assert spec_of(config) == CorrectionSpec(
        weight="geometric",
        rules=(Rule(level="geometric", action="zero_weight", lower=0.9998, upper=1.0002, name="rollout_is"), VETO),
        weight_bounds=(0.9998, 1.0002),
    )
    assert config.algorithm.flat_keys == (
        "algorithm.rollout_is, algorithm.rollout_is_level, algorithm.rollout_is_mode, algorithm.rollout_is_threshold, "
        "algorithm.rollout_is_threshold_lower, algorithm.rollout_is_veto_threshold became rollout_correction: "
        "rollout_is=geometric, rollout_is_mode=mask, rollout_is_threshold=1.0002, rollout_is_threshold_lower=0.9998, "
        "rollout_token_veto_threshold=0.0001"
    )


def test_060_truncates_where_no_mode_is_given_whatever_the_lower_bound(tmp_path: Path) -> None:
    """A lower bound alone made weights below it 0, which that release does in mode mask alone."""
    flat = {"rollout_is": True, "rollout_is_threshold": 2.0, "rollout_is_threshold_lower": 0.4}
    config = load_algorithm(tmp_path, flat)
    assert spec_of(config) == CorrectionSpec(weight="token", rules=(cut("token", 2.0),), weight_bounds=(0.4, 2.0))
    assert config.algorithm.flat_keys.endswith(
        "rollout_is_mode=truncate; verl 0.6.0 also vetoed ratios below 1e-4 by default: set rollout_is_veto_threshold "
        "for that"
    )


@pytest.mark.parametrize("switch", [{}, {"rollout_is": False}])
def test_060_only_measures_where_rollout_is_is_not_true(tmp_path: Path, switch: dict[str, object]) -> None:
    """Its weights were applied although that release's default is to measure only."""
    config = load_algorithm(tmp_path, {**switch, "rollout_is_level": "sequence", "rollout_is_threshold": 2.0})
    assert spec_of(config) == CorrectionSpec()
    assert config.algorithm.flat_keys.endswith(
        " became rollout_correction: an empty section, which only measures, as rollout_is is not true"
    )


def test_060_is_off_without_a_threshold(tmp_path: Path) -> None:
    config = load_algorithm(tmp_path, {"rollout_is": True, "rollout_is_level": "token", "rollout_is_threshold": None})
    assert config.algorithm.rollout_correction is None
    assert describe_correction(config.algorithm) == [
        "[Rollout Correction] algorithm.rollout_is, algorithm.rollout_is_level: rollout correction is off, as "
        "rollout_is_threshold is not set"
    ]


def test_flat_keys_that_name_a_level_are_read_as_the_section(tmp_path: Path) -> None:
    flat = {"rollout_is": "sequence", "rollout_is_threshold": "0.5_5.0", "rollout_rs": "token"}
    config = load_algorithm(tmp_path, {**flat, "rollout_rs_threshold": 2.0})
    assert spec_of(config).rules == (
        Rule(level="sequence", action="zero_weight", lower=0.5, upper=5.0, name="rollout_is"),
        outside("token", 0.5, 2.0),
    )


def test_rejection_alone_may_be_flat(tmp_path: Path) -> None:
    config = load_algorithm(tmp_path, {"rollout_rs": "token", "rollout_rs_threshold": 2.0})
    assert spec_of(config) == CorrectionSpec(rules=(outside("token", 0.5, 2.0),))


@pytest.mark.parametrize("cap", [2, 2.0])
def test_the_oldest_key_caps_token_weights(tmp_path: Path, cap: float) -> None:
    config = load_algorithm(tmp_path, {"tis_imp_ratio_cap": cap})
    assert spec_of(config) == CorrectionSpec(weight="token", rules=(cut("token", 2.0),), weight_bounds=(0.5, 2.0))
    assert config.algorithm.flat_keys == (
        f"algorithm.tis_imp_ratio_cap became rollout_correction: rollout_is=token, rollout_is_threshold={cap}"
    )


@pytest.mark.parametrize("cap", [-1, 0, None])
def test_the_oldest_key_switches_off_with_0_and_below(tmp_path: Path, cap: float | None) -> None:
    assert load_algorithm(tmp_path, {"tis_imp_ratio_cap": cap}).algorithm.rollout_correction is None


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            "{rollout_is: true, rollout_is_level: tokn, rollout_is_mode: clip, rollout_is_threshold: 2.0, "
            "rollout_is_veto_threshold: 0}",
            [
                "algorithm.rollout_is_level: unknown value 'tokn'; known values: token, segment, sequence, geometric",
                "algorithm.rollout_is_mode: unknown value 'clip'; known values: truncate, mask",
                "algorithm.rollout_is_veto_threshold: is 0; expected a number above 0",
            ],
        ),
        (
            "{tis_imp_ratio_cap: 0.5}",
            [
                "algorithm.tis_imp_ratio_cap: is 0.5, below 1: a policy that has not moved, whose ratio is 1, would be "
                "beyond it; write both bounds, as in '0.5_1.5', or use `rules`, which take any bound"
            ],
        ),
        (
            "{tis_imp_ratio_cap: 2.0, rollout_is: true}",
            ["algorithm.tis_imp_ratio_cap: is older than rollout_is beside it; leave it out"],
        ),
        (
            "{rollout_is: true, rollout_correction: {rollout_is: token}}",
            ["algorithm: has rollout_correction and the older keys rollout_is beside it; keep rollout_correction"],
        ),
    ],
)
def test_what_is_wrong_with_flat_keys_is_said_of_these(tmp_path: Path, text: str, problems: list[str]) -> None:
    assert problems_of_text(tmp_path, f"algorithm: {text}\n") == problems


# verl's `actor_rollout_ref`


def test_log_probabilities_that_are_not_computed_are_refused_with_a_correction(tmp_path: Path) -> None:
    off = "actor_rollout_ref: {rollout: {calculate_log_probs: false}}\n"
    assert load_text(tmp_path, off).algorithm.rollout_correction is None
    assert problems_of_text(tmp_path, off + nested("rollout_is: token")) == [
        "actor_rollout_ref.rollout.calculate_log_probs: is false, and algorithm.rollout_correction compares the "
        "log-probabilities of the rollout with the trainer's; set it to true, or leave it out (recordings always have "
        "them)"
    ]
    assert problems_of_text(tmp_path, off.replace("false", "always")) == [
        "actor_rollout_ref.rollout.calculate_log_probs: is 'always'; expected true or false"
    ]


def test_the_oldest_key_is_read_where_verl_had_it(tmp_path: Path) -> None:
    config = load_text(tmp_path, "actor_rollout_ref: {actor: {tis_imp_ratio_cap: 2.0, ppo_epochs: 1}}\n")
    assert spec_of(config).rules == (cut("token", 2.0),)
    assert config.algorithm.flat_keys == (
        f"{ACTOR}.tis_imp_ratio_cap became rollout_correction: rollout_is=token, rollout_is_threshold=2.0"
    )
    assert config.rollout_mock.origin == f"no rollout skip of verl's is on; not read: {ACTOR}"
    off = load_text(tmp_path, "actor_rollout_ref: {actor: {tis_imp_ratio_cap: -1}}\n" + nested("rollout_is: token"))
    assert spec_of(off).weight == "token"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "{tis_imp_ratio_cap: 2.0}",
            f"{ACTOR}.tis_imp_ratio_cap: is older than {SECTION} beside it, which says the same; leave it out",
        ),
        (
            "{tis_imp_ratio_cap: 1_5}",
            f"{ACTOR}.tis_imp_ratio_cap: is 1_5 without quotes in run.yaml, line 2, which YAML reads as the number 15; "
            "the key takes one number: write 15 where it is that one",
        ),
        (
            "{policy_loss: {loss_mode: bypass_mode}}",
            f"{ACTOR}.policy_loss.loss_mode: is bypass_mode, the loss of two policies, which is read from "
            f"{SECTION}.bypass_mode here; set that to true, or leave loss_mode out",
        ),
    ],
)
def test_an_actor_that_says_something_else_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    actor = f"actor_rollout_ref: {{actor: {text}}}\n"
    assert problems_of_text(tmp_path, actor + nested("rollout_is: token")) == [problem]


def test_the_actors_own_section_is_named_as_not_read(tmp_path: Path) -> None:
    policy_loss = "{loss_mode: bypass_mode, rollout_correction: {rollout_is: sequence}}"
    text = f"actor_rollout_ref: {{actor: {{policy_loss: {policy_loss}}}}}\n"
    config = load_text(tmp_path, text + nested("bypass_mode: true"))
    assert spec_of(config) == CorrectionSpec(bypass=True)
    assert config.rollout_mock.origin == (
        f"no rollout skip of verl's is on; not read: {ACTOR}.policy_loss.rollout_correction"
    )
