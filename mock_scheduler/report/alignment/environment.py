"""Reads the folders of an alignment's runs for its reports, and sets a candidate's environment beside the baseline's.

Contract: differences come first, equal values are counted, and keys of file places or of the alignment itself are left
out. Reads ``config.yaml``, ``run.json``, ``ledger.json`` and ``recording.json``, and never fails: an unreadable
file counts as empty, and a line of ``problems`` says why. ``run.json`` may hold ``settings`` (read back by the run) and
``packages``; the recording has both of the recording run. A file is read again only where it has changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from mock_scheduler.errors import MockSchedulerError
from mock_scheduler.recording.contract import ContractField, Rule
from mock_scheduler.recording.manifest import load_manifest
from mock_scheduler.recording.storage import open_storage
from mock_scheduler.support.digests import JSON, iterate_leaves
from mock_scheduler.support.foreign_files import read_text
from mock_scheduler.support.run_files import CONFIG_FILE, LEDGER_FILE, RUN_FILE
from mock_scheduler.support.text import count_of, in_words, is_real, on_one_line, shorten
from mock_scheduler.support.yaml_text import load_yaml

_FILES = (CONFIG_FILE, RUN_FILE, LEDGER_FILE)
_SECONDS = ("wall_s", "rollout_s", "train_s", "validation_s")
_NUM_KEPT = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Holds the contents of one run's folder.

    config: by dotted key. ledger: counts by category and name. seconds: by name as in ``run.json``. settings, packages:
    by name, as text. problems: unreadable files, and why.
    """

    config: Mapping[str, JSON] = field(default_factory=dict)
    ledger: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingFacts:
    """A recording's account of the run behind it, and its demands on every replay."""

    contract: tuple[ContractField, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    facts: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def load_run_facts(folder: Path) -> RunFacts:
    """Load a run's folder; a missing file counts as empty."""
    return _load_run(folder, tuple(_stamp(folder / name) for name in _FILES))


def load_recording_facts(folder: Path | None) -> RecordingFacts:
    """Load a recording's ``recording.json``; empty where there is none."""
    if folder is None:
        return RecordingFacts()
    try:
        manifest = load_manifest(open_storage(str(folder)))
    except (MockSchedulerError, OSError) as error:
        return RecordingFacts(problems=(str(error),))
    provenance = manifest.provenance
    stated = provenance.get("facts")
    packages = _texts(provenance.get("packages"))
    packages |= {name: str(provenance[name]) for name in ("python", "platform") if provenance.get(name) is not None}
    return RecordingFacts(
        contract=manifest.contract.fields,
        settings=_texts(provenance.get("settings")),
        packages=packages,
        facts=tuple(str(fact) for fact in stated) if isinstance(stated, list) else (),
    )


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return a stamp of a file's time and size; ``None`` where there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=_NUM_KEPT)
def _load_run(folder: Path, stamps: tuple[tuple[int, int] | None, ...]) -> RunFacts:
    problems: list[str] = []
    config = _read(folder / CONFIG_FILE, problems)
    run = _read(folder / RUN_FILE, problems)
    ledger = _read(folder / LEDGER_FILE, problems)
    return RunFacts(
        config=dict(iterate_leaves(config)),
        ledger={
            category: {name: int(count) for name, count in counts.items() if isinstance(count, int)}
            for category, counts in ledger.items()
            if isinstance(counts, Mapping)
        },
        seconds={name: float(value) for name in _SECONDS if is_real(value := run.get(name))},
        settings=_texts(run.get("settings")),
        packages=_texts(run.get("packages")),
        problems=tuple(problems),
    )


def _read(path: Path, problems: list[str]) -> Mapping[str, JSON]:
    """Read a file's object; without one, return an empty object and add a line to ``problems``."""
    try:
        text = read_text(path, inside=path.parent, what="a file of a run")
        content = load_yaml(text) if path.name == CONFIG_FILE else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else on_one_line(error)
        problems.append(f"{path} cannot be read: {reason}")
        return {}
    if not isinstance(content, Mapping):
        problems.append(f"{path} holds no object")
        return {}
    return content


def _texts(value: JSON) -> dict[str, str]:
    """A mapping's values as text; ``absent`` where there is none."""
    if not isinstance(value, Mapping):
        return {}
    return {str(name): "absent" if item is None else str(item) for name, item in value.items()}


_VALUE_WIDTH = 160
#: Keys by which every candidate differs from its baseline.
_OWN_KEYS = ("exp_name", "output_dir", "checkpoint_config.", "rollout_mock.", "align.", "initial_state")
_CATEGORIES = (
    ("built", "built"),
    ("suppressed", "suppressed: had no effect"),
    ("answered", "answered from the recording"),
    ("called", "reached the real scheduler"),
    ("recording", "done with the recording"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueDifference:
    """One name with two values; a side without one is ``missing``. rule: of the contract; empty where it lacks the
    field."""

    name: str
    baseline: str
    candidate: str
    rule: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentView:
    """Holds a candidate's environment.

    config, settings, packages: differences from the baseline. num_config, num_settings, num_packages: equal ones.
    breaches: differences in fields of the contract under MUST_MATCH. num_must_match: all such fields; no replay
    starts without them. ledger: by category, counts by name. notes: gaps in this account.
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
    """Returns a candidate's folder beside the baseline's and the recording of both."""
    rules = {field.name: in_words(field.rule.value) for field in recording.contract}
    config = _differences(_kept(baseline.config), _kept(candidate.config), rules)
    # The contract names settings that must match with a prefix.
    rules |= {
        name.removeprefix("determinism."): rule for name, rule in rules.items() if name.startswith("determinism.")
    }
    settings = _differences(baseline.settings or recording.settings, candidate.settings, rules)
    packages = _differences(baseline.packages or recording.packages, candidate.packages, {})
    must_match = [field for field in recording.contract if field.rule is Rule.MUST_MATCH]
    must = in_words(Rule.MUST_MATCH.value)
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
    """List a run's built, called, answered and suppressed calls, as a label and ``get_batch 4, close 1`` each.

    Empty for a run without a scheduler, which has nothing to count.
    """
    if not any(count for counts in facts.ledger.values() for count in counts.values()):
        return ()
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
