"""Has ``algorithm.rollout_correction``: keys checked together, and their rules.

Contract: a section is refused when it is made, not when it is used, with each problem at its key. ``section.spec`` is
the computation; ``section.notes`` are sentences for the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError, model_validator

from mock_scheduler.config.problems import KeyedError, Problem, collecting, raise_keyed
from mock_scheduler.correction.config.checks import name_problems, section_notes, section_problems
from mock_scheduler.correction.config.keys import CorrectionKeys
from mock_scheduler.correction.config.presets import preset_values
from mock_scheduler.correction.config.rules import CorrectionSpec, Level, Rule
from mock_scheduler.correction.config.verl_keys import rejection_rules, veto_rule, weight_rules
from mock_scheduler.correction.verl.releases import release_arguments

Bounds = tuple[float | None, float | None]

#: Switch -> keys that only have a meaning beside it: a preset's are gone where the switch is set to null.
_DEPENDENTS: Mapping[str, tuple[str, ...]] = {
    "rollout_is": (
        *("rollout_is_threshold", "rollout_is_threshold_lower", "rollout_is_mode", "rollout_is_batch_normalize"),
    ),
    "rollout_rs": ("rollout_rs_threshold", "rollout_rs_threshold_lower"),
}
#: Key -> the key of a preset that it replaces, as both say what the loss is.
_LOSS_KEYS: Mapping[str, str] = {"loss_type": "use_policy_gradient", "use_policy_gradient": "loss_type"}
_BOOL = TypeAdapter(bool)


class RolloutCorrectionConfig(CorrectionKeys):
    """Holds keys of importance weights and rejection; they agree with one another."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        if values.get("preset") is not None:
            try:
                values = _with_preset(values)
            except ValueError as error:
                raise_keyed(cls.__name__, [("preset", str(error))], values)
        if "loss_type" not in values and _is_true(values.get("use_policy_gradient")):
            return {**values, "loss_type": "reinforce"}
        return values

    @model_validator(mode="after")
    def _check(self) -> RolloutCorrectionConfig:
        problems = section_problems(self) + _compile(self).problems
        if problems:
            raise_keyed(type(self).__name__, problems, dict(self))
        return self

    @property
    def spec(self) -> CorrectionSpec:
        """Returns the keys as rules."""
        compiled = _compile(self)
        return CorrectionSpec(
            weight=self.rollout_is,
            rules=tuple(compiled.rules),
            weight_bounds=compiled.bounds,
            batch_normalize=self.rollout_is_batch_normalize,
            bypass=self.bypass_mode,
            loss_type=self.loss_type,
            rollout_kl_coef=self.rollout_kl_coef,
            rollout_kl_in_advantage=self.rollout_kl_in_advantage,
            nan_policy=self.nan_policy,
            rs_denominator=self.rs_denominator,
            exclude_rejected_from_baseline=self.exclude_rejected_from_baseline,
            lone_survivor=self.lone_survivor,
            max_rejected_fraction=self.max_rejected_fraction,
            release=self.verl_compat,
            release_arguments={} if self.verl_compat is None else release_arguments(self.verl_compat, dict(self)),
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each older key, and for each key with another effect than a reader may expect."""
        return section_notes(self, self.spec)


def _with_preset(values: Mapping[str, object]) -> dict[str, object]:
    """A preset's values, and the given keys in their place; raises ``ValueError`` for an unknown name."""
    preset = preset_values(str(values["preset"]))
    dropped = {
        key for switch, keys in _DEPENDENTS.items() if switch in values and values[switch] is None for key in keys
    }
    dropped |= {of_preset for key, of_preset in _LOSS_KEYS.items() if values.get(key) is not None}
    return {**{key: value for key, value in preset.items() if key not in dropped}, **values}


def _is_true(value: object) -> bool:
    """Whether a bool's field takes the value as true."""
    try:
        return _BOOL.validate_python(value)
    except ValidationError:
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Compiled:
    """Rules, the bounds beyond which raw weights are counted, and problems of keys without a rule."""

    rules: list[Rule]
    bounds: Bounds
    problems: list[Problem]


def _compile(section: RolloutCorrectionConfig) -> _Compiled:
    rules: list[Rule] = []
    bounds: Bounds = (None, None)
    problems: list[Problem] = []
    if section.rollout_is is not None:
        with collecting(problems):
            weights = weight_rules(
                section.rollout_is,
                section.rollout_is_threshold,
                lower=section.rollout_is_threshold_lower,
                mode=section.rollout_is_mode,
            )
            rules += weights.rules
            bounds = weights.bounds
    if section.rollout_rs is not None:
        with collecting(problems):
            rules += rejection_rules(
                section.rollout_rs,
                section.rollout_rs_threshold,
                lower=section.rollout_rs_threshold_lower,
                release=section.verl_compat,
            )
    if section.rollout_token_veto_threshold is not None:
        with collecting(problems):
            rules.append(veto_rule(section.rollout_token_veto_threshold))
    for index, rule in enumerate(section.rules):
        with collecting(problems):
            _check_acts_on_weights(f"rules.{index}", rule, level=section.rollout_is, before=rules)
    problems += name_problems(rules, section.rules)
    rules += section.rules
    if bounds == (None, None):
        own = [rule for rule in rules if rule.limits_weights_of(section.rollout_is)]
        bounds = (own[0].lower, own[0].upper) if own else bounds
    return _Compiled(rules=rules, bounds=bounds, problems=problems)


def _check_acts_on_weights(key: str, rule: Rule, *, level: Level | None, before: list[Rule]) -> None:
    """Raise ``KeyedError`` for a rule on weights where there are none, of another level, or cut further before it."""
    if rule.rejects:
        return
    if level is None:
        raise KeyedError(key, f"action {rule.action} changes weights, and there are none: set rollout_is")
    if rule.action == "zero_weight":
        return
    if rule.level != level:
        raise KeyedError(
            key,
            f"action {rule.action} cuts weights at level {rule.level}; rollout_is, the level of weights, is {level}",
        )
    cut = [other.upper for other in before if other.action == "truncate" and other.upper is not None]
    if cut and rule.lower is None and rule.upper is not None and rule.upper >= min(cut):
        raise KeyedError(
            key,
            f"action {rule.action} at {rule.upper:g} has no effect: rollout_is_threshold truncates at {min(cut):g} "
            "already; set rollout_is_threshold inf",
        )
