"""Reads the folders of an alignment for its reports: each run's configuration, settings, counts and seconds.

Contract: reads ``config.yaml``, ``run.json``, ``ledger.json`` and ``recording.json``, and never fails: an unreadable
file counts as empty, and a line of ``problems`` says why. ``run.json`` may hold ``settings`` (read back by the run) and
``packages``; of the run that recorded, its recording has both. A file is read again only where it has changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import yaml

from mock_scheduler.errors import MockSchedulerError
from mock_scheduler.recording.contract import ContractField
from mock_scheduler.recording.manifest import load_manifest
from mock_scheduler.recording.storage import open_storage
from mock_scheduler.support.digests import JSON, iterate_leaves
from mock_scheduler.support.run_files import CONFIG_FILE, LEDGER_FILE, RUN_FILE

_FILES = (CONFIG_FILE, RUN_FILE, LEDGER_FILE)
_SECONDS = ("wall_s", "rollout_s", "train_s", "validation_s")
_NUM_KEPT = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """The contents of one run's folder.

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
        return RecordingFacts(problems=("no recording is known",))
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
        seconds={name: float(value) for name in _SECONDS if isinstance(value := run.get(name), int | float)},
        settings=_texts(run.get("settings")),
        packages=_texts(run.get("packages")),
        problems=tuple(problems),
    )


def _read(path: Path, problems: list[str]) -> Mapping[str, JSON]:
    """Read a file's object; without one, return an empty object and add a line to ``problems``."""
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text) if path.name == CONFIG_FILE else json.loads(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
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
