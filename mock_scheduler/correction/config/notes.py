"""Notes on the keys of ``rollout_correction``: the rules made of older keys, and surprising effects.

Contract: text from values; nothing is logged here.
"""

from __future__ import annotations

from mock_scheduler.correction.config.keys import CorrectionKeys
from mock_scheduler.correction.config.rules import CorrectionSpec
from mock_scheduler.correction.config.thresholds import parse_ratio_band, split_thresholds
from mock_scheduler.correction.config.verl_keys import NEWER_OPTIONS, never_rejects
from mock_scheduler.correction.verl.releases import BEHAVIOURS, VerlRelease


def section_notes(section: CorrectionKeys, spec: CorrectionSpec) -> tuple[str, ...]:
    """Writes a sentence for each older key, and for each key with another effect than a reader may expect.

    spec: the compiled keys.
    """
    notes = _older_key_notes(section)
    if section.bypass_mode and spec.loss_type != "reinforce" and section.rollout_is is not None:
        notes.append(
            f"in bypass with loss_type {spec.loss_type} the loss has the ratio to the rollout policy already: weights "
            "are for metrics alone"
        )
    if section.bypass_mode and spec.rejects:
        notes.append("in bypass tokens are rejected update by update, after advantages: no baseline leaves them out")
    notes += [reason for rule in spec.rules if (reason := never_rejects(rule))]
    return tuple(notes + ([] if section.verl_compat is None else _release_notes(section, section.verl_compat)))


def _older_key_notes(section: CorrectionKeys) -> list[str]:
    notes = []
    if section.verl_compat is None:
        notes += [
            f"rollout_rs {option} is {newer} of newer releases, which clamps each log ratio to ± 20 first"
            for option, newer in NEWER_OPTIONS.items()
            if option in section.rejection_options
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


def _release_notes(section: CorrectionKeys, release: VerlRelease) -> list[str]:
    notes = []
    veto = BEHAVIOURS[release].default_veto
    if veto is not None and section.rollout_is and section.rollout_token_veto_threshold is None:
        notes.append(
            f"verl {release} makes weights of sequences with a ratio below its default veto threshold, {veto:g}, 0"
        )
    if BEHAVIOURS[release].inverts_k1:
        kept = [f"{option} keeps ratios in {bounds}" for option, bounds in _inverted_bounds(section)]
        if kept:
            notes.append(f"verl {release} inverts bounds of k1 (verl#6377): {', '.join(kept)}")
    return notes


def _inverted_bounds(section: CorrectionKeys) -> list[tuple[str, str]]:
    """Pairs each k1 option, unless its bounds are reciprocals of one another, with the ratios that it really keeps."""
    key, found = "rollout_rs_threshold", []
    options, threshold = list(dict.fromkeys(section.rejection_options)), section.rollout_rs_threshold
    if threshold is None:
        return []
    for option, value in zip(options, split_thresholds(threshold, key=key, options=options), strict=True):
        if option.endswith("_k1"):
            band = parse_ratio_band(value, key=key)
            if band.is_pair and band.lower is not None:
                found.append((option, f"[{1.0 / band.upper:.6g}, {1.0 / band.lower:.6g}]"))
    return found
