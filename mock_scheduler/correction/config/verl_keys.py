"""Reads verl's keys of rollout correction, of every release, as rules.

Contract: pure functions from the keys' values to rules; ``KeyedError`` names the key. Options of k1 compare
the log ratio itself with the logarithms of their bounds, so the kept ratios are [lo, hi], as verl documents them; its
releases up to 0.9.1 keep [1/hi, 1/lo] (verl#6377).
Sources: verl ``trainer/ppo/rollout_corr_helper.py`` (0.6.1 to 0.9.1), ``mismatch_helper.py`` (0.6.0, git e7cdce1c).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from mock_scheduler.config.problems import KeyedError
from mock_scheduler.correction.config.rules import LOG_RATIO_BOUND, Aggregation, Estimator, Level, Rule
from mock_scheduler.correction.config.thresholds import (
    UNLIMITED,
    Threshold,
    check_veto,
    parse_divergence,
    parse_ratio_band,
    split_thresholds,
)
from mock_scheduler.correction.verl.releases import BEHAVIOURS, VerlRelease

VETO = "veto"
WEIGHTS = "rollout_is"

#: Options of 0.6.1 and before -> level of a ratio.
RATIO_OPTIONS: Mapping[str, Level] = {"token": "token", "sequence": "sequence", "geometric": "geometric"}
#: Options since 0.7.1 -> level, aggregation and estimator; k1 bounds a ratio.
DIVERGENCE_OPTIONS: Mapping[str, tuple[Level, Aggregation, Estimator]] = {
    "token_k1": ("token", "sum", "ratio"),
    "token_k2": ("token", "sum", "k2"),
    "token_k3": ("token", "sum", "k3"),
    "seq_sum_k1": ("sequence", "sum", "ratio"),
    "seq_sum_k2": ("sequence", "sum", "k2"),
    "seq_sum_k3": ("sequence", "sum", "k3"),
    "seq_mean_k1": ("sequence", "mean", "ratio"),
    "seq_mean_k2": ("sequence", "mean", "k2"),
    "seq_mean_k3": ("sequence", "mean", "k3"),
    "seq_max_k2": ("sequence", "max", "k2"),
    "seq_max_k3": ("sequence", "max", "k3"),
}
#: Names of one statistic: of 0.6.1 and before -> since 0.7.1.
NEWER_OPTIONS: Mapping[str, str] = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
_SAME_STATISTIC: Mapping[str, str] = {**NEWER_OPTIONS, **{newer: older for older, newer in NEWER_OPTIONS.items()}}
#: The most that an estimator says of one token whose log ratio is clamped.
_LARGEST: Mapping[Estimator, float] = {
    "k2": 0.5 * LOG_RATIO_BOUND**2,
    "k3": math.exp(LOG_RATIO_BOUND) - 1.0 - LOG_RATIO_BOUND,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightRule:
    """Holds the rules of ``rollout_is`` and its thresholds; bounds: beyond them metrics count raw weights."""

    rules: tuple[Rule, ...]
    bounds: tuple[float | None, float | None]


def weight_rules(
    level: Level, threshold: Threshold | None, *, lower: float | None, mode: Literal["truncate", "mask"] | None
) -> WeightRule:
    """Makes the rules of importance weights.

    ``u`` truncates at u. ``"lo_hi"``, a lower bound, or mode ``mask`` make weights outside [lo, hi] 0 (IcePop); lo is
    1/u where mode is ``mask`` and no lower bound is given. ``inf`` leaves weights as they are.
    """
    key = "rollout_is_threshold"
    if threshold is None:
        raise KeyedError(
            key,
            "is null, which bounds no weight; give a number such as 2.0, a pair such as '0.5_5.0', or inf for weights "
            "without a bound",
        )
    if threshold == UNLIMITED:
        if lower is not None or mode == "mask":
            raise KeyedError(key, "is inf, and rollout_is_threshold_lower or rollout_is_mode mask needs a bound")
        return WeightRule(rules=(), bounds=(None, None))
    band = parse_ratio_band(threshold, key=key, lower=lower)
    is_pair_text = isinstance(threshold, str) and "_" in threshold
    if mode == "truncate" and is_pair_text:
        raise KeyedError(
            key, f"{threshold!r} makes weights outside it 0; with rollout_is_mode truncate give one number"
        )
    if mode == "mask" or (mode is None and band.is_pair):
        rule = Rule(level=level, action="zero_weight", lower=band.lower, upper=band.upper, name=WEIGHTS)
    else:
        rule = Rule(level=level, action="truncate", upper=band.upper, name=WEIGHTS)
    return WeightRule(rules=(rule,), bounds=(band.lower, band.upper))


def rejection_rules(
    text: str, threshold: Threshold | None, *, lower: float | None, release: VerlRelease | None
) -> tuple[Rule, ...]:
    """Makes the rules of ``rollout_rs``: one per option of the list, in its order."""
    key = "rollout_rs_threshold"
    options = list(dict.fromkeys(option.strip() for option in text.split(",") if option.strip()))
    if not options:
        raise KeyedError("rollout_rs", "is empty; name at least one option, or leave it null")
    known = _known_options(release)
    unknown = [option for option in options if option not in known]
    if unknown:
        raise KeyedError("rollout_rs", _describe_unknown(unknown, known, release))
    if threshold is None:
        raise KeyedError(key, f"is null, and rollout_rs {text!r} rejects nothing without it; give it")
    divergences = [option for option in options if option in DIVERGENCE_OPTIONS]
    if lower is not None and divergences:
        raise KeyedError(
            f"{key}_lower",
            f"belongs to the options {', '.join(RATIO_OPTIONS)}; give {', '.join(divergences)} both bounds as "
            f"{key}: 'lo_hi'",
        )
    thresholds = split_thresholds(threshold, key=key, options=options)
    return tuple(_rule(option, value, lower=lower) for option, value in zip(options, thresholds, strict=True))


def veto_rule(threshold: float) -> Rule:
    """Makes the rule against sequences with a token of ratio below ``threshold``; raises ``KeyedError`` from 1 on."""
    check_veto(threshold, key="rollout_token_veto_threshold")
    return Rule(level="token", action="reject_sequence", lower=threshold, name=VETO)


def _describe_unknown(unknown: list[str], known: list[str], release: VerlRelease | None) -> str:
    nearest = [*dict.fromkeys(match for name in unknown for match in _nearest(name, known))]
    hint = f"; nearest: {', '.join(nearest)}" if nearest else ""
    options = "option" if len(unknown) == 1 else "options"
    of_release = "" if release is None else f" of verl {release}"
    return f"unknown {options} {', '.join(unknown)}{hint}; known options{of_release}: {', '.join(known)}"


def _nearest(name: str, known: list[str]) -> list[str]:
    """The known option of the same statistic, where another release has the name; else the one of a close name."""
    if name in _SAME_STATISTIC:
        return [_SAME_STATISTIC[name]]
    return [] if name in DIVERGENCE_OPTIONS else get_close_matches(name, known, n=1, cutoff=0.5)


def never_rejects(rule: Rule) -> str:
    """Why a rule of ``rejection_rules`` rejects nothing, since log ratios are clamped; empty where it may."""
    largest = _LARGEST.get(rule.estimator)
    is_sum = rule.level != "token" and rule.effective_aggregation == "sum"
    if largest is None or not rule.clamps_tokens or is_sum or rule.upper is None or rule.upper < largest:
        return ""
    return (
        f"the bound {rule.upper:g} of {rule.label} rejects nothing: with log ratios clamped to "
        f"± {LOG_RATIO_BOUND:g} it is at most {largest:.6g}"
    )


def _known_options(release: VerlRelease | None) -> list[str]:
    if release is None:
        return [*RATIO_OPTIONS, *DIVERGENCE_OPTIONS]
    return list(DIVERGENCE_OPTIONS if BEHAVIOURS[release].rejects_by == "divergence" else RATIO_OPTIONS)


def _rule(option: str, threshold: Threshold, *, lower: float | None) -> Rule:
    key = "rollout_rs_threshold"
    if option in RATIO_OPTIONS:
        band = parse_ratio_band(threshold, key=key, lower=lower)
        level = RATIO_OPTIONS[option]
        action: Literal["reject_token", "reject_sequence"] = "reject_token" if level == "token" else "reject_sequence"
        return Rule(level=level, action=action, lower=band.lower, upper=band.upper, name=option)
    level, aggregation, estimator = DIVERGENCE_OPTIONS[option]
    action = "reject_token" if level == "token" else "reject_sequence"
    bottom: float | None = None
    if estimator == "ratio":
        band = parse_ratio_band(threshold, key=key)
        bottom, top = band.lower, band.upper
    else:
        top = parse_divergence(threshold, key=key, option=option)
    return Rule(
        level=level,
        action=action,
        estimator=estimator,
        aggregation=aggregation,
        lower=bottom,
        upper=top,
        clamps_tokens=True,
        name=option,
    )
