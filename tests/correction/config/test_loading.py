"""``algorithm`` as people write it: the guide's YAML, and numbers that YAML makes of pairs of bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from mock_scheduler.correction.config.algorithm import describe_correction
from mock_scheduler.correction.config.rules import CorrectionSpec, Rule
from mock_scheduler.errors import ConfigError
from pipelines.config.loading import load_config
from tests.correction.config.configs import (
    SECTION,
    VETO,
    cut,
    load_text,
    nested,
    outside,
    problems_of_text,
    spec_of,
)

# The guide

QUICK_START = """
algorithm:
  rollout_correction:
    rollout_is: token
    rollout_is_threshold: 2.0
    rollout_rs: null
    rollout_rs_threshold: null
    rollout_rs_threshold_lower: null
    rollout_token_veto_threshold: null
actor_rollout_ref:
  rollout:
    calculate_log_probs: true
"""


GUIDE = {
    "quick start": (
        QUICK_START,
        CorrectionSpec(weight="token", rules=(cut("token", 2.0),), weight_bounds=(0.5, 2.0)),
    ),
    "example 1": (
        nested("rollout_is: token", "rollout_is_threshold: 2.0", "rollout_rs: null"),
        CorrectionSpec(weight="token", rules=(cut("token", 2.0),), weight_bounds=(0.5, 2.0)),
    ),
    "example 2": (
        nested("rollout_is: null", "rollout_rs: sequence", "rollout_rs_threshold: 3.0"),
        CorrectionSpec(rules=(outside("sequence", 1 / 3, 3.0),)),
    ),
    "example 3": (
        nested("rollout_is: token", "rollout_is_threshold: 2.0", "rollout_rs: token", "rollout_rs_threshold: 2.0"),
        CorrectionSpec(weight="token", rules=(cut("token", 2.0), outside("token", 0.5, 2.0)), weight_bounds=(0.5, 2.0)),
    ),
    "example 4": (
        nested(
            "rollout_is: null",
            "rollout_rs: geometric",
            "rollout_rs_threshold: 1.0002",
            "rollout_rs_threshold_lower: 0.9998",
            "rollout_token_veto_threshold: 1e-4",
        ),
        CorrectionSpec(rules=(outside("geometric", 0.9998, 1.0002), VETO)),
    ),
    "example 5": (
        nested(
            "rollout_is: sequence",
            "rollout_is_threshold: 5.0",
            "rollout_rs: token",
            "rollout_rs_threshold: 3.0",
            "rollout_rs_threshold_lower: 0.5",
            "rollout_token_veto_threshold: 1e-4",
        ),
        CorrectionSpec(
            weight="sequence",
            rules=(cut("sequence", 5.0), outside("token", 0.5, 3.0), VETO),
            weight_bounds=(0.2, 5.0),
        ),
    ),
    "dual thresholds": (
        nested("rollout_is: token", "rollout_is_threshold: 2.0", "rollout_is_threshold_lower: 0.4"),
        CorrectionSpec(
            weight="token",
            rules=(Rule(level="token", action="zero_weight", lower=0.4, upper=2.0, name="rollout_is"),),
            weight_bounds=(0.4, 2.0),
        ),
    ),
    "automatic reciprocal": (
        nested("rollout_is: token", "rollout_is_threshold: 2.0", "rollout_is_threshold_lower: null"),
        CorrectionSpec(weight="token", rules=(cut("token", 2.0),), weight_bounds=(0.5, 2.0)),
    ),
    "a relaxed veto": (
        nested("rollout_token_veto_threshold: 1e-3"),
        CorrectionSpec(rules=(VETO.model_copy(update={"lower": 1e-3}),)),
    ),
    "nothing but measuring": ("algorithm: {rollout_correction: {}}\n", CorrectionSpec()),
}


@pytest.mark.parametrize(("text", "spec"), GUIDE.values(), ids=GUIDE)
def test_what_the_guide_says_loads_and_means_that(tmp_path: Path, text: str, spec: CorrectionSpec) -> None:
    config = load_text(tmp_path, text)
    assert spec_of(config) == spec
    assert not config.rollout_mock.origin  # nothing of it was set aside


@pytest.mark.parametrize("text", ["", "algorithm:\n", "algorithm: {rollout_correction: null}\n"])
def test_without_a_section_there_is_no_correction(tmp_path: Path, text: str) -> None:
    config = load_text(tmp_path, text) if text != "algorithm:\n" else load_text(tmp_path, "algorithm: {}\n")
    assert config.algorithm.rollout_correction is None
    assert describe_correction(config.algorithm) == []


# Numbers that YAML makes of pairs


def yaml_trap(text: str, number: float, place: str) -> str:
    return (
        f"is {text} without quotes in {place}, which YAML reads as the number {number}: quote it where it is a pair of "
        f"bounds, as in '{text}', or write {number} where it is that number"
    )


def hydra_trap(text: str, number: float, quoted: str) -> str:
    return (
        f"is {text} without quotes, which Hydra reads as the number {number}: quote it where it is a pair of bounds, "
        f"as in {quoted}, or write {number} where it is that number"
    )


@pytest.mark.parametrize(("text", "number"), [("0.5_5", 0.55), ("5_10", 510), ("1_5", 15), (".5_5", 0.55)])
def test_a_pair_without_quotes_is_refused_where_it_is_written(tmp_path: Path, text: str, number: float) -> None:
    """0.5_5 was a cap of 0.55, and 1_5 one of 15, which nothing else can tell from one that is meant."""
    yaml_text = nested("rollout_is: token", f"rollout_is_threshold: {text}")
    assert problems_of_text(tmp_path, yaml_text) == [
        f"{SECTION}.rollout_is_threshold: {yaml_trap(text, number, 'run.yaml, line 5')}"
    ]


@pytest.mark.parametrize("text", ["0.5_2.0", "'0.5_5'", '"1_5"', "0.999_1.001"])
def test_a_pair_that_is_text_is_a_pair(tmp_path: Path, text: str) -> None:
    config = load_text(tmp_path, nested("rollout_is: token", f"rollout_is_threshold: {text}"))
    lower, upper = text.strip("'\"").split("_")
    assert spec_of(config).weight_bounds == (float(lower), float(upper))


def test_a_pair_is_found_in_every_file_of_the_defaults_list(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(nested("rollout_is: token", "rollout_is_threshold: 1_5"), encoding="utf-8")
    (tmp_path / "rejection").mkdir()
    (tmp_path / "rejection" / "token.yaml").write_text(
        "# any comment\nrollout_rs: token\nrollout_rs_threshold: 5_10\n", encoding="utf-8"
    )
    defaults = f"defaults: [base, {{rejection@{SECTION}: token}}, _self_]\n"
    (tmp_path / "run.yaml").write_text(f"{defaults}exp_name: x\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config("run", config_path=tmp_path)
    assert str(caught.value) == (
        f"configuration 'run' ({tmp_path}/run.yaml) has 2 problems:\n"
        f"  - {SECTION}.rollout_is_threshold: {yaml_trap('1_5', 15, 'base.yaml, line 4')}\n"
        f"  - {SECTION}.rollout_rs_threshold: {yaml_trap('5_10', 510, 'token.yaml, line 3')}"
    )


@pytest.mark.parametrize("fix", ["rollout_is_threshold='1_5'", "rollout_is_threshold=3.0"])
def test_a_pair_that_something_later_replaces_is_none(tmp_path: Path, fix: str) -> None:
    text = nested("rollout_is: token", "rollout_is_threshold: 1_5")
    config = load_text(tmp_path, text, f"{SECTION}.{fix}")
    assert spec_of(config).weight_bounds == ((1.0, 5.0) if "_5" in fix else (1 / 3, 3.0))


@pytest.mark.parametrize(
    ("lines", "key", "text", "number"),
    [
        (("rollout_token_veto_threshold: 1_5",), "rollout_token_veto_threshold", "1_5", 15),
        (("rules: [{level: token, action: reject_token, upper: 5_10}]",), "rules.0.upper", "5_10", 510),
        (("max_rejected_fraction: 0.5_1",), "max_rejected_fraction", "0.5_1", 0.51),
        (("rollout_is: token", "rollout_is_threshold_lower: .5_1"), "rollout_is_threshold_lower", ".5_1", 0.51),
    ],
)
def test_a_key_that_takes_one_number_is_not_told_to_take_a_pair(
    tmp_path: Path, lines: tuple[str, ...], key: str, text: str, number: float
) -> None:
    """With the quotes that were advised these keys are refused, as they take no pair."""
    place = f"in run.yaml, line {3 + len(lines)}"
    assert problems_of_text(tmp_path, nested(*lines)) == [
        f"{SECTION}.{key}: is {text} without quotes {place}, which YAML reads as the number {number}; the key takes "
        f"one number: write {number} where it is that one"
    ]
    given = f"{SECTION}.max_rejected_fraction=0.5_1"
    assert problems_of_text(tmp_path, "", given) == [
        f"{SECTION}.max_rejected_fraction: is 0.5_1 without quotes, which Hydra reads as the number 0.51; the key "
        f"takes one number: write 0.51 where it is that one (given as {given!r})"
    ]


@pytest.mark.parametrize("value", ["[token_k1,seq_max_k2]", '"token_k1,seq_max_k2"'])
def test_options_of_rejection_are_given_as_is_advised(tmp_path: Path, value: str) -> None:
    """A list, which the message for a sweep advises, was refused."""
    text = nested("rollout_rs_threshold: '2,3'")
    config = load_text(tmp_path, text, f"{SECTION}.rollout_rs={value}")
    assert [rule.label for rule in spec_of(config).rules] == ["token_k1", "seq_max_k2"]


def test_a_pair_within_rules_and_behind_an_anchor_is_found(tmp_path: Path) -> None:
    text = nested(
        "rollout_is: token",
        "rules:",
        "- &one {level: token, action: reject_token, upper: 1_5}",
        "- {<<: *one, action: reject_sequence}",
    )
    found = problems_of_text(tmp_path, text)
    assert [problem.split(":")[0] for problem in found] == [f"{SECTION}.rules.0.upper", f"{SECTION}.rules.1.upper"]


def test_underscores_of_other_keys_are_those_of_numbers(tmp_path: Path) -> None:
    text = "max_steps: 1_000\nactor_rollout_ref: {actor: {ppo_max_token_len_per_gpu: 16_384}}\n"
    config = load_text(tmp_path, text + nested("rollout_is: token", "rollout_is_threshold: 3.5"))
    assert config.max_steps == 1000


def test_a_pair_without_quotes_on_the_command_line_is_refused(tmp_path: Path) -> None:
    key = f"{SECTION}.rollout_is_threshold"
    found = problems_of_text(tmp_path, nested("rollout_is: token"), f"{key}=0.5_5")
    quoted = f"'{key}=\"0.5_5\"'"
    assert found == [f"{key}: {hydra_trap('0.5_5', 0.55, quoted)} (given as '{key}=0.5_5')"]
    assert spec_of(load_text(tmp_path, nested("rollout_is: token"), f'{key}="0.5_5"')).weight_bounds == (0.5, 5.0)


def test_a_pair_within_an_override_of_a_section_is_refused(tmp_path: Path) -> None:
    given = (
        f"{SECTION}={{rollout_is: token, rollout_is_threshold: 1_5, rollout_rs: token, rollout_rs_threshold: '1_5'}}"
    )
    quoted = given.replace(": 1_5", ': "1_5"')
    found = problems_of_text(tmp_path, "", given)
    shell = "'" + quoted.replace("'", "'\"'\"'") + "'"
    assert found == [f"{SECTION}.rollout_is_threshold: {hydra_trap('1_5', 15, shell)} (given as {given!r})"]


SWEEP = "values with a comma are a sweep over several runs for Hydra, and this is one"


@pytest.mark.parametrize(
    ("override", "text"),
    [
        (
            f"{SECTION}.rollout_rs_threshold=0.6_1.6,2.5",
            f"{SWEEP}; quote them, as in '{SECTION}.rollout_rs_threshold=\"0.6_1.6,2.5\"'",
        ),
        (
            f"++{SECTION}.rollout_rs=token_k1,seq_max_k2",
            f"{SWEEP}; quote them, as in '++{SECTION}.rollout_rs=\"token_k1,seq_max_k2\"', or write "
            f"'++{SECTION}.rollout_rs=[token_k1,seq_max_k2]'",
        ),
        (
            "trace.kinds=score,loss",
            f"{SWEEP}; quote them, as in 'trace.kinds=\"score,loss\"', or where the key takes a list write "
            "'trace.kinds=[score,loss]'",
        ),
        (
            "a.key.of.another=1,2",
            f"{SWEEP}; quote them, as in 'a.key.of.another=\"1,2\"', or where the key takes a list write "
            "'a.key.of.another=[1,2]'",
        ),
        ("seed=1,2", "is a sweep over several runs for Hydra, and this is one; give one value"),
        (f"{SECTION}.loss_type=ratio,x", "is a sweep over several runs for Hydra, and this is one; give one value"),
        ("seed=choice(1,2)", "is a sweep over several runs for Hydra, and this is one; give one value"),
        ("exp_name='a','b'", "is a sweep over several runs for Hydra, and this is one; give one value"),
    ],
)
def test_a_sweep_is_refused_with_what_to_write(tmp_path: Path, override: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, "", override)
    assert str(caught.value) == (
        f"overrides that cannot be read:\n  - {override!r}: {text}\n"
        "Write them as a.b=c; quote values that hold special characters, as in 'a.b=\"^x\"'."
    )
