"""Fingerprints of finished runs, by which one is taken again instead of running anew.

A completed run leaves ``fingerprint.json`` in its folder, a sealed document (``digests.seal``) with

- ``format_version`` and ``elapsed_s``, the seconds it took;
- ``keys``: everything with an effect on its results, by dotted names: ``config.*`` (its whole checked configuration but
  for its labels), ``entry``, ``code.*`` (versions of all packages, and by file the SHA-256 of every source file of
  the project and of the entry's package), ``machine.*`` (processor, instruction set and GPUs decide the last bits),
  ``environ.*`` (of a value that no file may show the ``keyed_digest``), and a digest of each folder it reads: the
  ``recording`` it replays, the ``checkpoint`` it goes on from, the traces whose tensors are put into it (``graft``,
  ``initial_state`` with what ``start`` has beside it);
- ``files``: size and SHA-256 of each file it left, by path; for a safetensors file the SHA-256 of the header, since
  every tensor has its own digest there. A recording run has the recording among them;
- ``maker``: the ``keyed_digest`` of all that under the key of the user whose run it was.

Contract: a run is taken again only where its keys are the wanted ones and its files have not changed since; else
``find_cached`` names the difference. So it is where a file that the run itself loaded (``loaded_code``) is another one
now, wherever it lies. A digest in a file that a stranger wrote proves nothing, so a run counts as finished by its
``maker`` alone, and links in its folder are not followed. An interrupted run has no fingerprint. Nothing is removed
here.
"""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated

from pydantic import Field

from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.alignment.runs.folder_digests import describe_run_files
from mock_scheduler.config.base import Decides
from mock_scheduler.determinism.settings import is_documented
from mock_scheduler.program import RunConfig
from mock_scheduler.support.digests import JSON, canonical_json, compute_json_digest, iterate_leaves, open_sealed, seal
from mock_scheduler.support.documents import Document
from mock_scheduler.support.files import save_json
from mock_scheduler.support.foreign_files import read_bytes
from mock_scheduler.support.loaded_code import find_changed_code
from mock_scheduler.support.local_key import keyed_digest
from mock_scheduler.support.run_files import JOB_FOLDER
from mock_scheduler.support.text import list_some, shorten

