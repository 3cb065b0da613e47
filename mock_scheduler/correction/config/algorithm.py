"""Has ``algorithm``, verl's section, of which this project reads ``rollout_correction`` in all its spellings.

verl 0.6.0 had its keys flat in ``algorithm``; older releases had one, ``tis_imp_ratio_cap``, with the actor. Both are
read here, and ``flat_keys`` names the section made of them. In 0.6.0 ``rollout_is_threshold`` switches everything on,
and ``rollout_is`` (default false) decides whether the weights are applied or only measured.
Source: verl 0.6.0, ``trainer/config/algorithm.py`` and ``compute_rollout_importance_weights_and_add_to_batch``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError, model_validator

from mock_scheduler.config.base import ConfigSection
from mock_scheduler.config.problems import Problem, raise_keyed, validation_problems
from mock_scheduler.correction.config.presets import PRESETS
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from mock_scheduler.support.text import count_of

PREFIX = "[Rollout Correction]"
CAP_KEY = "tis_imp_ratio_cap"
_KEY = "algorithm.rollout_correction"
#: Flat key -> key of ``rollout_correction``; ``rollout_is`` and ``rollout_is_level`` are read together.
_FLAT_KEYS: Mapping[str, str] = {
    "rollout_is_mode": "rollout_is_mode",
    "rollout_is_threshold": "rollout_is_threshold",
    "rollout_is_threshold_lower": "rollout_is_threshold_lower",
    "rollout_is_veto_threshold": "rollout_token_veto_threshold",
    "rollout_is_batch_normalize": "rollout_is_batch_normalize",
    "rollout_rs": "rollout_rs",
    "rollout_rs_threshold": "rollout_rs_threshold",
    "rollout_rs_threshold_lower": "rollout_rs_threshold_lower",
    "rollout_token_veto_threshold": "rollout_token_veto_threshold",
}
_LEVEL_KEYS = ("rollout_is", "rollout_is_level")
#: Keys that 0.6.0 did not have: with one of these, weights are asked for by ``rollout_is``, which names their level.
_NEWER_KEYS = ("rollout_rs", "rollout_rs_threshold", "rollout_rs_threshold_lower", "rollout_token_veto_threshold")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Translation:
    """The section made of flat keys, the flat name of each of its keys, and a remark to show; ``None`` is off."""

    section: dict[str, object] | None
    names: Mapping[str, str]
    remark: str = ""
    only_measures: bool = False


class AlgorithmConfig(ConfigSection):
    """``rollout_correction``: off where it is absent; an empty section only measures.

    ``flat_keys``: a sentence on the older keys and the section made of them.
    """

    rollout_correction: RolloutCorrectionConfig | None = None
    flat_keys: str = ""

    @model_validator(mode="before")
    @classmethod
    def _read_flat_keys(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        names = [name for name in (*_LEVEL_KEYS, *_FLAT_KEYS, CAP_KEY) if name in values]
        others = {name: value for name, value in values.items() if name not in names}
        flat = {name: values[name] for name in names if values[name] is not None}
        if not flat:
            return others
        if others.get("rollout_correction") is not None:
            given = ", ".join(flat)
            text = f"has rollout_correction and the older keys {given} beside it; keep rollout_correction"
            raise_keyed(cls.__name__, [("", text)], values)
        if CAP_KEY in flat and len(flat) > 1:
            text = f"is older than {', '.join(name for name in flat if name != CAP_KEY)} beside it; leave it out"
            raise_keyed(cls.__name__, [(CAP_KEY, text)], values)
        translation = _translate(flat)
        return {**others, **_as_values(flat, translation)}


def is_cap_off(cap: object) -> bool:
    """Whether a ``tis_imp_ratio_cap`` switched correction off: null, or a number up to 0 (its default was -1)."""
    return cap is None or (isinstance(cap, int | float) and not isinstance(cap, bool) and cap <= 0)


def _translate(flat: Mapping[str, object]) -> _Translation:
    section = {_FLAT_KEYS[name]: value for name, value in flat.items() if name in _FLAT_KEYS}
    names = {_FLAT_KEYS[name]: name for name in flat if name in _FLAT_KEYS}
    if CAP_KEY in flat:
        cap = flat[CAP_KEY]
        on = None if is_cap_off(cap) else {"rollout_is": "token", "rollout_is_threshold": cap}
        return _Translation(section=on, names={"rollout_is_threshold": CAP_KEY})
    switch, level = flat.get("rollout_is"), flat.get("rollout_is_level")
    names["rollout_is"] = "rollout_is" if level is None else "rollout_is_level"
    is_newer = any(name in flat for name in _NEWER_KEYS)
    if not isinstance(switch, bool) and (switch is not None or (level is None and is_newer)):
        return _Translation(section=section if switch is None else {**section, "rollout_is": switch}, names=names)
    if "rollout_is_threshold" not in flat:
        rejection = {key: value for key, value in section.items() if names[key] in _NEWER_KEYS}
        return _Translation(section=rejection or None, names=names)
    section = {"rollout_is": level or "token", **section}
    if "rollout_is_threshold_lower" in section:
        section.setdefault("rollout_is_mode", "truncate")
    remark = ""
    if switch and "rollout_token_veto_threshold" not in section:
        remark = "; verl 0.6.0 also vetoed ratios below 1e-4 by default: set rollout_is_veto_threshold for that"
    return _Translation(section=section, names=names, remark=remark, only_measures=not switch)


def _as_values(flat: Mapping[str, object], translation: _Translation) -> dict[str, object]:
    """Makes the values of ``AlgorithmConfig``; raises ``ValidationError`` at the flat keys."""
    read = ", ".join(f"algorithm.{name}" for name in flat)
    if translation.section is None:
        return {"flat_keys": f"{read}: rollout correction is off, as {_what_is_off(flat)}"}
    try:
        section = RolloutCorrectionConfig.model_validate(translation.section)
    except ValidationError as error:
        problems = [
            (translation.names.get(key, f"rollout_correction.{key}"), text)
            for key, text in validation_problems(error, RolloutCorrectionConfig)
        ]
        raise_keyed(AlgorithmConfig.__name__, problems, flat)
    if translation.only_measures:
        section = RolloutCorrectionConfig()
        became = "an empty section, which only measures, as rollout_is is not true"
    else:
        became = ", ".join(f"{name}={value}" for name, value in translation.section.items())
    return {
        "rollout_correction": section,
        "flat_keys": f"{read} became rollout_correction: {became}{translation.remark}",
    }


def _what_is_off(flat: Mapping[str, object]) -> str:
    return f"{CAP_KEY} is {flat[CAP_KEY]}" if CAP_KEY in flat else "rollout_is_threshold is not set"


def describe_correction(algorithm: AlgorithmConfig) -> list[str]:
    """Makes the lines for the log of a new run, each with ``PREFIX``; none where correction is off.

    The first line has every bound as understood; older keys, the preset and notes follow.
    """
    lines = []
    section = algorithm.rollout_correction
    if section is not None:
        lines.append(f"algorithm.rollout_correction: {section.spec.describe()}")
    if algorithm.flat_keys:
        lines.append(algorithm.flat_keys)
    if section is not None:
        lines += _preset_lines(section) + list(section.notes)
    return [f"{PREFIX} {line}" for line in lines]


def _preset_lines(section: RolloutCorrectionConfig) -> list[str]:
    """Returns the source of a preset's values, the differences from it, and the keys given in its place."""
    if section.preset is None:
        return []
    preset = PRESETS[section.preset]
    plain = RolloutCorrectionConfig.model_validate({"preset": section.preset}).model_dump()
    given_values = section.model_dump(exclude={"verl_compat"})
    changed = [f"{key}={_short(value)}" for key, value in given_values.items() if plain[key] != value]
    remark = f"; {preset.remark}" if preset.remark else ""
    given = f"; given in its place: {', '.join(changed)}" if changed else ""
    return [f"preset {section.preset} is of {preset.source}{remark}{given}"]


