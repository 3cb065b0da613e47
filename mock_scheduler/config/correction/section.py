"""``algorithm.rollout_correction``: the keys, what they mean together, and the rules that they become.

Contract: everything that can be known to be wrong is refused when the section is made. ``section.spec`` is what is
computed; ``section.notes`` say, once, what older keys became.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from mock_scheduler.config.base import ConfigSection, Fraction, NonNegativeFloat
from mock_scheduler.config.correction.presets import preset_values
from mock_scheduler.config.correction.rules import (
    CorrectionSpec,
    Denominator,
    Level,
    LoneSurvivor,
    LossType,
    NanPolicy,
    Rule,
    VerlRelease,
)
from mock_scheduler.config.correction.thresholds import read_scalar
from mock_scheduler.config.correction.verl_keys import rejection_rules, veto_rule, weight_rules


def _read_bound(value: object) -> object:
    """A bound that has one number: not a bool, not NaN and above 0."""
    number = read_scalar(value)
    if number is None:
        return None
    try:
        parsed = float(number)  # type: ignore[arg-type]
    except ValueError:
        raise ValueError(f"is {value!r}; expected a number above 0") from None
    if not math.isfinite(parsed) or parsed <= 0.0:
        raise ValueError(f"is {value!r}; expected a finite number above 0")
    return parsed


def _read_nan_policy(value: object) -> object:
    return "reject" if value == "mask" else value


ThresholdValue = Annotated[float | str | None, BeforeValidator(read_scalar)]
BoundValue = Annotated[float | None, BeforeValidator(_read_bound)]


class RolloutCorrectionConfig(ConfigSection):
    """Importance weights and rejection for rollouts that another policy sampled; the keys are verl's and our own.

    ``preset``: named values, over which the other keys given count. ``verl_compat``: reproduce this release of verl,
    with its bugs. ``rollout_is``, ``rollout_rs`` and their thresholds: verl's, of every release. ``rules``: further
    rules. ``bypass_mode`` and ``loss_type``: two policies in the place of three. The others: see ``CorrectionSpec``.
    """

    preset: str | None = None
    verl_compat: VerlRelease | None = None

    rollout_is: Level | None = None
    rollout_is_threshold: ThresholdValue = 2.0
    rollout_is_threshold_lower: BoundValue = None
    rollout_is_mode: Literal["truncate", "mask"] | None = None
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: ThresholdValue = None
    rollout_rs_threshold_lower: BoundValue = None
    rollout_token_veto_threshold: BoundValue = None
    bypass_mode: bool = False
    loss_type: LossType = "ppo_clip"
    use_policy_gradient: bool | None = None

    rules: list[Rule] = Field(default=[])
    rollout_kl_coef: NonNegativeFloat = 0.0
    rollout_kl_in_advantage: NonNegativeFloat = 0.0
    nan_policy: Annotated[NanPolicy, BeforeValidator(_read_nan_policy)] = "reject"
    rs_denominator: Denominator = "original"
    exclude_rejected_from_baseline: bool = True
    lone_survivor: LoneSurvivor = "reward"
    max_rejected_fraction: Fraction | None = None

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: object) -> object:
        if not isinstance(values, Mapping) or values.get("preset") is None:
            return values
        return {**preset_values(str(values["preset"])), **values}

    @model_validator(mode="after")
    def _check(self) -> RolloutCorrectionConfig:
        problems = list(_mode_problems(self))
        if problems:
            raise ValueError("; ".join(problems))
        _ = self.spec
        return self

    @cached_property
    def spec(self) -> CorrectionSpec:
        """The rules that these keys are."""
        rules: list[Rule] = []
        bounds: tuple[float | None, float | None] = (None, None)
        if self.rollout_is is not None:
            weights = weight_rules(
                self.rollout_is,
                self.rollout_is_threshold,
                lower=self.rollout_is_threshold_lower,
                mode=self.rollout_is_mode,
            )
            rules += weights.rules
            bounds = weights.bounds
        if self.rollout_rs is not None:
            rules += rejection_rules(
                self.rollout_rs,
                self.rollout_rs_threshold,
                lower=self.rollout_rs_threshold_lower,
                release=self.verl_compat,
            )
        if self.rollout_token_veto_threshold is not None:
            rules.append(veto_rule(self.rollout_token_veto_threshold))
        rules += self.rules
        _check_weight_rules(self.rollout_is, rules)
        if bounds == (None, None):
            own = [rule for rule in rules if rule.limits_weights_of(self.rollout_is)]
            bounds = (own[0].lower, own[0].upper) if own else bounds
        return CorrectionSpec(
            weight=self.rollout_is,
            rules=tuple(rules),
            weight_bounds=bounds,
            batch_normalize=self.rollout_is_batch_normalize,
            bypass=self.bypass_mode,
            loss_type="reinforce" if self.use_policy_gradient else self.loss_type,
            rollout_kl_coef=self.rollout_kl_coef,
            rollout_kl_in_advantage=self.rollout_kl_in_advantage,
            nan_policy=self.nan_policy,
            rs_denominator=self.rs_denominator,
            exclude_rejected_from_baseline=self.exclude_rejected_from_baseline,
            lone_survivor=self.lone_survivor,
            max_rejected_fraction=self.max_rejected_fraction,
            release=self.verl_compat,
            release_arguments=_release_arguments(self),
        )

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What older keys became, and what has no effect here that it has elsewhere."""
        notes = []
        older = [option for option in ("token", "sequence", "geometric") if option in _options(self.rollout_rs)]
        if older and self.verl_compat is None:
            newer = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
            notes.append(
                "rollout_rs "
                + ", ".join(f"{option} is {newer[option]} of newer releases" for option in older)
                + " (the log ratio is clamped after the sum here)"
            )
        if self.rollout_token_veto_threshold is not None:
            notes.append("rollout_token_veto_threshold became a rule that rejects the sequence of such a token")
        if self.rollout_is_threshold_lower is not None and self.rollout_is is not None:
            effect = (
                "counts in metrics alone, as weights are truncated from above"
                if self.rollout_is_mode == "truncate"
                else "makes weights outside the two bounds 0 (IcePop)"
            )
            notes.append(f"rollout_is_threshold_lower {effect}")
        if self.use_policy_gradient is not None:
            notes.append(
                f"use_policy_gradient {str(self.use_policy_gradient).lower()} is loss_type {self.spec.loss_type}"
            )
        if self.bypass_mode and self.spec.loss_type != "reinforce" and self.rollout_is is not None:
            notes.append(
                f"in bypass with loss_type {self.spec.loss_type} the loss has the ratio to the rollout policy already: "
                "weights are for metrics alone"
            )
        if self.bypass_mode and self.spec.rejects:
            notes.append(
                "in bypass tokens are rejected update by update, after advantages: no baseline leaves them out"
            )
        return tuple(notes)