FINGERPRINT_FILE = "fingerprint.json"
FORMAT_VERSION = 4
_NUM_NAMED = 3
_MAX_SHOWN = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """Holds everything with an effect on the results of a run."""

    keys: Mapping[str, JSON]

    @property
    def digest(self) -> str:
        """Returns SHA-256 (hex) of the keys."""
        return compute_json_digest(self.keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    """Holds the file without its version."""

    elapsed_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    keys: dict[str, JSON]
    files: dict[str, JSON]
    maker: str


_DOCUMENT = Document[_Stored](_Stored)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reusable:
    """Holds a finished run to take again; ``elapsed_s``: how long it took when it ran."""

    elapsed_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class NotReusable:
    """A run to start; ``reason``: why it has to run; ``was_there``: whether an earlier one lies in its folder.

    ``is_foreign``: by its keys it would be taken again, had this user made it; its files were not looked at.
    """

    reason: str
    was_there: bool = True
    is_foreign: bool = False


def compute_fingerprint(
    run: PlannedRun,
    *,
    code: Mapping[str, JSON],
    machine: Mapping[str, str],
    environ: Mapping[str, str],
    read: Mapping[str, str],
) -> Fingerprint:
    """Computes the fingerprint of a planned run.

    Args:
        run: the run, with its checked configuration.
        code: digests of its sources, by file where there are several.
        machine: facts about the machine where it runs.
        environ: the settings it is started with.
        read: digests of the folders it reads, by their use.
    """
    values = dict(iterate_leaves(run.config.model_dump(mode="json")))
    effects = run.program.effects(run.config)
    # The text of a label decides nothing; the content of a folder that is read is in ``read``.
    leaves = {
        f"config.{key}": keyed_digest(canonical_json(value)) if key in secret_keys(run.config) else value
        for key, value in values.items()
        if Decides.LABEL not in effects.of(key)
    }
    versions = {f"code.{name}": version for name, version in run.versions.items()}
    keys: dict[str, JSON] = {
        **leaves,
        "entry": run.entry,
        **versions,
        "code.packages": dict(run.packages),
        **{f"code.{name}": value for name, value in code.items()},
        **{f"machine.{name}": value for name, value in machine.items()},
        **{f"environ.{name}": value for name, value in environ.items()},
        **read,
    }
    return Fingerprint(keys=keys)


def secret_keys(config: RunConfig) -> frozenset[str]:
    """Names the dotted keys with values that no file may show: texts out of the environment, unknown variables."""
    found = config.environment_texts.texts
    dotted = (takewhile(lambda part: isinstance(part, str), path) for path in found)
    unknown = (f"system_envs.{name}" for name in config.system_envs if not is_documented(name))
    return frozenset({*(".".join(map(str, path)) for path in dotted), *unknown})


def save_fingerprint(
    run_dir: Path, fingerprint: Fingerprint, *, elapsed_s: float, recording_dir: Path | None = None
) -> None:
    """Writes the fingerprint of a run just completed, with its files.

    ``recording_dir``: the recording it made; ``None`` where it replayed. Raises ``OSError``.
    """
    document: dict[str, JSON] = {
        "format_version": FORMAT_VERSION,
        "elapsed_s": elapsed_s,
        "keys": dict(fingerprint.keys),
        "files": describe_run_files(run_dir, recording_dir),
    }
    document["maker"] = _sign(document)
    save_json(run_dir / FINGERPRINT_FILE, seal(document))


def find_cached(
    run_dir: Path, fingerprint: Fingerprint, *, recording_dir: Path | None = None, takes_foreign: bool = False
) -> Reusable | NotReusable:
    """Judges whether the finished run in a folder has this ``fingerprint``, and lies there unchanged.

    ``recording_dir``: as for ``save_fingerprint``. ``takes_foreign``: whoever made it is trusted. Reads no tensors.
    """
    path = run_dir / FINGERPRINT_FILE
    # Not by ``Path``: where a folder may not be looked into, that raises.
    if not os.path.isdir(run_dir):
        return NotReusable(reason="it has not run yet", was_there=False)
    if not os.path.isfile(path):
        return NotReusable(
            reason=f"there is no {FINGERPRINT_FILE}: the run did not complete, or its files were changed"
        )
    try:
        document = open_sealed(read_bytes(path, inside=run_dir, what="a fingerprint"))
    except (OSError, ValueError) as error:
        return NotReusable(reason=f"{FINGERPRINT_FILE} {error}")
    if document.get("format_version") != FORMAT_VERSION:
        return NotReusable(
            reason=f"{FINGERPRINT_FILE} has version {shorten(repr(document.get('format_version')), 40)}, "
            f"expected {FORMAT_VERSION}"
        )
    try:
        stored = _DOCUMENT.load(document)
    except ValueError as error:
        return NotReusable(reason=f"{FINGERPRINT_FILE} is damaged: {error}")
    changes = _describe_changes(stored.keys, fingerprint.keys)
    if changes:
        return NotReusable(reason=list_some(changes, _NUM_NAMED))
    # Before any file is read that the run names: a stranger's would say how much of the machine is looked through.
    if not takes_foreign and not hmac.compare_digest(_sign(document).encode(), stored.maker.encode()):
        return NotReusable(reason="another user, or this one on another machine, made it", is_foreign=True)
    try:
        changes = _find_changed_files(run_dir, stored, recording_dir)
    except OSError as error:
        changes = [f"{error.filename or run_dir} cannot be read: {error.strerror or error}"]
    return NotReusable(reason=list_some(changes, _NUM_NAMED)) if changes else Reusable(elapsed_s=stored.elapsed_s)


def _find_changed_files(run_dir: Path, stored: _Stored, recording_dir: Path | None) -> list[str]:
    """Says why the files are not those that the run left, or not of the code that lies here now."""
    found = [path.relative_to(run_dir) for path in sorted(run_dir.rglob("*")) if path.is_symlink()]
    # A cluster keeps links beside its logs, of which nothing is evidence.
    links = [f"{path} is a link" for path in found if path.parts[0] != JOB_FOLDER or len(path.parts) == 1]
    return (
        links
        or find_changed_code(run_dir)
        or _describe_damage(stored.files, describe_run_files(run_dir, recording_dir))
    )


def _sign(document: Mapping[str, JSON]) -> str:
    return keyed_digest(canonical_json({name: value for name, value in document.items() if name != "maker"}))


def _describe_changes(stored: Mapping[str, JSON], wanted: Mapping[str, JSON]) -> list[str]:
    changes = []
    for key in dict.fromkeys([*stored, *wanted]):
        if key not in stored or key not in wanted or stored[key] != wanted[key]:
            files = [keys.get(key) for keys in (stored, wanted)]
            if isinstance(files[0], dict) and isinstance(files[1], dict):
                changes.append(f"{key} has changed: {_name_files(files[0], files[1])}")
                continue
            before, now = (_show(keys, key) for keys in (stored, wanted))
            is_digest = all(re.fullmatch("[0-9a-f]{64}", text) for text in (before, now))
            changes.append(f"{key} has changed" if is_digest else f"{key} was {before} and is {now}")
    return changes


def _name_files(stored: Mapping[str, JSON], wanted: Mapping[str, JSON]) -> str:
    """Names some of the files with different digests, and counts the others."""
    names = [name for name in sorted({*stored, *wanted}) if stored.get(name) != wanted.get(name)]
    states = {name: " (new)" if name not in stored else " (gone)" if name not in wanted else "" for name in names}
    return list_some([f"{name}{states[name]}" for name in names], _NUM_NAMED, ", ")


def _show(keys: Mapping[str, JSON], key: str) -> str:
    return shorten(str(keys[key]), _MAX_SHOWN) if key in keys else "not set"


def _describe_damage(stored: Mapping[str, JSON], present: Mapping[str, JSON]) -> list[str]:
    gone = [f"{name} is gone" for name in stored if name not in present]
    new = [f"{name} is new since the run completed" for name in present if name not in stored]
    changed = [
        f"{name} has changed since the run completed"
        for name in stored
        if name in present and stored[name] != present[name]
    ]
    return [*gone, *changed, *new]
