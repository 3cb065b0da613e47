"""``rollout_correction.rules``: every message, at the place of its rule."""

from __future__ import annotations

import math

import pytest

from tests.config.correction_configs import SECTION, problems_of

TOKEN = {"rollout_is": "token"}
REJECT = {"level": "token", "action": "reject_token"}
CUT = {"level": "token", "action": "truncate"}


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (
            {"level": "turn", "action": "reject_token", "upper": 2},
            ".level: unknown value 'turn'; known values: token, segment, sequence, geometric",
        ),
        ({"action": "reject_token", "upper": 2}, ".level: is required and not given"),
        ({**REJECT, "upper": True}, ".upper: is True, of type bool; expected one number"),
        ({**REJECT, "upper": "0.5_5"}, ".upper: is '0.5_5', of type str; expected one number"),
        ({**REJECT, "upper": math.nan}, ".upper: is nan; expected a finite number"),
        (
            {**REJECT, "upper": 2, "aggregaton": "sum"},
            f".aggregaton: unknown key; nearest known key: {SECTION}.rules.0.aggregation; known keys of "
            f"{SECTION}.rules.0: action, aggregation, clamps_tokens, estimator, level, lower, name, reverse, upper, "
            "when",
        ),
        (REJECT, ": has neither lower nor upper, and would do nothing; give at least one"),
        ({**REJECT, "lower": 2, "upper": 1}, ".lower: is 2, above upper 1: nothing would be within"),
        (
            {**REJECT, "lower": 0},
            ".lower: is 0; bounds of a ratio are above 0: leave lower out where there is none",
        ),
        (
            {**REJECT, "estimator": "k3", "upper": -1},
            ".upper: is -1: k3 is never negative, so that nearly all would be above",
        ),
        (
            {**REJECT, "estimator": "k2", "lower": 0},
            ".lower: is 0: k2 is never negative, so that nothing would be below",
        ),
        (
            {**REJECT, "estimator": "prob_diff", "upper": 1},
            ".upper: is 1: a difference of probabilities is within ± 1, so that nothing would be beyond",
        ),
        (
            {**REJECT, "estimator": "prob_diff", "upper": 0.2, "clamps_tokens": True},
            ".clamps_tokens: is of log ratios, and prob_diff has none; leave it out",
        ),
        (
            {**REJECT, "upper": 2, "aggregation": "mean"},
            ".aggregation: mean has no effect at level token, which has one token per unit; leave it out",
        ),
        (
            {"level": "geometric", "action": "reject_sequence", "upper": 2, "aggregation": "max"},
            ".aggregation: max has no effect at level geometric, which is the mean; use level sequence",
        ),
        ({**CUT, "lower": 0.5, "upper": 2}, ".action: truncate has upper alone; clip has both bounds"),
        (
            {**CUT, "upper": 2, "when": "positive_advantage"},
            ".action: truncate cuts the weights themselves: estimator ratio, when always, no reverse",
        ),
        (3, ": is 3, should be a section: keys with their values"),
        ({**CUT, "upper": 1.5}, ": action truncate changes weights, and there are none: set rollout_is"),
        (
            {"level": "sequence", "action": "zero_weight", "upper": 1.5},
            ": action zero_weight changes weights, and there are none: set rollout_is",
        ),
    ],
)
def test_a_rule_that_is_wrong_is_named_by_its_place(rule: object, problem: str) -> None:
    assert problems_of({"rules": [rule]}) == [f"rules.0{problem}"]


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (
            {"level": "sequence", "action": "clip", "lower": 0.5, "upper": 1.5},
            "action clip cuts weights at level sequence; rollout_is, the level of weights, is token",
        ),
        (
            {**CUT, "upper": 2.0},
            "action truncate at 2 has no effect: rollout_is_threshold truncates at 2 already; set rollout_is_threshold "
            "inf",
        ),
    ],
)
def test_a_rule_that_cuts_no_weight_is_refused(rule: object, problem: str) -> None:
    assert problems_of({**TOKEN, "rules": [rule]}) == [f"rules.0: {problem}"]
