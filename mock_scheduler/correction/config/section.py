"""``algorithm.rollout_correction``: the keys, what they mean together, and the rules that they become.

Contract: everything that can be known to be wrong is refused when the section is made, each problem at its key.
``section.spec`` is what is computed; ``section.notes`` say, once, what older keys became.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, model_validator

from mock_scheduler.config.base import ConfigSection, JoinedTexts
from mock_scheduler.config.problems import KeyedError, Problem, collecting, raise_keyed
from mock_scheduler.correction.config.checks import section_problems
from mock_scheduler.correction.config.describe import section_notes
from mock_scheduler.correction.config.names import name_problems
from mock_scheduler.correction.config.presets import preset_values
from mock_scheduler.correction.config.rules import (
    CorrectionSpec,
    Denominator,
    Level,
    LoneSurvivor,
    LossType,
    NanPolicy,
    Rule,
    VerlRelease,
)
from mock_scheduler.correction.config.thresholds import (
    UNLIMITED,
    NonNegativeNumber,
    PositiveNumber,
    Threshold,
    read_number,
    read_scalar,
)
from mock_scheduler.correction.config.verl_keys import rejection_rules, veto_rule, weight_rules

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
#: Releases with the helper of another one -> that one.
_SAME_HELPER: Mapping[str, VerlRelease] = {"0.9.0": "0.9.1", "0.7.0": "0.6.1"}
_BOOL = TypeAdapter(bool)


def _read_level(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(
            f"is {str(value).lower()}, the switch that verl 0.6.0 has flat in `algorithm`; name the level here: token, "
            "segment, sequence or geometric, or null for no weights"
        )
    return value


def _read_release(value: object) -> object:
    if value is None or value in get_args(VerlRelease):
        return value
    if isinstance(value, str) and value in _SAME_HELPER:
        return _SAME_HELPER[value]
    known = ", ".join(
        release + "".join(f" (also as {alias})" for alias, same in _SAME_HELPER.items() if same == release)
        for release in get_args(VerlRelease)
    )
    raise ValueError(f"unknown release {value!r}; known releases: {known}")


def _read_nan_policy(value: object) -> object:
    return "reject" if value == "mask" else value


ThresholdValue = Annotated[float | str | None, BeforeValidator(read_scalar)]


class RolloutCorrectionConfig(ConfigSection):
    """Importance weights and rejection for rollouts that another policy sampled; the keys are verl's and our own.

    ``preset``: named values, over which the other keys given count. ``verl_compat``: reproduce this release of verl,
    with its bugs. ``rollout_is``, ``rollout_rs`` and their thresholds: verl's, of every release. ``rules``: further
    rules. ``bypass_mode`` and ``loss_type``: two policies in the place of three. The others: see ``CorrectionSpec``.
    """

    preset: str | None = None
    verl_compat: Annotated[VerlRelease | None, BeforeValidator(_read_release)] = None

    rollout_is: Annotated[Level | None, BeforeValidator(_read_level)] = None
    rollout_is_threshold: ThresholdValue = 2.0
    rollout_is_threshold_lower: PositiveNumber | None = None
    rollout_is_mode: Literal["truncate", "mask"] | None = None
    rollout_is_batch_normalize: bool = False
    rollout_rs: JoinedTexts | None = None
    rollout_rs_threshold: ThresholdValue = None
    rollout_rs_threshold_lower: PositiveNumber | None = None
    rollout_token_veto_threshold: PositiveNumber | None = None
    bypass_mode: bool = False
    loss_type: LossType = "ppo_clip"
    use_policy_gradient: bool | None = None

    rules: list[Rule] = Field(default=[])
    rollout_kl_coef: NonNegativeNumber = 0.0
    rollout_kl_in_advantage: NonNegativeNumber = 0.0
    nan_policy: Annotated[NanPolicy, BeforeValidator(_read_nan_policy)] = "reject"
    rs_denominator: Denominator = "original"
    exclude_rejected_from_baseline: bool = True
    lone_survivor: LoneSurvivor = "reward"
    max_rejected_fraction: Annotated[float, Field(ge=0.0, le=1.0), BeforeValidator(read_number)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        if values.get("preset") is not None:
            try:
                values = _with_preset(values)
            except ValueError as error:
                raise_keyed(cls.__name__, [("preset", str(error).removeprefix("preset: "))], values)
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
        """The rules that these keys are."""
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
            release_arguments=_release_arguments(self),
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What older keys became, and what has no effect here that it has elsewhere."""
        return section_notes(self)


def _with_preset(values: Mapping[str, object]) -> dict[str, object]:
    """A preset's values, with those beside it in their place; raises ``ValueError`` for a name that is none."""
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
    """Rules, the bounds that raw weights are counted beyond, and what kept a key from becoming a rule."""

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


def _as_argument(threshold: Threshold | None) -> Threshold | None:
    return float(UNLIMITED) if threshold == UNLIMITED else threshold


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
            "rollout_is_threshold": _as_argument(section.rollout_is_threshold) if section.rollout_is else None,
            "rollout_is_threshold_lower": section.rollout_is_threshold_lower,
            # Absent it is that release's default, 1e-4.
            **({} if veto is None else {"rollout_is_veto_threshold": veto}),
        }
    arguments: dict[str, object] = {
        "rollout_is": section.rollout_is,
        "rollout_is_threshold": _as_argument(section.rollout_is_threshold),
        "rollout_rs": section.rollout_rs,
        "rollout_rs_threshold": section.rollout_rs_threshold,
    }
    if release in ("e7cdce1c", "0.6.1"):
        arguments["rollout_rs_threshold_lower"] = section.rollout_rs_threshold_lower
        arguments["rollout_token_veto_threshold"] = section.rollout_token_veto_threshold
    if release != "e7cdce1c":
        arguments["rollout_is_batch_normalize"] = section.rollout_is_batch_normalize
    return arguments
