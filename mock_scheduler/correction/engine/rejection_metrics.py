"""Makes the metrics of each rejecting rule, and of all together, by verl's newest names and by the guide's."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mock_scheduler.correction.config.rules import CorrectionSpec, Level, Rule, numbered_label
from mock_scheduler.correction.config.verl_keys import VETO
from mock_scheduler.correction.engine.sequence_sums import guide_rule, rule_key
from mock_scheduler.correction.engine.states import (
    View,
    effective_sample_size,
    fraction_beyond,
    mean_of,
    sequence_values,
    std_of,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rejecting:
    """Holds a rejecting rule, the prefix of its columns, and its own name in metrics."""

    rule: Rule
    key: str
    name: str


def _rejecting(view: View, spec: CorrectionSpec) -> list[_Rejecting]:
    """Returns the rejecting rules, with the veto; states of a verl release know none."""
    found: list[_Rejecting] = []
    for index, rule in enumerate(spec.rules):
        key = rule_key(index, rule)
        if rule.rejects and f"{key}:rejected" in view.states.sums:
            name = numbered_label(rule, [other.rule.label for other in found])
            found.append(_Rejecting(rule=rule, key=key, name=name))
    return found


def rejections(view: View, spec: CorrectionSpec) -> dict[str, float]:
    """Makes ``rollout_rs_{rule}_…`` of every rejecting rule, without the veto, and of all together.

    A second rule of one label is ``{label}_2``.
    """
    metrics: dict[str, float] = {}
    for item in _rejecting(view, spec):
        if item.rule.name != VETO:
            metrics |= _rejection(view, item)
    if metrics:
        metrics["rollout_rs_masked_fraction"] = view.mean("rs_rejected")
        metrics["rollout_rs_seq_masked_fraction"] = mean_of(view.rows("rs_rejected") > 0)
    return metrics


def _rejection(view: View, item: _Rejecting) -> dict[str, float]:
    """Metrics of one rule; a ratio's values are given as k1 = −log ρ, as in verl's options of this name."""
    rule, key = item.rule, item.key
    states, prefix = view.states, f"rollout_rs_{item.name}"
    sign = -1.0 if rule.estimator == "ratio" else 1.0
    largest, smallest = states.largest(key), states.smallest(key)
    low_side, high_side = ("high", "low") if sign < 0 else ("low", "high")
    means = 0.0 + sign * view.row_means(key)
    mean_clamped = view.mean(f"{key}:clamped")
    metrics = {
        f"{prefix}_mean": 0.0 + sign * view.mean(key),
        f"{prefix}_max": 0.0 - smallest if sign < 0 else largest,
        f"{prefix}_min": 0.0 - largest if sign < 0 else smallest,
        f"{prefix}_std": std_of(view.mean(f"{key}:clamped_squared"), mean_clamped, view.num_tokens),
        **sequence_values(means, prefix, centre=0.0),
        f"{prefix}_masked_fraction": view.mean(f"{key}:rejected"),
        f"{prefix}_seq_masked_fraction": mean_of(view.rows(f"{key}:rejected") > 0),
    }
    for side, column, bound in ((low_side, "low", rule.lower), (high_side, "high", rule.upper)):
        if bound is None:
            if side == "low" and rule.estimator in ("k2", "k3"):
                metrics[f"{prefix}_fraction_low"] = 0.0
            continue
        limit = math.log(bound) if rule.estimator == "ratio" else bound
        metrics[f"{prefix}_fraction_{side}"] = fraction_beyond(view, rule.level, f"{key}:{column}")
        is_beyond = means * sign < limit if column == "low" else means * sign > limit
        metrics[f"{prefix}_seq_fraction_{side}"] = mean_of(is_beyond)
    return metrics


def veto(view: View, spec: CorrectionSpec) -> dict[str, float]:
    """Metrics of the veto, 0 where there is none."""
    for item in _rejecting(view, spec):
        if item.rule.name == VETO:
            return {
                "rollout_is_veto_fraction": mean_of(view.rows(f"{item.key}:rejected") > 0),
                "rollout_is_catastrophic_token_fraction": view.mean(f"{item.key}:outside"),
            }
    return {"rollout_is_veto_fraction": 0.0, "rollout_is_catastrophic_token_fraction": 0.0}


def guide_rejections(view: View, spec: CorrectionSpec) -> dict[str, float]:
    """Makes the guide's ``rollout_rs_…``, in ratios, of the first rule against a ratio, but the veto."""
    found = [item for item in _rejecting(view, spec) if item.rule is guide_rule(spec)]
    if not found:
        return {}
    rule, key = found[0].rule, found[0].key
    column, prefix = f"{key}:ratio", "rollout_rs"
    means = view.row_means(column)
    mean = view.mean(f"{key}:banded")
    metrics = {
        f"{prefix}_mean": view.mean(column),
        f"{prefix}_max": view.states.largest(column),
        f"{prefix}_min": view.states.smallest(column),
        f"{prefix}_std": std_of(view.mean(f"{key}:banded_squared"), mean, view.num_tokens),
        f"{prefix}_eff_sample_size": effective_sample_size(view, f"{key}:banded"),
        **sequence_values(means, prefix, centre=1.0),
        f"{prefix}_masked_fraction": view.mean(f"{key}:rejected"),
        f"{prefix}_seq_masked_fraction": mean_of(view.rows(f"{key}:rejected") > 0),
    }
    for side, bound in (("high", rule.upper), ("low", rule.lower)):
        if bound is None:
            continue
        # The guide's revision counted tokens for `geometric`, and sequences for `sequence`.
        level: Level = "token" if rule.level == "geometric" else rule.level
        metrics[f"{prefix}_ratio_fraction_{side}"] = fraction_beyond(view, level, f"{key}:{side}")
        metrics[f"{prefix}_seq_fraction_{side}"] = mean_of(means > bound if side == "high" else means < bound)
    return metrics
