"""``algorithm``: what verl keeps under that name and this project reads, ``rollout_correction`` in all its spellings.

verl 0.6.0 had its keys flat in ``algorithm``, and before that one, ``tis_imp_ratio_cap``, with the actor: both are
read here, and ``flat_keys`` says what they became.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import model_validator

from mock_scheduler.config.base import ConfigSection
from mock_scheduler.config.correction.section import RolloutCorrectionConfig

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
_CAP_KEY = "tis_imp_ratio_cap"


class AlgorithmConfig(ConfigSection):
    """``rollout_correction``: off where it is absent; an empty section only measures. ``flat_keys``: what was read."""

    rollout_correction: RolloutCorrectionConfig | None = None
    flat_keys: str = ""

    @model_validator(mode="before")
    @classmethod
    def _read_flat_keys(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        flat = {name: values[name] for name in (*_LEVEL_KEYS, *_FLAT_KEYS, _CAP_KEY) if name in values}
        others = {name: value for name, value in values.items() if name not in flat}
        section = others.get("rollout_correction")
        if not flat:
            return others
        if section is not None:
            raise ValueError(
                f"has rollout_correction and the older keys {', '.join(flat)} beside it; keep rollout_correction"
            )
        translated = _translate(flat)
        if translated is None:
            return others
        became = ", ".join(f"{name}={value}" for name, value in translated.items())
        return {
            **others,
            "rollout_correction": translated,
            "flat_keys": f"{', '.join(f'algorithm.{name}' for name in flat)} became rollout_correction: {became}",
        }


def _translate(flat: Mapping[str, object]) -> dict[str, object] | None:
    """The section of verl's flat keys; ``None`` where they switch correction off."""
    translated = {_FLAT_KEYS[name]: value for name, value in flat.items() if name in _FLAT_KEYS and value is not None}
    if _CAP_KEY in flat:
        cap = flat[_CAP_KEY]
        if len(flat) > 1:
            raise ValueError(f"has {_CAP_KEY} and newer keys beside it; keep one of them")
        # Values of 0 and below switched it off.
        is_off = cap is None or (isinstance(cap, int | float) and not isinstance(cap, bool) and cap <= 0)
        return None if is_off else {"rollout_is": "token", "rollout_is_threshold": cap}
    switch, level = flat.get("rollout_is"), flat.get("rollout_is_level")
    if isinstance(switch, bool) or (switch is None and level is not None):
        is_on = switch is None or switch
        if is_on and flat.get("rollout_is_threshold") is not None:
            translated["rollout_is"] = level or "token"
        else:
            for name in ("rollout_is_mode", "rollout_is_threshold", "rollout_is_threshold_lower"):
                translated.pop(name, None)
    elif switch is not None:
        translated["rollout_is"] = switch
    else:
        for name in ("rollout_is_mode", "rollout_is_threshold", "rollout_is_threshold_lower"):
            translated.pop(name, None)
    return translated or None
