"""Checks ``rollout_correction`` for contradictions, keys without effect and clashing names of rules, and writes notes.

Contract: pure functions from keys and rules to every problem, each with its key, and to notes on older keys and
surprising effects; none raises or logs. A rejecting rule has the metrics ``rollout_rs_{name}_…``, among them ``…_mean``
and ``…_seq_mean``; a second rule of one label is ``{label}_2``.
"""

from __future__ import annotations

from collections.abc import Sequence

from mock_scheduler.config.problems import Problem
from mock_scheduler.correction.config.keys import CorrectionKeys
from mock_scheduler.correction.config.presets import PRESETS
from mock_scheduler.correction.config.rules import CorrectionSpec, Rule, numbered_label
from mock_scheduler.correction.config.thresholds import UNLIMITED, parse_ratio_band, split_thresholds
from mock_scheduler.correction.config.verl_keys import NEWER_OPTIONS, VETO, WEIGHTS, never_rejects
from mock_scheduler.correction.verl.releases import BEHAVIOURS, IN_PLACE_OF, VerlRelease

_DEFAULT_THRESHOLD = 2.0
#: Keys that act outside of a release's computation, and so may stand beside ``verl_compat``.
_BESIDE_RELEASES = (
    *("preset", "verl_compat", "rs_denominator", "exclude_rejected_from_baseline", "lone_survivor"),
    "max_rejected_fraction",
)
#: Reserved name of a rule -> the rule, or the metric, that has it already.
_RESERVED = {
    VETO: "the rule of rollout_token_veto_threshold",
    WEIGHTS: "the rule of rollout_is_threshold",
    "seq": "rollout_rs_seq_masked_fraction, which is of all rules together",
}


def section_problems(section: CorrectionKeys) -> list[Problem]:
    """Finds every problem of the keys together; a threshold by itself is checked by the rule made of it."""
    problems = _loss_problems(section) + _idle_key_problems(section) + _rejection_problems(section)
    return problems if section.verl_compat is None else problems + _release_problems(section, section.verl_compat)


def _loss_problems(section: CorrectionKeys) -> list[Problem]:
    problems: list[Problem] = []
    meant = {True: "reinforce", False: "ppo_clip", None: section.loss_type}[section.use_policy_gradient]
    if section.loss_type != meant:
        given = str(section.use_policy_gradient).lower()
        text = f"{given} is loss_type {meant}, and loss_type is {section.loss_type}; give one of them"
        problems.append(("use_policy_gradient", text))
    elif section.loss_type != "ppo_clip" and not section.bypass_mode:
        key, given = (
            ("use_policy_gradient", "true") if section.use_policy_gradient else ("loss_type", section.loss_type)
        )
        problems.append((key, f"{given} is a loss of two policies; set bypass_mode true"))
    if section.rollout_kl_in_advantage > 0 and section.loss_type != "reinforce":
        text = (
            f"is {section.rollout_kl_in_advantage:g}, and belongs to loss_type reinforce, whose advantage has no ratio "
            f"beside it; loss_type is {section.loss_type}"
        )
        problems.append(("rollout_kl_in_advantage", text))
    return problems


def _idle_key_problems(section: CorrectionKeys) -> list[Problem]:
    idle: dict[str, str] = {}
    if section.rollout_is is None:
        given = {
            "rollout_is_threshold": section.rollout_is_threshold not in (None, _DEFAULT_THRESHOLD),
            "rollout_is_threshold_lower": section.rollout_is_threshold_lower is not None,
            "rollout_is_mode": section.rollout_is_mode is not None,
            "rollout_is_batch_normalize": section.rollout_is_batch_normalize,
        }
        idle |= {key: "rollout_is" for key, is_given in given.items() if is_given}
    if section.rollout_rs is None:
        given = {
            "rollout_rs_threshold": section.rollout_rs_threshold is not None,
            "rollout_rs_threshold_lower": section.rollout_rs_threshold_lower is not None,
        }
        idle |= {key: "rollout_rs" for key, is_given in given.items() if is_given}
    return [
        (key, f"is {_value(section, key)} and has no effect without {switch}; set {switch}, or leave it out")
        for key, switch in idle.items()
    ]