def _short(value: object) -> str:
    return count_of(len(value), "rule") if isinstance(value, list) else str(value)


def combination_problems(
    algorithm: AlgorithmConfig,
    *,
    adv_estimator: str,
    reward_normalization: str,
    dual_clip: float | None,
    pg_clip_high: float | None,
) -> list[Problem]:
    """Finds keys of correction and of the run without effect beside one another.

    Args:
        algorithm: The checked section.
        adv_estimator: The run's advantage estimator; ``rloo`` compares rewards.
        reward_normalization: ``reward_normalization.method``; all but ``none`` compare rewards.
        dual_clip: The run's second clip of the ratio, ``None`` without one.
        pg_clip_high: The run's upper clip, ``None`` without one of its own.

    Returns:
        Each problem with its dotted key; none where correction is off.
    """
    section = algorithm.rollout_correction
    if section is None:
        return []
    problems: list[Problem] = []
    loss_type = section.loss_type
    problems += [
        (name, f"is {value:g} and has no effect: {_KEY}.loss_type {loss_type} has no clip; leave it out")
        for name, value in {"dual_clip": dual_clip, "pg_clip_high": pg_clip_high}.items()
        if value is not None and loss_type != "ppo_clip"
    ]
    has_baseline = adv_estimator == "rloo" or reward_normalization != "none"
    about_baseline = {
        "exclude_rejected_from_baseline": (section.exclude_rejected_from_baseline, True),
        "lone_survivor": (section.lone_survivor, "reward"),
    }
    problems += [
        (
            f"{_KEY}.{name}",
            f"has no effect: adv_estimator {adv_estimator} with reward_normalization.method none compares no rewards",
        )
        for name, (value, default) in about_baseline.items()
        if value != default and not has_baseline
    ]
    return problems
