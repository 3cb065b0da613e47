"""What is said once about ``rollout_correction``: what it was understood as, and what older keys and presets became.

Contract: text from values; nothing is logged here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mock_scheduler.correction.config.presets import PRESETS
from mock_scheduler.correction.config.rules import INVERTED_RELEASES
from mock_scheduler.correction.config.thresholds import parse_ratio_band, split_thresholds
from mock_scheduler.correction.config.verl_keys import NEWER_OPTIONS, never_rejects
from mock_scheduler.support.text import count_of

if TYPE_CHECKING:
    from mock_scheduler.correction.config.algorithm import AlgorithmConfig
    from mock_scheduler.correction.config.section import RolloutCorrectionConfig

PREFIX = "[Rollout Correction]"


def describe_correction(algorithm: AlgorithmConfig) -> list[str]:
    """Lines for the log of a run that begins, each with ``PREFIX``; empty where nothing was asked for.

    The first has every bound as it was understood; then what older keys became, the preset, and what to know.
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


def section_notes(section: RolloutCorrectionConfig) -> tuple[str, ...]:
    """What older keys became, and what has another effect here, or none, than one may expect."""
    notes = _older_key_notes(section)
    spec = section.spec
    if section.bypass_mode and spec.loss_type != "reinforce" and section.rollout_is is not None:
        notes.append(
            f"in bypass with loss_type {spec.loss_type} the loss has the ratio to the rollout policy already: weights "
            "are for metrics alone"
        )
    if section.bypass_mode and spec.rejects:
        notes.append("in bypass tokens are rejected update by update, after advantages: no baseline leaves them out")
    notes += [reason for rule in spec.rules if (reason := never_rejects(rule))]
    return tuple(notes + _release_notes(section))


def _older_key_notes(section: RolloutCorrectionConfig) -> list[str]:
    notes = []
    if section.verl_compat is None:
        notes += [
            f"rollout_rs {option} is {newer} of newer releases, which clamps each log ratio to ± 20 first"
            for option, newer in NEWER_OPTIONS.items()
            if option in _options(section)
        ]
    if section.rollout_token_veto_threshold is not None and section.verl_compat is None:
        notes.append("rollout_token_veto_threshold became a rule that rejects the sequence of such a token")
    if section.rollout_is_threshold_lower is not None and section.rollout_is is not None:
        effect = (
            "counts in metrics alone, as weights are truncated from above"
            if section.rollout_is_mode == "truncate"
            else "makes weights outside the two bounds 0 (IcePop); with rollout_is_mode truncate it does not"
        )
        notes.append(f"rollout_is_threshold_lower {effect}")
    if section.use_policy_gradient is not None:
        given = str(section.use_policy_gradient).lower()
        notes.append(f"use_policy_gradient {given} is loss_type {section.loss_type}")
    return notes


def _release_notes(section: RolloutCorrectionConfig) -> list[str]:
    notes = []
    if section.verl_compat == "0.6.0" and section.rollout_is and section.rollout_token_veto_threshold is None:
        notes.append("verl 0.6.0 makes weights of sequences with a ratio below its default veto threshold, 1e-4, 0")
    if section.verl_compat in INVERTED_RELEASES:
        kept = [f"{option} keeps ratios in {bounds}" for option, bounds in _inverted_bounds(section)]
        if kept:
            notes.append(f"verl {section.verl_compat} inverts bounds of k1 (verl#6377): {', '.join(kept)}")
    return notes


def _inverted_bounds(section: RolloutCorrectionConfig) -> list[tuple[str, str]]:
    """Each option with k1 whose bounds are no reciprocals of one another, and the ratios that it really keeps."""
    key, found = "rollout_rs_threshold", []
    options, threshold = list(dict.fromkeys(_options(section))), section.rollout_rs_threshold
    if threshold is None:
        return []
    for option, value in zip(options, split_thresholds(threshold, key=key, options=options), strict=True):
        if option.endswith("_k1"):
            band = parse_ratio_band(value, key=key)
            if band.is_pair and band.lower is not None:
                found.append((option, f"[{1.0 / band.upper:.6g}, {1.0 / band.lower:.6g}]"))
    return found


def _preset_lines(section: RolloutCorrectionConfig) -> list[str]:
    """Where a preset's values are from, what differs there, and which keys count in their place."""
    if section.preset is None:
        return []
    preset = PRESETS[section.preset]
    plain = type(section).model_validate({"preset": section.preset}).model_dump()
    given_values = section.model_dump(exclude={"verl_compat"})
    changed = [f"{key}={_short(value)}" for key, value in given_values.items() if plain[key] != value]
    remark = f"; {preset.remark}" if preset.remark else ""
    given = f"; given in its place: {', '.join(changed)}" if changed else ""
    return [f"preset {section.preset} is of {preset.source}{remark}{given}"]


def _short(value: object) -> str:
    return count_of(len(value), "rule") if isinstance(value, list) else str(value)


def _options(section: RolloutCorrectionConfig) -> list[str]:
    text = section.rollout_rs
    return [] if text is None else [option.strip() for option in text.split(",") if option.strip()]