def _rejection_problems(section: CorrectionKeys) -> list[Problem]:
    """Finds keys on the treatment of rejected tokens where nothing can be rejected, or where they decide nothing."""
    problems: list[Problem] = []
    about = {
        "rs_denominator": section.rs_denominator != "original",
        "exclude_rejected_from_baseline": not section.exclude_rejected_from_baseline,
        "lone_survivor": section.lone_survivor != "reward",
        "max_rejected_fraction": section.max_rejected_fraction is not None,
    }
    given = [key for key, is_given in about.items() if is_given]
    can_reject = (
        section.rollout_rs is not None
        or section.rollout_token_veto_threshold is not None
        or any(rule.rejects for rule in section.rules)
        or section.nan_policy == "reject"
    )
    if not can_reject:
        return [
            (key, f"is {_value(section, key)}, and nothing here rejects; set rollout_rs or a rule that rejects")
            for key in given
        ]
    if section.bypass_mode:
        problems += [
            (
                key,
                f"is {_value(section, key)} and has no effect with bypass_mode: tokens are rejected update by update, "
                "after advantages",
            )
            for key in given
            if key in ("exclude_rejected_from_baseline", "lone_survivor")
        ]
    elif section.lone_survivor == "zero" and not section.exclude_rejected_from_baseline:
        text = "is zero and has no effect with exclude_rejected_from_baseline false, which leaves nobody alone"
        problems.append(("lone_survivor", text))
    if section.max_rejected_fraction == 1.0:
        problems.append(("max_rejected_fraction", "is 1, and no more than all can be rejected; leave it out"))
    return problems


def _release_problems(section: CorrectionKeys, release: VerlRelease) -> list[Problem]:
    """Finds keys missing from the release, and values foreign to it."""
    behaviour = BEHAVIOURS[release]
    problems = [
        (key, _describe_absent(section, key, release))
        for key, field in type(section).model_fields.items()
        if key not in (*behaviour.keys, *_BESIDE_RELEASES)
        and not (key == "loss_type" and section.use_policy_gradient)  # which is named instead
        and _value_of(section, key) != field.get_default(call_default_factory=True)
    ]
    if section.rollout_is not in (None, *behaviour.levels):
        text = f"is {section.rollout_is}; verl_compat {release} has {', '.join(behaviour.levels)}"
        problems.append(("rollout_is", text))
    if section.loss_type == "ratio" and "loss_type" in behaviour.keys:
        problems.append(("loss_type", f"is ratio; verl_compat {release} has ppo_clip, reinforce"))
    threshold = section.rollout_is_threshold
    is_text = isinstance(threshold, str) and threshold != UNLIMITED
    if is_text and not behaviour.text_bounds and section.rollout_is is not None:
        problems.append(("rollout_is_threshold", f"is {threshold!r}; verl_compat {release} takes one number"))
    if behaviour.rejects_by == "ratio":
        if isinstance(section.rollout_rs_threshold, str):
            text = f"is {section.rollout_rs_threshold!r}; verl_compat {release} takes one number, and a lower one"
            problems.append(("rollout_rs_threshold", f"{text} as rollout_rs_threshold_lower"))
        if section.rollout_rs is not None and "," in section.rollout_rs:
            problems.append(("rollout_rs", f"is {section.rollout_rs!r}; verl_compat {release} takes one option"))
    return problems


def _describe_absent(section: CorrectionKeys, key: str, release: VerlRelease) -> str:
    hint = f"; {IN_PLACE_OF[key]}" if key in IN_PLACE_OF else "; leave it out"
    is_of_preset = section.preset is not None and key in PRESETS[section.preset].values
    origin = f" by preset {section.preset}" if is_of_preset else ""
    shown = "is given" if key == "rules" else f"is {_value(section, key)}"
    return f"{shown}{origin}, and verl_compat {release} reproduces a release that has no such key{hint}"


def _value_of(section: CorrectionKeys, key: str) -> object:
    return dict(section)[key]


def _value(section: CorrectionKeys, key: str) -> str:
    value = _value_of(section, key)
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else repr(value)


def name_problems(of_keys: Sequence[Rule], rules: Sequence[Rule]) -> list[Problem]:
    """Finds rules with a reserved name or with another rule's metrics; ``of_keys``: the rules of other keys, first."""
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
