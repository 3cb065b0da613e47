"""Tokens of the plain reference, and every metric of rollout correction by its formula."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from mock_scheduler.correction.config.rules import CorrectionSpec, Rule

LIMIT = 20.0


@dataclass(kw_only=True)
class Token:
    """A response token; ``is_known`` is False where its ratio is not."""

    row: int
    column: int
    turn: int
    train: float
    rollout: float
    advantage: float
    is_known: bool = True
    log_weight: float = 0.0
    raw: float = 0.0
    bounded: float = 0.0
    applied: float = 0.0
    rejecting: set[int] = field(default_factory=set)
    outside: set[int] = field(default_factory=set)
    values: dict[int, float] = field(default_factory=dict)

    @property
    def log_ratio(self) -> float:
        return self.train - self.rollout

    @property
    def is_kept(self) -> bool:
        return self.is_known and not self.rejecting


def clamp(value: float, low: float | None, high: float | None) -> float:
    if low is not None and value < low:
        return low
    return high if high is not None and value > high else value


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed)


def limits(rule: Rule) -> tuple[float | None, float | None]:
    bounds = (rule.lower, rule.upper)
    if rule.estimator != "ratio":
        return bounds
    low, high = (None if bound is None else math.log(bound) for bound in bounds)
    return low, high


def plain_metrics(tokens: list[Token], spec: CorrectionSpec, factor: float | None) -> dict[str, float]:
    known = [token for token in tokens if token.is_known]
    if not known:
        return {}
    rows = [[token for token in known if token.row == row] for row in sorted({token.row for token in known})]
    newest = {"kept_fraction": sum(token.is_kept for token in tokens) / len(tokens), **_policies(known, rows)}
    guide = {
        f"mismatch_{name}": value for name, value in newest.items() if not name.startswith(("chi2", "kept", "rejected"))
    }
    if spec.weight is not None:
        own, older = _weight_metrics(known, rows, spec)
        newest |= own | ({} if factor is None else {"rollout_is_batch_norm_factor": factor})
        guide |= older
    own, older = _rule_metrics(known, rows, spec)
    return {f"rollout_corr/{name}": value for name, value in (newest | own).items()} | {
        f"mismatch/{name}": value for name, value in (guide | older).items()
    }


def _exp(value: float) -> float:
    return math.exp(value) if value < 709.0 else math.inf


def _policies(known: list[Token], rows: list[list[Token]]) -> dict[str, float]:
    train = [mean(token.train for token in row) for row in rows]
    rollout = [mean(token.rollout for token in row) for row in rows]
    gap = [b - a for a, b in zip(train, rollout, strict=True)]
    k3 = [_exp(token.log_ratio) - 1.0 - token.log_ratio for token in known]
    sums = [math.fsum(token.log_ratio for token in row) for row in rows]
    return {
        "training_ppl": mean(_exp(-a) for a in train),
        "training_log_ppl": mean(-a for a in train),
        "rollout_ppl": mean(_exp(-b) for b in rollout),
        "rollout_log_ppl": mean(-b for b in rollout),
        "kl": mean(-token.log_ratio for token in known),
        "k3_kl": mean(k3),
        "log_ppl_diff": mean(gap),
        "log_ppl_abs_diff": mean(abs(d) for d in gap),
        "log_ppl_diff_max": max(gap),
        "log_ppl_diff_min": min(gap),
        "ppl_ratio": mean(_exp(d) for d in gap),
        "chi2_token": mean(math.exp(2.0 * clamp(token.log_ratio, -LIMIT, LIMIT)) for token in known) - 1.0,
        "chi2_seq": mean(math.exp(2.0 * clamp(s, -LIMIT, LIMIT)) for s in sums) - 1.0,
    }


def _spread(values: list[float]) -> float:
    """The biased deviation."""
    centre = mean(values)
    return math.sqrt(mean((value - centre) ** 2 for value in values))


def _sample_size(values: list[float]) -> float:
    total, squares = math.fsum(values), math.fsum(value * value for value in values)
    return total * total / squares / len(values) if squares else 0.0


def _of_rows(values: list[float], prefix: str, centre: float) -> dict[str, float]:
    middle = mean(values)
    squares = math.fsum((value - middle) ** 2 for value in values)
    return {
        f"{prefix}_seq_mean": middle,
        f"{prefix}_seq_std": math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else 0.0,
        f"{prefix}_seq_max": max(values),
        f"{prefix}_seq_min": min(values),
        f"{prefix}_seq_max_deviation": max(abs(value - centre) for value in values),
    }


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _weight_metrics(
    known: list[Token], rows: list[list[Token]], spec: CorrectionSpec
) -> tuple[dict[str, float], dict[str, float]]:
    low, high = spec.weight_bounds
    by_token = spec.weight in ("token", "segment")
    metrics: dict[str, float] = {}
    kinds = {
        "rollout_is": [token.bounded for token in known],
        "rollout_is_raw": [token.raw for token in known],
        "rollout_is_applied": [token.applied if token.is_kept else 0.0 for token in known],
    }
    for prefix, values in kinds.items():
        metrics |= {f"{prefix}_mean": mean(values), f"{prefix}_max": max(values), f"{prefix}_min": min(values)}
        metrics |= {f"{prefix}_std": _spread(values), f"{prefix}_eff_sample_size": _sample_size(values)}
    if spec.weight != "token":
        logs = [token.log_weight for token in known]
        metrics["rollout_is_max"] = math.exp(min(max(logs), LIMIT))
        metrics["rollout_is_min"] = math.exp(max(min(logs), -LIMIT))
    metrics |= _of_rows([mean(token.bounded for token in row) for row in rows], "rollout_is", 1.0)
    raw_means = [mean(token.raw for token in row) for row in rows]
    for side, bound, sign in (("high", high, 1.0), ("low", low, -1.0)):
        if bound is None:
            continue
        beyond = [token.raw * sign > bound * sign for token in known]
        by_row = [any(token.raw * sign > bound * sign for token in row) for row in rows]
        metrics[f"rollout_is_ratio_fraction_{side}"] = mean(beyond if by_token else by_row)
        metrics[f"rollout_is_seq_fraction_{side}"] = mean(value * sign > bound * sign for value in raw_means)
    zeroes = any(rule.action == "zero_weight" for rule in spec.rules)
    if zeroes:
        metrics["rollout_is_oob_ratio"] = mean(token.bounded == 0.0 for token in known)
    for percent in (25, 50, 75, 95, 99):
        metrics[f"rollout_is_p{percent}"] = _quantile([token.raw for token in known], percent / 100)
    guide = {
        name: value for name, value in metrics.items() if not name.startswith(("rollout_is_raw", "rollout_is_applied"))
    }
    if zeroes:
        guide["rollout_is_masked_fraction"] = guide.pop("rollout_is_oob_ratio")
        guide["rollout_is_seq_masked_fraction"] = mean(any(token.bounded == 0.0 for token in row) for row in rows)
    elif high is not None:
        banded = [clamp(token.raw, low, high) for token in known]
        guide |= {"rollout_is_std": _spread(banded), "rollout_is_eff_sample_size": _sample_size(banded)}
    return metrics, guide


def _rule_metrics(
    known: list[Token], rows: list[list[Token]], spec: CorrectionSpec
) -> tuple[dict[str, float], dict[str, float]]:
    newest: dict[str, float] = {}
    guide: dict[str, float] = {}
    veto = {"rollout_is_veto_fraction": 0.0, "rollout_is_catastrophic_token_fraction": 0.0}
    by_rules: set[int] = set()
    labels: dict[str, int] = {}
    for index, rule in enumerate(spec.rules):
        if rule.action not in ("reject_token", "reject_sequence"):
            continue
        masked = {
            "masked_fraction": mean(index in token.rejecting for token in known),
            "seq_masked_fraction": mean(any(index in token.rejecting for token in row) for row in rows),
        }
        if rule.name == "veto":
            veto = {
                "rollout_is_veto_fraction": masked["seq_masked_fraction"],
                "rollout_is_catastrophic_token_fraction": mean(index in token.outside for token in known),
            }
            continue
        by_rules.add(index)
        labels[rule.label] = labels.get(rule.label, 0) + 1
        name = rule.label if labels[rule.label] == 1 else f"{rule.label}_{labels[rule.label]}"
        newest |= {f"rollout_rs_{name}_{key}": value for key, value in masked.items()}
        newest |= _measure_metrics(known, rows, index, rule, f"rollout_rs_{name}")
        if rule.estimator == "ratio" and not guide:
            guide = {f"rollout_rs_{key}": value for key, value in masked.items()}
            guide |= _ratio_metrics(known, rows, index, rule)
    if by_rules:
        newest["rollout_rs_masked_fraction"] = mean(bool(token.rejecting & by_rules) for token in known)
        newest["rollout_rs_seq_masked_fraction"] = mean(
            any(token.rejecting & by_rules for token in row) for row in rows
        )
    return newest | veto, guide | veto


def _measure_metrics(
    known: list[Token], rows: list[list[Token]], index: int, rule: Rule, prefix: str
) -> dict[str, float]:
    """A ratio's measure is −log ρ here, so that its upper bound is the lower one of the measure."""
    low, high = limits(rule)
    sign = 1.0
    if rule.estimator == "ratio":
        sign, low, high = -1.0, None if high is None else -high, None if low is None else -low
    values = [sign * token.values[index] for token in known]
    floor = 0.0 if low is None and rule.estimator in ("k2", "k3") else low
    means = [mean(sign * token.values[index] for token in row) for row in rows]
    metrics = {f"{prefix}_mean": mean(values), f"{prefix}_max": max(values), f"{prefix}_min": min(values)}
    metrics[f"{prefix}_std"] = _spread([clamp(value, floor, high) for value in values])
    metrics |= _of_rows(means, prefix, 0.0)
    for side, bound, direction in (("high", high, 1.0), ("low", low, -1.0)):
        if bound is None:
            if side == "low" and rule.estimator in ("k2", "k3"):
                metrics[f"{prefix}_fraction_low"] = 0.0
            continue
        beyond = {id(token) for token in known if sign * token.values[index] * direction > bound * direction}
        by_token = mean(id(token) in beyond for token in known)
        by_row = mean(any(id(token) in beyond for token in row) for row in rows)
        metrics[f"{prefix}_fraction_{side}"] = by_token if rule.level in ("token", "segment") else by_row
        metrics[f"{prefix}_seq_fraction_{side}"] = mean(value * direction > bound * direction for value in means)
    return metrics


