"""verl's presets have verl's values, and thresholds are read as the golden file says YAML has them."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from mock_scheduler.correction.config.presets import PRESETS
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from tests.correction.golden_cases import GOLDEN

DEFAULTS = "__dataclass_defaults__"
NEWEST: dict[str, dict[str, Any]] = GOLDEN["config"]["presets_0.9.1"]
OLDER: dict[str, dict[str, Any]] = GOLDEN["config"]["presets_0.6.1"]


def _older_name(name: str) -> str:
    """Names that mean something else since, or the same, have the release in them."""
    return name if name in PRESETS and name not in NEWEST else f"verl_0.6.1_{name}"


def _has(section: RolloutCorrectionConfig, key: str, value: object) -> bool:
    found = getattr(section, key)
    # Absent it is false: the loss of loss_type.
    return bool(found) == value if key == "use_policy_gradient" else found == value


@pytest.mark.parametrize("name", [name for name in NEWEST if name != DEFAULTS])
def test_golden_preset_of_0_9_1(name: str) -> None:
    section = RolloutCorrectionConfig(preset=name)
    wrong = {key: value for key, value in NEWEST[name].items() if not _has(section, key, value)}
    assert not wrong
    given = RolloutCorrectionConfig.model_validate(NEWEST[name]).spec
    assert section.spec == given


@pytest.mark.parametrize("name", [name for name in OLDER if name not in (DEFAULTS, "disabled")])
def test_golden_preset_of_0_6_1(name: str) -> None:
    section = RolloutCorrectionConfig(preset=_older_name(name))
    wrong = {key: value for key, value in OLDER[name].items() if not _has(section, key, value)}
    assert not wrong
    assert section.spec == RolloutCorrectionConfig.model_validate(OLDER[name]).spec


def test_golden_preset_disabled_is_the_same_in_both_releases() -> None:
    section = RolloutCorrectionConfig(preset="disabled")
    assert all(_has(section, key, value) for key, value in OLDER["disabled"].items())
    assert section.spec == RolloutCorrectionConfig().spec


def test_golden_presets_differ_from_the_default_of_verl_in_rollout_is_alone() -> None:
    """verl's dataclass takes sequence weights where its YAML takes none: here nothing is on unless it is asked for."""
    for defaults in (NEWEST[DEFAULTS], OLDER[DEFAULTS]):
        section = RolloutCorrectionConfig()
        assert [key for key, value in defaults.items() if not _has(section, key, value)] == ["rollout_is"]


