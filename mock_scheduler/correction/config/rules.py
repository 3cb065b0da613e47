"""Defines the one model of rollout correction: a level of importance weights, and a list of rules.

Contract: plain values, checked when they are made; imports no torch. Every configuration of ``rollout_correction``,
whatever its keys, and every preset compiles to a ``CorrectionSpec``, the only form known to the engine.

With ℓ = log π_train − log π_rollout of a token and ρ = exp(ℓ), a rule *measures* each unit of its level (the token, the
segment, which is one turn, or the sequence) by an estimator that is aggregated over the unit's response tokens, and
*acts* on units whose measure is outside [lower, upper], both inclusive.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import model_validator

from mock_scheduler.config.base import ConfigSection
from mock_scheduler.config.problems import Problem, raise_keyed
from mock_scheduler.correction.config.thresholds import Number
from mock_scheduler.correction.verl.releases import BEHAVIOURS, Behaviour, VerlRelease
from mock_scheduler.support.text import in_words

Level = Literal["token", "segment", "sequence", "geometric"]
Estimator = Literal["ratio", "k1", "k2", "k3", "prob_diff"]
Aggregation = Literal["sum", "mean", "max"]
Action = Literal["truncate", "clip", "zero_weight", "reject_token", "reject_sequence"]
Condition = Literal["always", "positive_advantage", "negative_advantage", "not_positive_advantage"]
LossType = Literal["ppo_clip", "reinforce", "ratio"]
NanPolicy = Literal["error", "reject", "ratio_one"]
Denominator = Literal["original", "kept"]
LoneSurvivor = Literal["reward", "zero"]

#: Log ratios are clamped to ± this before a weight is made of them, and where a rule says ``clamps_tokens``.
LOG_RATIO_BOUND = 20.0

_ON_WEIGHTS = ("truncate", "clip")
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_NOT_NEGATIVE = ("k2", "k3")


class Rule(ConfigSection):
    """Holds one rule of ``rollout_correction.rules``.

    ``level``: the unit. ``geometric`` is the sequence by its mean, whatever ``aggregation`` says.
    ``estimator``: ``ratio`` ρ, with products for sums and the geometric mean for means; ``k1`` −ℓ, ``k2`` ½ℓ² and
    ``k3`` e^ℓ − 1 − ℓ, three estimates of KL(rollout‖train) (joschu.net/blog/kl-approx); ``prob_diff``
    π_train − π_rollout.
    ``aggregation``: over the tokens of a unit; none is needed at level ``token``.
    ``action``: ``truncate`` cuts weights at ``upper``, ``clip`` at both bounds; ``zero_weight`` makes the unit's
    weights 0 and leaves the mask; ``reject_token`` takes the unit's tokens out of the mask, ``reject_sequence`` all
    tokens of the unit's sequence.
    ``lower``, ``upper``: inclusive, in the estimator's units, so ratios for ``ratio``; ``None`` does not limit, and
    one of the two is needed.
    ``when``: only tokens with an advantage of this sign, or units by the sign of their sum of advantages.
    ``reverse``: measure with −ℓ in the place of ℓ, as AReaL does: ratio 1/ρ, k1 +ℓ, k3 e^−ℓ − 1 + ℓ, μ − π_train.
    ``clamps_tokens``: clamp each ℓ to ±20 before it is aggregated, as verl's options with k1, k2 and k3 do.
    ``name``: in metrics, of letters, digits, ``_``, ``.`` and ``-``; made of the fields where empty. Not ``veto``,
    ``rollout_is`` or ``seq``, nor one that makes the metrics of another rule.
    """

    level: Level
    action: Action
    estimator: Estimator = "ratio"
    aggregation: Aggregation = "sum"
    lower: Number | None = None
    upper: Number | None = None
    when: Condition = "always"
    reverse: bool = False
    clamps_tokens: bool = False
    name: str = ""

    @model_validator(mode="after")
    def _check(self) -> Rule:
        problems = _rule_problems(self)
        if problems:
            raise_keyed("Rule", problems, self.model_dump())
        return self

    @property
    def effective_aggregation(self) -> Aggregation:
        """The aggregation at this level: always the mean at ``geometric``, and none but the sum at ``token``."""
        return "mean" if self.level == "geometric" else "sum" if self.level == "token" else self.aggregation

    @property
    def label(self) -> str:
        """Returns the rule's name in metrics."""
        if self.name:
            return self.name
        unit = self.level if self.level in ("token", "geometric") else f"{self.level}_{self.aggregation}"
        return f"{unit}_{self.estimator}"

    @property
    def rejects(self) -> bool:
        """Whether it changes the mask."""
        return self.action in ("reject_token", "reject_sequence")

    def limits_weights_of(self, level: Level | None) -> bool:
        """Whether its bounds are bounds of the weights of this level."""
        on_weights = self.action in (*_ON_WEIGHTS, "zero_weight")
        return on_weights and self.level == level and self.estimator == "ratio" and not self.reverse

    def describe(self) -> str:
        """Returns ``reject sequences whose ratio (geometric mean) is outside [0.999, 1.001]``."""
        subject = {"token": "tokens", "segment": "turns"}.get(self.level, "sequences")
        measure = in_words(self.estimator) + (" of the reverse direction" if self.reverse else "")
        if self.level != "token":
            words = {"sum": "product", "mean": "geometric mean", "max": "maximum"}
            of_ratio = self.estimator == "ratio"
            measure += f" ({words[self.effective_aggregation] if of_ratio else self.effective_aggregation})"
        least = "0" if self.estimator in ("ratio", *_NOT_NEGATIVE) else "-inf"
        bounds = f"[{_bound(self.lower, least)}, {_bound(self.upper, 'inf')}]"
        condition = "" if self.when == "always" else f" where the advantage is {self.when.split('_advantage')[0]}"
        if self.action == "truncate":
            return f"truncate weights at {_bound(self.upper, 'inf')}"
        if self.action == "clip":
            return f"clip weights to {bounds}"
        if self.action == "zero_weight":
            return f"weight 0 for {subject} whose {measure} is outside {bounds}{condition}"
        whole = " (the whole sequence)" if self.action == "reject_sequence" and subject != "sequences" else ""
        return f"reject {subject}{whole} whose {measure} is outside {bounds}{condition}".replace("not_p", "not p")