def _options(text: str | None) -> list[str]:
    return [] if text is None else [option.strip() for option in text.split(",")]


def _mode_problems(section: RolloutCorrectionConfig) -> list[str]:
    problems = []
    if section.use_policy_gradient and section.loss_type == "ratio":
        problems.append("use_policy_gradient true is loss_type reinforce, and loss_type is ratio; give one of them")
    loss_type = "reinforce" if section.use_policy_gradient else section.loss_type
    if loss_type != "ppo_clip" and not section.bypass_mode:
        problems.append(f"loss_type {loss_type} is a loss of two policies; set bypass_mode true")
    if section.rollout_kl_in_advantage > 0 and loss_type != "reinforce":
        problems.append(
            "rollout_kl_in_advantage belongs to loss_type reinforce, whose advantage has no ratio of its own"
        )
    if section.rollout_is is None and section.rollout_is_batch_normalize:
        problems.append("rollout_is_batch_normalize has no effect without rollout_is")
    if section.rollout_is is None and (section.rollout_is_mode or section.rollout_is_threshold_lower is not None):
        problems.append("rollout_is_mode and rollout_is_threshold_lower have no effect without rollout_is")
    if section.rollout_rs is None and section.rollout_rs_threshold_lower is not None:
        problems.append("rollout_rs_threshold_lower has no effect without rollout_rs")
    if section.verl_compat is not None:
        problems += _compat_problems(section)
    return problems


def _compat_problems(section: RolloutCorrectionConfig) -> list[str]:
    release = section.verl_compat
    problems = []
    if section.rules:
        problems.append(f"verl_compat {release} reproduces that release, which has no `rules`")
    levels = ("token", "sequence", "geometric") if release == "0.6.0" else ("token", "sequence")
    if section.rollout_is not in (None, *levels):
        problems.append(f"verl_compat {release} knows rollout_is {', '.join(levels)}; it is {section.rollout_is}")
    has_veto = release in ("0.6.0", "e7cdce1c", "0.6.1")
    if section.rollout_token_veto_threshold is not None and not has_veto:
        problems.append(f"verl {release} has no rollout_token_veto_threshold; nearest: rollout_rs seq_max_k2")
    if release == "0.6.0" and section.rollout_rs is not None:
        problems.append("verl 0.6.0 has no rollout_rs; use rollout_is_mode mask")
    if release != "0.6.0" and section.rollout_is_mode is not None:
        problems.append(f"verl {release} has no rollout_is_mode; give rollout_is_threshold 'lo_hi' for mask")
    return problems


def _check_weight_rules(level: Level | None, rules: list[Rule]) -> None:
    """Raise ``ValueError`` for rules on weights where there are none, or of another level than theirs."""
    for rule in rules:
        if rule.action in ("truncate", "clip") and rule.level != level:
            raise ValueError(
                f"rule {rule.label} cuts weights at level {rule.level}; rollout_is, the level of weights, is {level}"
            )
        if rule.action == "zero_weight" and level is None:
            raise ValueError(f"rule {rule.label} makes weights 0, and there are none: set rollout_is")


def _release_arguments(section: RolloutCorrectionConfig) -> dict[str, object]:
    """The arguments of that release's own function; empty without one."""
    release = section.verl_compat
    if release is None:
        return {}
    if release == "0.6.0":
        veto = section.rollout_token_veto_threshold
        return {
            "rollout_is_level": section.rollout_is or "token",
            "rollout_is_mode": section.rollout_is_mode or "truncate",
            "rollout_is_threshold": section.rollout_is_threshold if section.rollout_is else None,
            "rollout_is_threshold_lower": section.rollout_is_threshold_lower,
            # Absent it is that release's default, 1e-4.
            **({} if veto is None else {"rollout_is_veto_threshold": veto}),
        }
    arguments: dict[str, object] = {
        "rollout_is": section.rollout_is,
        "rollout_is_threshold": section.rollout_is_threshold,
        "rollout_rs": section.rollout_rs,
        "rollout_rs_threshold": section.rollout_rs_threshold,
    }
    if release in ("e7cdce1c", "0.6.1"):
        arguments["rollout_rs_threshold_lower"] = section.rollout_rs_threshold_lower
        arguments["rollout_token_veto_threshold"] = section.rollout_token_veto_threshold
    if release != "e7cdce1c":
        arguments["rollout_is_batch_normalize"] = section.rollout_is_batch_normalize
    return arguments
