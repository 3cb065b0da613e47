"""Names of rules in metrics: those of ``rules`` that would be taken for something else.

Contract: pure functions. A rule that rejects has the metrics ``rollout_rs_{name}_…``, among them ``…_mean`` and
``…_seq_mean``; a second rule of one label is ``{label}_2`` there.
"""

from __future__ import annotations

from collections.abc import Sequence

from mock_scheduler.config.problems import Problem
from mock_scheduler.correction.config.rules import Rule, numbered_label
from mock_scheduler.correction.config.verl_keys import VETO, WEIGHTS

#: Name -> what metrics have under it already.
_RESERVED = {
    VETO: "the rule of rollout_token_veto_threshold",
    WEIGHTS: "the rule of rollout_is_threshold",
    "seq": "rollout_rs_seq_masked_fraction, which is of all rules together",
}


def name_problems(of_keys: Sequence[Rule], rules: Sequence[Rule]) -> list[Problem]:
    """Each rule of ``rules`` that has a reserved name, or metrics that another rule has, after those of other keys."""
    problems: list[Problem] = [
        (f"rules.{index}.name", f"is {rule.name}, which is reserved for {_RESERVED[rule.name]}; give another name")
        for index, rule in enumerate(rules)
        if rule.name in _RESERVED
    ]
    places = [(f"option {rule.label}", rule) for rule in of_keys]
    places += [(f"rules.{index}", rule) for index, rule in enumerate(rules)]
    labels: list[str] = []
    taken: dict[str, str] = {}
    for place, rule in places:
        if not rule.rejects or rule.name in _RESERVED:
            continue
        name = numbered_label(rule, labels)
        labels.append(rule.label)
        clash = next((other for other in taken if other in (name, f"{name}_seq") or name == f"{other}_seq"), None)
        if clash is None:
            taken[name] = place
        else:
            text = (
                f"is {name} in metrics, and {clash} of {taken[clash]} has metrics of the same names; give another name"
            )
            problems.append((f"{place}.name", text))
    return problems
