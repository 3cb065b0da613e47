"""What a run says once of its correction, and that a dumped one loads back equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from mock_scheduler.config.loading import dump_config
from mock_scheduler.correction.config.algorithm import describe_correction
from mock_scheduler.correction.config.presets import PRESETS
from mock_scheduler.correction.config.rules import CorrectionSpec
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from pipelines.config.loading import load_config
from pipelines.config.schema import PipelineConfig
from tests.correction.config.configs import (
    SECTION,
    VETO,
    load_algorithm,
    load_text,
    nested,
    spec_of,
)

NOT_FINITE = "log-probabilities that are not finite: reject"


# What is said once


def test_what_was_understood_is_said_with_every_bound(tmp_path: Path) -> None:
    rejection = ("rollout_rs: token", "rollout_rs_threshold: 3.0", "rollout_rs_threshold_lower: 0.5")
    weights = ("rollout_is: sequence", "rollout_is_threshold: 5.0")
    config = load_text(tmp_path, nested(*weights, *rejection, "rollout_token_veto_threshold: 1e-4"))
    assert describe_correction(config.algorithm) == [
        f"[Rollout Correction] {SECTION}: decoupled (three policies); loss ppo_clip; weights per sequence; truncate "
        "weights at 5; reject tokens whose ratio is outside [0.5, 3]; reject tokens (the whole sequence) whose ratio "
        f"is outside [0.0001, inf]; {NOT_FINITE}; rejected tokens count in the denominator",
        "[Rollout Correction] rollout_rs token is token_k1 of newer releases, which clamps each log ratio to ± 20 "
        "first",
        "[Rollout Correction] rollout_token_veto_threshold became a rule that rejects the sequence of such a token",
    ]


@pytest.mark.parametrize(
    ("option", "threshold", "note"),
    [
        (
            "token_k2",
            250.0,
            "the bound 250 of token_k2 rejects nothing: with log ratios clamped to ± 20 it is at most 200",
        ),
        (
            "seq_max_k3",
            5e8,
            "the bound 5e+08 of seq_max_k3 rejects nothing: with log ratios clamped to ± 20 it is at most 4.85165e+08",
        ),
        (
            "seq_mean_k2",
            200.0,
            "the bound 200 of seq_mean_k2 rejects nothing: with log ratios clamped to ± 20 it is at most 200",
        ),
    ],
)
def test_a_threshold_that_nothing_can_exceed_is_said(option: str, threshold: float, note: str) -> None:
    section = RolloutCorrectionConfig(rollout_rs=option, rollout_rs_threshold=threshold)
    assert note in section.notes
    assert not RolloutCorrectionConfig(rollout_rs=option, rollout_rs_threshold=0.1).notes
    assert not RolloutCorrectionConfig(rollout_rs="seq_sum_k2", rollout_rs_threshold=threshold).notes


def test_a_preset_is_said_with_its_source_and_what_replaces_it(tmp_path: Path) -> None:
    correction = {"preset": "trl_opsm", "rs_denominator": "kept", "rules": [], "max_rejected_fraction": 0.5}
    config = load_algorithm(tmp_path, {"rollout_correction": correction})
    assert describe_correction(config.algorithm) == [
        f"[Rollout Correction] {SECTION}: bypass (two policies); loss ppo_clip; no weights; only measured; "
        f"{NOT_FINITE}; an error where more than 0.5 of the tokens are rejected",
        "[Rollout Correction] preset trl_opsm is of DeepSeek-V3.2, section 3.1; TRL off_policy_mask_threshold, slime "
        "--use-opsm; TRL's default threshold is none; set upper of the rule; given in its place: rules=0 rules, "
        "rs_denominator=kept, max_rejected_fraction=0.5",
    ]


@pytest.mark.parametrize(
    ("correction", "lines"),
    [
        (
            {"rollout_is": "token", "rollout_is_threshold_lower": 0.4},
            [
                "rollout_is_threshold_lower makes weights outside the two bounds 0 (IcePop); with rollout_is_mode "
                "truncate it does not"
            ],
        ),
        (
            {"rollout_is": "token", "rollout_is_threshold_lower": 0.4, "rollout_is_mode": "truncate"},
            ["rollout_is_threshold_lower counts in metrics alone, as weights are truncated from above"],
        ),
        (
            {"bypass_mode": True, "use_policy_gradient": True},
            ["use_policy_gradient true is loss_type reinforce"],
        ),
        (
            {"bypass_mode": True, "rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0},
            [
                "in bypass with loss_type ppo_clip the loss has the ratio to the rollout policy already: weights are "
                "for metrics alone",
                "in bypass tokens are rejected update by update, after advantages: no baseline leaves them out",
            ],
        ),
        (
            {"verl_compat": "0.6.0", "rollout_is": "token"},
            ["verl 0.6.0 makes weights of sequences with a ratio below its default veto threshold, 0.0001, 0"],
        ),
        (
            {"verl_compat": "0.9.1", "rollout_rs": "token_k1,seq_max_k2", "rollout_rs_threshold": "0.5_1.25,2.5"},
            ["verl 0.9.1 inverts bounds of k1 (verl#6377): token_k1 keeps ratios in [0.8, 2]"],
        ),
        ({"verl_compat": "0.9.1", "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}, []),
    ],
)
def test_what_is_not_as_one_may_expect_is_said(tmp_path: Path, correction: dict[str, object], lines: list[str]) -> None:
    config = load_algorithm(tmp_path, {"rollout_correction": correction})
    section = config.algorithm.rollout_correction
    assert section is not None
    assert list(section.notes) == lines
    assert describe_correction(config.algorithm)[1:] == [f"[Rollout Correction] {line}" for line in lines]


COUNTED = "rejected tokens count in the denominator"


@pytest.mark.parametrize(
    ("release", "correction", "text"),
    [
        ("0.9.1", {}, "no weights; only measured"),
        ("0.6.0", {}, "no weights; nothing is measured"),
        ("0.6.0", {"rollout_token_veto_threshold": 1e-3}, "no weights; nothing is measured"),
        ("0.9.1", {"rollout_is": "token", "rollout_is_threshold": "inf"}, "weights per token"),
        (
            "0.9.1",
            {"rollout_is": "sequence", "rollout_is_threshold": "0.5_4", "rollout_is_batch_normalize": True},
            "weights per sequence; weight 0 for sequences whose ratio (product) is outside [0.5, 4]; weights divided "
            "by their mean",
        ),
        (
            "0.9.1",
            {"rollout_rs": "token_k1,seq_mean_k1,seq_max_k2", "rollout_rs_threshold": "0.5_1.25,4,2.5"},
            "no weights; reject tokens whose ratio is outside [0.8, 2]; reject sequences whose ratio (geometric mean) "
            f"is outside [0.25, 4]; reject sequences whose k2 (max) is outside [0, 2.5]; {COUNTED}",
        ),
        (
            "0.7.1",
            {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_4", "max_rejected_fraction": 0.5},
            f"no weights; reject sequences whose ratio (product) is outside [0.25, 2]; {COUNTED}; an error where more "
            "than 0.5 of the tokens are rejected",
        ),
        (
            "0.6.1",
            {"rollout_rs": "token", "rollout_rs_threshold": 4, "rollout_token_veto_threshold": 1e-4},
            "no weights; reject tokens whose ratio is outside [0.25, 4]; reject tokens (the whole sequence) whose "
            f"ratio is outside [0.0001, inf]; {COUNTED}",
        ),
        (
            "e7cdce1c",
            {"rollout_rs": "token", "rollout_rs_threshold": 4, "rollout_rs_threshold_lower": 0.5},
            f"no weights; reject tokens whose ratio is outside [0.5, 4]; {COUNTED}",
        ),
        (
            "0.6.0",
            {"rollout_is": "token"},
            "weights per token; truncate weights at 2; weight 0 for sequences with a token whose ratio is outside "
            "[0.0001, inf]",
        ),
        (
            "0.6.0",
            {"rollout_is": "geometric", "rollout_is_mode": "mask", "rollout_token_veto_threshold": 1e-3},
            "weights per sequence (geometric mean); weight 0 for sequences whose ratio (geometric mean) is outside "
            "[0.5, 2]; weight 0 for sequences with a token whose ratio is outside [0.001, inf]",
        ),
    ],
)
def test_of_a_release_what_acts_is_said_with_its_bounds(release: str, correction: dict[str, object], text: str) -> None:
    """Every argument was listed raw, the default rollout_is_threshold=2.0 of no weights too, and k1 as it was asked."""
    section = RolloutCorrectionConfig.model_validate({"verl_compat": release, **correction})
    assert section.spec.describe() == (
        f"decoupled (three policies); loss ppo_clip; as verl {release} does, with its bugs; {text}"
    )


def test_weights_without_a_bound_are_so_to_a_release() -> None:
    section = RolloutCorrectionConfig(verl_compat="0.9.1", rollout_is="token", rollout_is_threshold="inf")
    assert section.spec.release_arguments["rollout_is_threshold"] == float("inf")


@pytest.mark.parametrize(
    ("options", "notes"),
    [
        ("token", ["token is token_k1"]),
        ("sequence,geometric", ["sequence is seq_sum_k1", "geometric is seq_mean_k1"]),
        ("token_k1,seq_sum_k1", []),
    ],
)
def test_what_newer_names_do_otherwise_is_said_of_each_older_one(options: str, notes: list[str]) -> None:
    """A token has no sum after which anything could be clamped, and here nothing is."""
    section = RolloutCorrectionConfig(rollout_rs=options, rollout_rs_threshold=2.0)
    told = "of newer releases, which clamps each log ratio to ± 20 first"
    assert list(section.notes) == [f"rollout_rs {note} {told}" for note in notes]


def test_a_term_of_the_loss_is_more_than_measuring() -> None:
    assert "only measured" not in RolloutCorrectionConfig(rollout_kl_coef=0.1).spec.describe()


def test_a_preset_whose_switch_is_set_to_null_loses_what_belongs_to_it(tmp_path: Path) -> None:
    correction = {"preset": "slime_mis", "rollout_rs": None, "rollout_is": None}
    config = load_algorithm(tmp_path, {"rollout_correction": correction})
    assert spec_of(config) == CorrectionSpec(rules=(VETO,))


# Dump and load

WRITTEN: dict[str, dict[str, object]] = {
    **{name: {"rollout_correction": {"preset": name}} for name in PRESETS},
    "empty": {"rollout_correction": {}},
    "off": {"rollout_correction": None},
    "text": {"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": "1_5"}},
    "unlimited": {"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": float("inf")}},
    "older": {"rollout_correction": {"bypass_mode": True, "use_policy_gradient": True}},
    "older preset with another loss": {"rollout_correction": {"preset": "pg_is", "loss_type": "ppo_clip"}},
    "list": {"rollout_correction": {"rollout_rs": ["token_k1", "seq_max_k2"], "rollout_rs_threshold": "2,3"}},
    "older release": {"rollout_correction": {"verl_compat": "0.7.0", "bypass_mode": True, "loss_type": "reinforce"}},
    "release": {"rollout_correction": {"verl_compat": "0.6.1", "rollout_rs": "token", "rollout_rs_threshold": 2.0}},
    "flat": {"rollout_is": True, "rollout_is_level": "token", "rollout_is_threshold": 2.0},
    "flat and measured": {"rollout_is_threshold": 2.0},
    "flat and off": {"rollout_is": False},
    "cap": {"tis_imp_ratio_cap": 2.0},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.all if place % 5 else ()) for place, name in enumerate(WRITTEN)]
)
def test_a_dumped_configuration_loads_back_equal(tmp_path: Path, name: str) -> None:
    config = PipelineConfig.model_validate({"exp_name": "x", "algorithm": WRITTEN[name]})
    (tmp_path / "dumped.yaml").write_text(dump_config(config), encoding="utf-8")
    loaded = load_config("dumped", config_path=tmp_path)
    assert loaded == config
    assert describe_correction(loaded.algorithm) == describe_correction(config.algorithm)