#: Text of the golden file -> the keys that it is a threshold of, and what becomes of it: bounds, or part of the error.
YAML: dict[str, tuple[dict[str, Any], object]] = {
    "0.5_2.0": ({"rollout_is": "token", "rollout_is_threshold": None}, (0.5, 2.0)),
    "0.5_5": ({"rollout_is": "token", "rollout_is_threshold": None}, "is 0.55, below 1"),
    "5_10": ({"rollout_is": "token", "rollout_is_threshold": None}, "YAML reads an unquoted 5_10 as that number"),
    "1e-4": ({"rollout_token_veto_threshold": None}, (1e-4, None)),
    "0.6_1.6,2.5": ({"rollout_rs": "token_k1,seq_max_k2", "rollout_rs_threshold": None}, (0.6, 1.6)),
    "0.999_1.001": ({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": None}, (0.999, 1.001)),
}


@pytest.mark.parametrize("text", [entry["yaml"] for entry in GOLDEN["yaml_parsing"]])
def test_golden_yaml_threshold(text: str) -> None:
    """A threshold without quotes, as PyYAML reads it, becomes the bounds that were meant, or is refused."""
    entry = next(entry for entry in GOLDEN["yaml_parsing"] if entry["yaml"] == text)
    value = yaml.safe_load(text)
    assert value == (text if text == "1e-4" else entry["pyyaml"])
    keys, expected = YAML[text]
    values = {key: value if given is None else given for key, given in keys.items()}
    if isinstance(expected, str):
        with pytest.raises(ValidationError) as raised:
            RolloutCorrectionConfig.model_validate(values)
        assert expected in str(raised.value)
        return
    rule = RolloutCorrectionConfig.model_validate(values).spec.rules[0]
    assert (rule.lower, rule.upper) == expected


def test_golden_yaml_thresholds_are_all_here() -> None:
    assert {entry["yaml"] for entry in GOLDEN["yaml_parsing"]} == YAML.keys()


#: Preset of another system -> the level of its weights, and of each rule the action, level, estimator and bounds, as in
#: section 7 of the reference that the presets were made from.
OTHERS: dict[str, tuple[str | None, list[tuple[str, str, str, float | None, float | None]]]] = {
    "trl_token_truncate": ("token", [("truncate", "token", "ratio", None, 3.0)]),
    "trl_token_mask": ("token", [("zero_weight", "token", "ratio", None, 3.0)]),
    "trl_sequence_truncate": ("sequence", [("truncate", "sequence", "ratio", None, 3.0)]),
    "trl_sequence_mask": ("sequence", [("zero_weight", "sequence", "ratio", None, 3.0)]),
    "trl_opsm": (None, [("reject_sequence", "sequence", "k1", None, 1e-4)]),
    "slime_tis": ("token", [("truncate", "token", "ratio", None, 2.0)]),
    "slime_mis": (
        "token",
        [
            ("truncate", "token", "ratio", None, 2.0),
            ("reject_token", "token", "ratio", 0.5, 2.0),
            ("reject_sequence", "token", "ratio", 1e-4, None),
        ],
    ),
    "icepop": ("token", [("zero_weight", "token", "ratio", 0.5, 5.0)]),
    "icepop_prime": ("token", [("zero_weight", "token", "ratio", 0.2, 5.0)]),
    "nemo_tis": ("token", [("truncate", "token", "ratio", None, 2.0)]),
    "nemo_icepop": ("token", [("zero_weight", "token", "ratio", 0.5, 5.0)]),
    "nemo_seq_mask_tis": ("token", [("zero_weight", "geometric", "ratio", 0.999, 1.002)]),
    "areal_token_mask": (
        "token",
        [("zero_weight", "token", "ratio", None, 5.0), ("reject_token", "token", "ratio", None, 5.0)],
    ),
    "areal_sequence_mask": (
        "geometric",
        [("zero_weight", "geometric", "ratio", None, 5.0), ("reject_sequence", "geometric", "ratio", None, 5.0)],
    ),
    "areal_sequence_clamp": ("geometric", [("truncate", "geometric", "ratio", None, 5.0)]),
    "aipo": ("token", [("truncate", "token", "ratio", None, 2.0)]),
    "cispo": ("token", [("clip", "token", "ratio", 0.8, 1.2)]),
    "prime_legacy": (
        "token",
        [
            ("reject_token", "token", "ratio", 0.125, 8.0),
            ("reject_sequence", "geometric", "ratio", 0.1, 10.0),
            ("reject_sequence", "token", "ratio", None, 100.0),
        ],
    ),
    "prime_dppo": (
        None,
        [("reject_token", "token", "prob_diff", None, 0.2), ("reject_token", "token", "prob_diff", -0.2, None)],
    ),
    "prime_ipo": (None, [("reject_token", "token", "prob_diff", -0.1, 0.1)]),
    "roll_token": (
        "token",
        [("truncate", "token", "ratio", None, 1.2), ("reject_token", "token", "ratio", 0.8, 1.2)],
    ),
    "roll_segment": (
        "segment",
        [("truncate", "segment", "ratio", None, 1.2), ("reject_token", "segment", "ratio", 0.8, 1.2)],
    ),
    "roll_prob_diff": (
        "token",
        [("truncate", "token", "ratio", None, 1.2), ("reject_token", "token", "prob_diff", -0.2, 0.2)],
    ),
    "megatron_lm": ("token", [("truncate", "token", "ratio", None, 2.0)]),
    "xtuner": ("token", [("truncate", "token", "ratio", None, 2.0), ("reject_token", "token", "ratio", 0.2, 5.0)]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_preset_of_another_system_has_the_bounds_of_its_source(name: str) -> None:
    spec = RolloutCorrectionConfig(preset=name).spec
    rules = [(rule.action, rule.level, rule.estimator, rule.lower, rule.upper) for rule in spec.rules]
    assert (spec.weight, rules) == OTHERS[name]
    # What is NaN in AReaL has the log ratio 0.
    assert spec.nan_policy == ("ratio_one" if name.startswith("areal") else "reject")
    assert spec.batch_normalize == (name == "slime_mis")


def test_every_preset_of_another_system_is_here() -> None:
    known = {*NEWEST, *(_older_name(name) for name in OLDER if name != DEFAULTS), DEFAULTS, "verl_0.6.1_disabled"}
    assert PRESETS.keys() - known == OTHERS.keys()
