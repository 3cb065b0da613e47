"""``recording.json``: the format version, whose recording this is, its contract and where it came from.

Contract: written once, as a step file is (whole or not at all, never replaced); its ``digest`` covers everything
else in it, and its bytes must be exactly those that writing its content gives, so no bit can change unnoticed.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

from mock_scheduler.errors import ContractError, RecordingError, StepNotFoundError
from mock_scheduler.recording.contract import Contract, ContractField
from mock_scheduler.recording.paths import MANIFEST_NAME
from mock_scheduler.recording.sealed import MAX_SEALED_BYTES, SealedFile
from mock_scheduler.recording.storage import Storage
from mock_scheduler.support.digests import JSON, check_json
from mock_scheduler.support.git import Repository
from mock_scheduler.support.locations import find_protocol
from mock_scheduler.support.text import list_some
from mock_scheduler.support.versions import read_package_versions

MANIFEST_FORMAT = "rollout-recording"
MANIFEST_VERSION = 1

_NUM_NEARBY = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of ``recording.json``; ``run_id`` is in every step file of the recording too."""

    run_id: str
    contract: Contract
    provenance: Mapping[str, JSON]


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredManifest:
    """A ``Manifest`` as the file has it; recordings of before there were matches have none in their contract."""

    run_id: str
    contract: tuple[ContractField, ...]
    provenance: dict[str, JSON]


_FILE = SealedFile[_StoredManifest](
    _StoredManifest, format_name=MANIFEST_FORMAT, version=MANIFEST_VERSION, noun="recording"
)


def collect_provenance(extra: Mapping[str, JSON]) -> dict[str, JSON]:
    """Returns git revisions, interpreter, package versions and platform of this process, and the caller's additions.

    ``git`` is the repository of the working directory, where the caller's own code is; ``library_git`` this library's.
    A package that is not installed and a revision that cannot be read are ``None``. Raises ``RecordingError`` where
    ``extra`` would replace one of these.
    """
    own: dict[str, JSON] = {
        "git": read_folder_revision(Path.cwd()),
        "library_git": _read_library_revision(),
        "python": sys.version.split()[0],
        "packages": read_package_versions(),
        "platform": platform.platform(),
    }
    # A caller's value under one of these names would pass for what was read.
    taken = sorted(set(own) & set(extra))
    if taken:
        raise RecordingError(f"provenance: {taken} are read by the recorder itself: give other names")
    return {**own, **extra}


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of ``recording.json``; raises ``RecordingError`` where the provenance is no JSON."""
    provenance = dict(manifest.provenance)
    # Checked here, since Python's encoder turns some values into others without a word.
    try:
        check_json(provenance, "provenance", is_exact=False)
    except ValueError as error:
        raise RecordingError(f"{MANIFEST_NAME}: {error}") from error
    return _FILE.encode(
        _StoredManifest(run_id=manifest.run_id, contract=manifest.contract.fields, provenance=provenance)
    )


def decode_manifest(data: bytes, *, source: str) -> Manifest:
    """Returns the inverse of ``encode_manifest``.

    Raises ``CorruptRecordingError`` where any bit changed, ``RecordingError`` where another version wrote it.
    """
    stored = _FILE.decode(data, source=source)
    try:
        return Manifest(run_id=stored.run_id, contract=Contract(stored.contract), provenance=stored.provenance)
    except ContractError as error:
        raise _FILE.corrupt(error, source=source) from error


def save_manifest(storage: Storage, manifest: Manifest) -> None:
    """Write ``recording.json``; raises ``RecordingError`` where another run has written one."""
    try:
        storage.publish(MANIFEST_NAME, [encode_manifest(manifest)])
    except FileExistsError as error:
        raise RecordingError(
            f"{storage.path(MANIFEST_NAME)} exists: another run is recording here. Set another rollout_mock.dump_dir."
        ) from error


def load_manifest(storage: Storage) -> Manifest:
    """Read ``recording.json``.

    Raises ``StepNotFoundError`` naming recordings nearby where there is none, ``RecordingError`` where the location is
    a file, and as ``decode_manifest``.
    """
    path = storage.path(MANIFEST_NAME)
    if not storage.is_remote and os.path.isfile(storage.path("")):
        raise RecordingError(
            f"[Rollout Mock] {storage.location} is a file, and a recording is a folder with {MANIFEST_NAME} in it: "
            "give the folder as dump_dir"
        )
    try:
        data = storage.read_bytes(MANIFEST_NAME, max_bytes=MAX_SEALED_BYTES)
    except FileNotFoundError:
        raise StepNotFoundError(_missing_text(storage.location, path)) from None  # it says all of it
    return decode_manifest(data, source=path)


def find_nearby_recordings(dump_dir: str) -> list[str]:
    """Returns folders beside a local ``dump_dir`` holding a recording, those of the most similar names first.

    Spelled relative to it as the user would. Hidden folders are left out.
    """
    parent, wanted = os.path.split(os.path.normpath(dump_dir))
    folders = os.listdir(parent or ".") if os.path.isdir(parent or ".") else []
    found = [
        folder
        for folder in sorted(folders)
        if not folder.startswith(".") and os.path.isfile(os.path.join(parent, folder, MANIFEST_NAME))
    ]
    found.sort(key=lambda folder: -SequenceMatcher(a=wanted, b=folder).ratio())
    return [os.path.join(parent, folder) for folder in found]


def read_git_revision(module_file: Path) -> dict[str, JSON] | None:
    """Revision of the code and whether tracked files were changed.

    ``None`` without git, and where the file is not tracked: a repository that merely encloses an installed package
    (a virtual environment in a project, say) is not where the package comes from.
    """
    if Repository(module_file.parent).ask("ls-files", "--error-unmatch", module_file.name) is None:
        return None
    return read_folder_revision(module_file.parent)


@cache
def _read_library_revision() -> dict[str, JSON] | None:
    """Reads it once, since the code that runs is that of the process's start."""
    return read_git_revision(Path(__file__))


def read_folder_revision(folder: Path) -> dict[str, JSON] | None:
    """The repository a folder is in: the name of its root folder, its revision, and whether tracked files changed.

    ``None`` without git, outside of a repository, and before its first commit.
    """
    repository = Repository(folder)
    found = repository.ask("rev-parse", "--show-toplevel", "HEAD")
    if found is None:
        return None
    root, revision = found.rsplit("\n", 1)
    is_modified = bool(repository.ask("status", "--porcelain", "-uno", "--ignore-submodules=all"))
    return {"root": Path(root).name, "revision": revision, "is_modified": is_modified}


def _missing_text(dump_dir: str, path: str) -> str:
    is_remote = find_protocol(dump_dir) is not None
    nearby = list_some([] if is_remote else find_nearby_recordings(dump_dir), _NUM_NEARBY, ", ")
    return (
        f"[Rollout Mock] Recording not found: {path}\n"
        "Possible reasons:\n"
        "  1. No run in dump mode has recorded here\n"
        f"  2. dump_dir configuration is incorrect: {dump_dir}\n"
        f"Recordings nearby: {'not looked for at a remote location' if is_remote else nearby or 'none'}\n"
        "Please run in dump mode first to ensure all step data is generated."
    )
