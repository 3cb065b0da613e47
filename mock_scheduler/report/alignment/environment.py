"""A candidate's environment beside the baseline's: configuration, settings read back, versions, contract and counts.

Contract: plain data out of folders. Differences come first; equal values are counted. Keys that only place files,
and keys of the alignment itself, are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from mock_scheduler.recording.contract import Rule
from mock_scheduler.report.alignment.folders import RecordingFacts, RunFacts
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.text import count_of, shorten

MAX_LISTED = 100

_VALUE_WIDTH = 160
#: Keys by which every candidate differs from its baseline.
_OWN_KEYS = ("exp_name", "output_dir", "checkpoint_config.", "rollout_mock.", "align.")
_CATEGORIES = (
    ("built", "built"),
    ("suppressed", "suppressed: had no effect"),
    ("answered", "answered from the recording"),
    ("called", "reached the real scheduler"),
    ("recording", "done with the recording"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueDifference:
    """One name whose values differ; a side that has none is ``missing``. rule: of the contract, empty where it has no
    such field."""

    name: str
    baseline: str
    candidate: str
    rule: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentView:
    """A candidate's environment.

    config, settings, packages: differences from the baseline. num_config, num_settings, num_packages: equal ones.
    breaches: differences in fields of the contract under MUST_MATCH. num_must_match: all such fields, without which no
    replay starts. ledger: by category, counts by name. notes: gaps in this account.
    """

    config: tuple[ValueDifference, ...]
    settings: tuple[ValueDifference, ...]
    packages: tuple[ValueDifference, ...]
    num_config: int
    num_settings: int
    num_packages: int
    breaches: tuple[str, ...]
    num_must_match: int
    ledger: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def compare_environments(baseline: RunFacts, candidate: RunFacts, recording: RecordingFacts) -> EnvironmentView:
    """A candidate's folder beside the baseline's and the recording that both trained on."""
    rules = {field.name: field.rule.value.replace("_", " ") for field in recording.contract}
    config = _differences(_kept(baseline.config), _kept(candidate.config), rules)
    # The contract names settings that must match with a prefix.
    rules |= {
        name.removeprefix("determinism."): rule for name, rule in rules.items() if name.startswith("determinism.")
    }
    settings = _differences(baseline.settings or recording.settings, candidate.settings, rules)
    packages = _differences(baseline.packages or recording.packages, candidate.packages, {})
    must_match = [field for field in recording.contract if field.rule is Rule.MUST_MATCH]
    must = Rule.MUST_MATCH.value.replace("_", " ")
    return EnvironmentView(
        config=config,
        settings=settings if candidate.settings else (),
        packages=packages if candidate.packages else (),
        num_config=_num_equal(_kept(baseline.config), _kept(candidate.config)),
        num_settings=_num_equal(baseline.settings or recording.settings, candidate.settings),
        num_packages=_num_equal(baseline.packages or recording.packages, candidate.packages),
        breaches=tuple(item.name for item in (*config, *settings) if item.rule == must and candidate.config),
        num_must_match=len(must_match),
        ledger=describe_ledger(candidate),
        notes=_notes(candidate, recording, num_must_match=len(must_match)),
    )


def describe_ledger(facts: RunFacts) -> tuple[tuple[str, str], ...]:
    """List a run's built, called, answered and suppressed calls, as a label and ``get_batch 4, close 1`` each."""
    return tuple(
        (label, ", ".join(f"{name} {count:,}" for name, count in facts.ledger[category].items()) or "nothing")
        for category, label in _CATEGORIES
        if category in facts.ledger
    )


def _notes(candidate: RunFacts, recording: RecordingFacts, *, num_must_match: int) -> tuple[str, ...]:
    notes = [*candidate.problems, *recording.problems]
    if candidate.config and not candidate.settings:
        held = f"; it started only because {count_of(num_must_match, 'field')} of the contract matched"
        notes.append(f"its run.json has no settings read back{held if num_must_match else ''}")
    return tuple(notes)


def _kept(config: Mapping[str, JSON]) -> dict[str, JSON]:
    return {key: value for key, value in config.items() if not key.startswith(_OWN_KEYS)}


def _differences(
    baseline: Mapping[str, JSON] | Mapping[str, str],
    candidate: Mapping[str, JSON] | Mapping[str, str],
    rules: Mapping[str, str],
) -> tuple[ValueDifference, ...]:
    """Names whose values differ, in the baseline's order; none where a side has nothing at all."""
    if not baseline or not candidate:
        return ()
    found = []
    for name in dict.fromkeys([*baseline, *candidate]):
        texts = [_show(side[name]) if name in side else "missing" for side in (baseline, candidate)]
        if texts[0] != texts[1]:
            found.append(
                ValueDifference(
                    name=name,
                    baseline=shorten(texts[0], _VALUE_WIDTH),
                    candidate=shorten(texts[1], _VALUE_WIDTH),
                    rule=rules.get(name, ""),
                )
            )
    return tuple(found)


def _num_equal(
    baseline: Mapping[str, JSON] | Mapping[str, str], candidate: Mapping[str, JSON] | Mapping[str, str]
) -> int:
    return sum(_show(value) == _show(candidate[name]) for name, value in baseline.items() if name in candidate)


def _show(value: JSON) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