def _inverted(rule: Rule) -> Rule:
    """A k1 option's rule in releases that compare −log ρ with the logarithms of its bounds."""
    if not rule.rejects or rule.estimator != "ratio" or rule.lower is None or rule.upper is None:
        return rule
    return rule.model_copy(update={"lower": 1.0 / rule.upper, "upper": 1.0 / rule.lower})


def numbered_label(rule: Rule, earlier: Sequence[str]) -> str:
    """The rule's name in metrics after rules with ``earlier`` labels: its label, or ``{label}_2`` for a second one."""
    number = 1 + sum(label == rule.label for label in earlier)
    return rule.label if number == 1 else f"{rule.label}_{number}"


def _bound(value: float | None, unlimited: str) -> str:
    return unlimited if value is None else f"{value:.12g}"


def _rule_problems(rule: Rule) -> list[Problem]:
    lower, upper = rule.lower, rule.upper
    if lower is None and upper is None:
        return [("", "has neither lower nor upper, and would do nothing; give at least one")]
    problems: list[Problem] = []
    if lower is not None and upper is not None and lower > upper:
        problems.append(("lower", f"is {lower:g}, above upper {upper:g}: nothing would be within"))
    for name, bound in (("lower", lower), ("upper", upper)):
        text = None if bound is None else _bound_problem(rule, name, bound)
        if text is not None:
            problems.append((name, text))
    if rule.action == "truncate" and (upper is None or lower is not None):
        problems.append(("action", "truncate has upper alone; clip has both bounds"))
    if rule.action in _ON_WEIGHTS and (rule.estimator != "ratio" or rule.when != "always" or rule.reverse):
        problems.append(
            ("action", f"{rule.action} cuts the weights themselves: estimator ratio, when always, no reverse")
        )
    if rule.level == "token" and rule.aggregation != "sum":
        text = f"{rule.aggregation} has no effect at level token, which has one token per unit; leave it out"
        problems.append(("aggregation", text))
    if rule.level == "geometric" and rule.aggregation == "max":
        problems.append(("aggregation", "max has no effect at level geometric, which is the mean; use level sequence"))
    if not _NAME.fullmatch(rule.name):
        text = f"is {rule.name!r}; a name in metrics is of letters, digits, '_', '.' and '-'"
        problems.append(("name", text))
    if rule.clamps_tokens and rule.estimator == "prob_diff":
        problems.append(("clamps_tokens", "is of log ratios, and prob_diff has none; leave it out"))
    return problems