def _ratio_metrics(known: list[Token], rows: list[list[Token]], index: int, rule: Rule) -> dict[str, float]:
    def ratio(token: Token) -> float:
        return math.exp(clamp(token.values[index], -LIMIT, LIMIT))

    values = [ratio(token) for token in known]
    banded = [clamp(value, rule.lower, rule.upper) for value in values]
    means = [mean(ratio(token) for token in row) for row in rows]
    metrics = {"rollout_rs_mean": mean(values), "rollout_rs_max": max(values), "rollout_rs_min": min(values)}
    metrics |= {"rollout_rs_std": _spread(banded), "rollout_rs_eff_sample_size": _sample_size(banded)}
    metrics |= _of_rows(means, "rollout_rs", 1.0)
    for side, bound, direction in (("high", rule.upper, 1.0), ("low", rule.lower, -1.0)):
        if bound is None:
            continue
        by_token = mean(value * direction > bound * direction for value in values)
        by_row = mean(any(ratio(token) * direction > bound * direction for token in row) for row in rows)
        by_tokens = rule.level != "sequence"
        metrics[f"rollout_rs_ratio_fraction_{side}"] = by_token if by_tokens else by_row
        metrics[f"rollout_rs_seq_fraction_{side}"] = mean(value * direction > bound * direction for value in means)
    return metrics
