"""What keys of ``rollout_correction`` cannot mean together, or would have no effect; imports no torch.

Contract: pure functions from the section to every problem, each with its key; none raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mock_scheduler.config.problems import Problem
from mock_scheduler.correction.config.presets import PRESETS
from mock_scheduler.correction.config.rules import Level, VerlRelease
from mock_scheduler.correction.config.thresholds import UNLIMITED

if TYPE_CHECKING:
    from mock_scheduler.correction.config.section import RolloutCorrectionConfig

_DEFAULT_THRESHOLD = 2.0
_NEWEST_KEYS = (
    *("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold"),
    *("bypass_mode", "loss_type"),
)
_SEED_KEYS = (
    *("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold", "rollout_rs_threshold_lower"),
    "rollout_token_veto_threshold",
)
_RELEASE_KEYS: Mapping[VerlRelease, tuple[str, ...]] = {
    "0.6.0": (
        *("rollout_is", "rollout_is_threshold", "rollout_is_threshold_lower", "rollout_is_mode"),
        "rollout_token_veto_threshold",
    ),
    "e7cdce1c": _SEED_KEYS,
    # loss_type is of 0.7.0, which has the helper of 0.6.1.
    "0.6.1": (*_SEED_KEYS, "rollout_is_batch_normalize", "bypass_mode", "use_policy_gradient", "loss_type"),
    "0.7.1": _NEWEST_KEYS,
    "0.9.1": _NEWEST_KEYS,
}
#: Keys that act outside of what a release computes, and so stand beside ``verl_compat``.
_BESIDE_RELEASES = (
    *("preset", "verl_compat", "rs_denominator", "exclude_rejected_from_baseline", "lone_survivor"),
    "max_rejected_fraction",
)
_IN_PLACE: Mapping[str, str] = {
    "rollout_token_veto_threshold": "nearest: rollout_rs seq_max_k2, which is two-sided",
    "rollout_is_mode": "it only truncates, and 0.9.1 has rollout_is_threshold 'lo_hi'",
    "rollout_is_threshold_lower": "only 0.6.0 has one; in 0.9.1 rollout_is_threshold 'lo_hi'",
    "rollout_rs_threshold_lower": "give rollout_rs_threshold 'lo_hi'",
    "rollout_rs": "use rollout_is_mode mask",
    "rollout_rs_threshold": "use rollout_is_mode mask",
    "use_policy_gradient": "since 0.7.0 it is loss_type reinforce",
}


def section_problems(section: RolloutCorrectionConfig) -> list[Problem]:
    """Every problem of the keys together; thresholds by themselves are checked where rules are made of them."""
    problems = _loss_problems(section) + _idle_key_problems(section) + _rejection_problems(section)
    return problems if section.verl_compat is None else problems + _release_problems(section, section.verl_compat)


def _loss_problems(section: RolloutCorrectionConfig) -> list[Problem]:
    problems: list[Problem] = []
    meant = {True: "reinforce", False: "ppo_clip", None: section.loss_type}[section.use_policy_gradient]
    if section.loss_type != meant:
        given = str(section.use_policy_gradient).lower()
        text = f"{given} is loss_type {meant}, and loss_type is {section.loss_type}; give one of them"
        problems.append(("use_policy_gradient", text))
    elif section.loss_type != "ppo_clip" and not section.bypass_mode:
        key, given = (
            ("use_policy_gradient", "true") if section.use_policy_gradient else ("loss_type", section.loss_type)
        )
        problems.append((key, f"{given} is a loss of two policies; set bypass_mode true"))
    if section.rollout_kl_in_advantage > 0 and section.loss_type != "reinforce":
        text = (
            f"is {section.rollout_kl_in_advantage:g}, and belongs to loss_type reinforce, whose advantage has no ratio "
            f"beside it; loss_type is {section.loss_type}"
        )
        problems.append(("rollout_kl_in_advantage", text))
    return problems


def _idle_key_problems(section: RolloutCorrectionConfig) -> list[Problem]:
    idle: dict[str, str] = {}
    if section.rollout_is is None:
        given = {
            "rollout_is_threshold": section.rollout_is_threshold not in (None, _DEFAULT_THRESHOLD),
            "rollout_is_threshold_lower": section.rollout_is_threshold_lower is not None,
            "rollout_is_mode": section.rollout_is_mode is not None,
            "rollout_is_batch_normalize": section.rollout_is_batch_normalize,
        }
        idle |= {key: "rollout_is" for key, is_given in given.items() if is_given}
    if section.rollout_rs is None:
        given = {
            "rollout_rs_threshold": section.rollout_rs_threshold is not None,
            "rollout_rs_threshold_lower": section.rollout_rs_threshold_lower is not None,
        }
        idle |= {key: "rollout_rs" for key, is_given in given.items() if is_given}
    return [
        (key, f"is {_value(section, key)} and has no effect without {switch}; set {switch}, or leave it out")
        for key, switch in idle.items()
    ]


def _rejection_problems(section: RolloutCorrectionConfig) -> list[Problem]:
    """Keys about what is rejected, where nothing is, or where nothing of theirs is left to decide."""
    problems: list[Problem] = []
    about = {
        "rs_denominator": section.rs_denominator != "original",
        "exclude_rejected_from_baseline": not section.exclude_rejected_from_baseline,
        "lone_survivor": section.lone_survivor != "reward",
        "max_rejected_fraction": section.max_rejected_fraction is not None,
    }
    given = [key for key, is_given in about.items() if is_given]
    can_reject = (
        section.rollout_rs is not None
        or section.rollout_token_veto_threshold is not None
        or any(rule.rejects for rule in section.rules)
        or section.nan_policy == "reject"
    )
    if not can_reject:
        return [
            (key, f"is {_value(section, key)}, and nothing here rejects; set rollout_rs or a rule that rejects")
            for key in given
        ]
    if section.bypass_mode:
        problems += [
            (
                key,
                f"is {_value(section, key)} and has no effect with bypass_mode: tokens are rejected update by update, "
                "after advantages",
            )
            for key in given
            if key in ("exclude_rejected_from_baseline", "lone_survivor")
        ]
    elif section.lone_survivor == "zero" and not section.exclude_rejected_from_baseline:
        text = "is zero and has no effect with exclude_rejected_from_baseline false, which leaves nobody alone"
        problems.append(("lone_survivor", text))
    if section.max_rejected_fraction == 1.0:
        problems.append(("max_rejected_fraction", "is 1, and no more than all can be rejected; leave it out"))
    return problems


def _release_problems(section: RolloutCorrectionConfig, release: VerlRelease) -> list[Problem]:
    problems = [
        (key, _describe_absent(section, key, release))
        for key, field in type(section).model_fields.items()
        if key not in (*_RELEASE_KEYS[release], *_BESIDE_RELEASES)
        and not (key == "loss_type" and section.use_policy_gradient)  # which is named instead
        and _value_of(section, key) != field.get_default(call_default_factory=True)
    ]
    levels: tuple[Level, ...] = ("token", "sequence", "geometric") if release == "0.6.0" else ("token", "sequence")
    if section.rollout_is not in (None, *levels):
        problems.append(("rollout_is", f"is {section.rollout_is}; verl_compat {release} has {', '.join(levels)}"))
    if section.loss_type == "ratio" and "loss_type" in _RELEASE_KEYS[release]:
        problems.append(("loss_type", f"is ratio; verl_compat {release} has ppo_clip, reinforce"))
    threshold = section.rollout_is_threshold
    if release != "0.9.1" and isinstance(threshold, str) and threshold != UNLIMITED and section.rollout_is is not None:
        problems.append(("rollout_is_threshold", f"is {threshold!r}; verl_compat {release} takes one number"))
    if release in ("e7cdce1c", "0.6.1"):
        if isinstance(section.rollout_rs_threshold, str):
            text = f"is {section.rollout_rs_threshold!r}; verl_compat {release} takes one number, and a lower one"
            problems.append(("rollout_rs_threshold", f"{text} as rollout_rs_threshold_lower"))
        if section.rollout_rs is not None and "," in section.rollout_rs:
            problems.append(("rollout_rs", f"is {section.rollout_rs!r}; verl_compat {release} takes one option"))
    return problems


def _describe_absent(section: RolloutCorrectionConfig, key: str, release: VerlRelease) -> str:
    hint = f"; {_IN_PLACE[key]}" if key in _IN_PLACE else "; leave it out"
    is_of_preset = section.preset is not None and key in PRESETS[section.preset].values
    origin = f" by preset {section.preset}" if is_of_preset else ""
    shown = "is given" if key == "rules" else f"is {_value(section, key)}"
    return f"{shown}{origin}, and verl_compat {release} reproduces a release that has no such key{hint}"


def _value_of(section: RolloutCorrectionConfig, key: str) -> object:
    return dict(section)[key]


def _value(section: RolloutCorrectionConfig, key: str) -> str:
    value = _value_of(section, key)
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else repr(value)