def _bound_problem(rule: Rule, name: str, bound: float) -> str | None:
    """Why a bound cannot be meant, as everything or nothing would be beyond it; ``None`` where it can."""
    if rule.estimator == "ratio" and bound <= 0:
        return f"is {bound:g}; bounds of a ratio are above 0: leave {name} out where there is none"
    if rule.estimator in _NOT_NEGATIVE and bound <= 0:
        never = "nearly all would be above" if name == "upper" else "nothing would be below"
        return f"is {bound:g}: {rule.estimator} is never negative, so that {never}"
    sums = rule.effective_aggregation == "sum" and rule.level != "token"
    if rule.estimator == "prob_diff" and not sums and (bound >= 1 if name == "upper" else bound <= -1):
        return f"is {bound:g}: a difference of probabilities is within ± 1, so that nothing would be beyond"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionSpec:
    """Holds the compiled form of ``rollout_correction``.

    weight: the level of importance weights; ``None`` gives none. rules: all act; one rule suffices to reject.
    weight_bounds: (lower, upper), beyond which metrics count raw weights.
    batch_normalize: divide weights by their mean, over tokens at level token, else over the means of sequences.
    bypass: two policies; π_train is the policy under training, and π_old the rollout policy. Else three: π_train is
    the policy before the step's first update.
    loss_type: ``ppo_clip``; ``reinforce``, −w·A·log π; ``ratio``, −ρ·A without clipping. The last two are of bypass.
    rollout_kl_coef: τ of τ·ℓ² per response token in the loss, with gradient. rollout_kl_in_advantage: τ of A − τ·ℓ.
    nan_policy: the treatment of response tokens whose log-probability is absent or not finite.
    rs_denominator: whether rejected tokens count in the divisor of the loss.
    exclude_rejected_from_baseline: rejected trajectories are in no mean or deviation of rewards. lone_survivor: the
    advantage of the only one left of a group. max_rejected_fraction: of response tokens; more is an error.
    release, release_arguments: reproduce this release of verl, with its own names of arguments.
    """

    weight: Level | None = None
    rules: tuple[Rule, ...] = ()
    weight_bounds: tuple[float | None, float | None] = (None, None)
    batch_normalize: bool = False
    bypass: bool = False
    loss_type: LossType = "ppo_clip"
    rollout_kl_coef: float = 0.0
    rollout_kl_in_advantage: float = 0.0
    nan_policy: NanPolicy = "reject"
    rs_denominator: Denominator = "original"
    exclude_rejected_from_baseline: bool = True
    lone_survivor: LoneSurvivor = "reward"
    max_rejected_fraction: float | None = None
    release: VerlRelease | None = None
    release_arguments: Mapping[str, object] = field(default_factory=dict)

    @property
    def needs_advantages(self) -> bool:
        """Whether a rule asks for the sign of an advantage."""
        return any(rule.when != "always" for rule in self.rules)

    @property
    def needs_turns(self) -> bool:
        """Whether weights or a rule are of turns."""
        return self.weight == "segment" or any(rule.level == "segment" for rule in self.rules)

    @property
    def rejects(self) -> bool:
        """Whether a token can be rejected by a rule."""
        return any(rule.rejects for rule in self.rules)

    def _acting_rules(self) -> tuple[Rule, ...]:
        """Returns the acting rules, with their bounds as the release inverts them."""
        release = self._behaviour
        if release is None:
            return self.rules
        if release.rejects_by == "weight":
            # The veto of such a release is described with its default.
            return tuple(rule for rule in self.rules if not rule.rejects)
        return tuple(map(_inverted, self.rules)) if release.inverts_k1 else self.rules

    @property
    def _behaviour(self) -> Behaviour | None:
        return None if self.release is None else BEHAVIOURS[self.release]

    def describe_computation(self) -> str:
        """Weights and rules, with the bounds as they were understood; without the mode and the loss they are for."""
        units = {"geometric": "sequence (geometric mean)", "segment": "turn"}
        parts = [] if self.release is None else [f"as verl {self.release} does, with its bugs"]
        parts.append("no weights" if self.weight is None else f"weights per {units.get(self.weight, self.weight)}")
        parts += [rule.describe() for rule in self._acting_rules()]
        release = self._behaviour
        if release is not None and release.default_veto is not None and self.weight is not None:
            veto = next((rule.lower for rule in self.rules if rule.rejects), release.default_veto)
            parts.append(f"weight 0 for sequences with a token whose ratio is outside [{_bound(veto, '0')}, inf]")
        parts += ["weights divided by their mean"] if self.batch_normalize else []
        return "; ".join(parts)

    def describe(self) -> str:
        """Describes the whole specification in one line, with the bounds as understood."""
        parts = ["bypass (two policies)" if self.bypass else "decoupled (three policies)", f"loss {self.loss_type}"]
        parts.append(self.describe_computation())
        parts += [f"loss + {self.rollout_kl_coef:g}·log(ratio)² per token"] if self.rollout_kl_coef else []
        parts += [f"advantage - {self.rollout_kl_in_advantage:g}·log(ratio)"] if self.rollout_kl_in_advantage else []
        acting = self._acting_rules()
        if self.weight is None and not acting and not self.rollout_kl_coef and not self.rollout_kl_in_advantage:
            # A release that rejects by weights returns before it measures where it has no threshold.
            measures = self._behaviour is None or self._behaviour.rejects_by != "weight"
            parts.append("only measured" if measures else "nothing is measured")
        if self.release is None:
            parts.append(f"log-probabilities that are not finite: {in_words(self.nan_policy)}")
        if any(rule.rejects for rule in acting):
            parts.append(
                f"rejected tokens {'do not ' if self.rs_denominator == 'kept' else ''}count in the denominator"
            )
        if self.max_rejected_fraction is not None:
            parts.append(f"an error where more than {self.max_rejected_fraction:.12g} of the tokens are rejected")
        return "; ".join(parts)
