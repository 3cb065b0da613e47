"""``rollout_correction.rules``: every message, at the place of its rule."""

from __future__ import annotations

import math

import pytest
import torch

from mock_scheduler.correction import CorrectionInputs, compute_correction, correction_metrics
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from tests.correction.config.configs import SECTION, problems_of

TOKEN = {"rollout_is": "token"}
REJECT = {"level": "token", "action": "reject_token"}
OF_LETTERS = "a name in metrics is of letters, digits, '_', '.' and '-'"
RESERVED = {
    "veto": "which is reserved for the rule of rollout_token_veto_threshold; give another name",
    "rollout_is": "which is reserved for the rule of rollout_is_threshold; give another name",
    "seq": "which is reserved for rollout_rs_seq_masked_fraction, which is of all rules together; give another name",
}
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
        *(({**REJECT, "upper": 2, "name": name}, f".name: is {name!r}; {OF_LETTERS}") for name in ("a/b", "a b", "ä")),
        *(({**REJECT, "upper": 2, "name": name}, f".name: is {name}, {text}") for name, text in RESERVED.items()),
        (
            {"level": "token", "action": "reject_sequence", "lower": 1e-4, "name": "veto"},
            f".name: is veto, {RESERVED['veto']}",
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


def named(*names: str) -> list[dict[str, object]]:
    """Rules of these names, each of which rejects."""
    return [{**REJECT, "upper": 2.0 + index, "name": name} for index, name in enumerate(names)]


@pytest.mark.parametrize(
    ("rules", "others", "problem"),
    [
        (named("a", "a", "a_2"), {}, "rules.2.name: is a_2 in metrics, and a_2 of rules.1"),
        (named("a_2", "a", "a"), {}, "rules.2.name: is a_2 in metrics, and a_2 of rules.0"),
        (named("a", "a_seq"), {}, "rules.1.name: is a_seq in metrics, and a of rules.0"),
        (named("a_seq", "a"), {}, "rules.1.name: is a in metrics, and a_seq of rules.0"),
        (
            named("token_seq"),
            {"rollout_rs": "token", "rollout_rs_threshold": 2.0},
            "rules.0.name: is token_seq in metrics, and token of option token",
        ),
        (
            [{**REJECT, "upper": 2}, {**REJECT, "upper": 3}, *named("token_ratio_2")],
            {},
            "rules.2.name: is token_ratio_2 in metrics, and token_ratio_2 of rules.1",
        ),
    ],
)
def test_names_that_are_one_in_metrics_are_refused(
    rules: list[dict[str, object]], others: dict[str, object], problem: str
) -> None:
    """One rule's numbers replaced the other's."""
    assert problems_of({**others, "rules": rules}) == [f"{problem} has metrics of the same names; give another name"]


def test_names_that_load_give_each_rule_metrics_of_its_own() -> None:
    """Four rules, of which each has as many metrics as it has alone."""
    rules = [*named("a", "a", "b_seq", "token")]
    values = {"rollout_rs": "token", "rollout_rs_threshold": 2.0, "rollout_token_veto_threshold": 1e-4}
    ratios = torch.tensor([[0.1, 0.2, 1.0]])
    inputs = CorrectionInputs(train_logprobs=ratios, rollout_logprobs=torch.zeros(1, 3), response_mask=torch.ones(1, 3))

    def names(section: dict[str, object]) -> set[str]:
        spec = RolloutCorrectionConfig.model_validate(section).spec
        metrics = correction_metrics(compute_correction(inputs, spec).states, spec)
        return {name for name in metrics if name.startswith("rollout_corr/rollout_rs_")}

    of_all = {"rollout_corr/rollout_rs_masked_fraction", "rollout_corr/rollout_rs_seq_masked_fraction"}
    of_one = {name.removeprefix("rollout_corr/rollout_rs_a_") for name in names({"rules": named("a")}) - of_all}
    # `token` of rollout_rs has a lower bound too, and with it two fractions more.
    low = {"rollout_corr/rollout_rs_token_fraction_high", "rollout_corr/rollout_rs_token_seq_fraction_high"}
    expected = {
        f"rollout_corr/rollout_rs_{label}_{name}"
        for label in ("a", "a_2", "b_seq", "token", "token_2")
        for name in of_one
    }
    assert len(of_one) == 13
    assert names({**values, "rules": rules}) == expected | low | of_all
