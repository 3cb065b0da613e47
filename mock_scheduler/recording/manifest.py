"""``recording.json``: the format version, whose recording this is, its contract and where it came from.

Contract: written once, as a step file is (whole or not at all, never replaced); its ``digest`` covers everything
else in it, and its bytes must be exactly those that writing its content gives, so that no bit can change unnoticed.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.digests import JSON
from mock_scheduler.errors import ContractError, CorruptRecordingError, RecordingError, StepNotFoundError
from mock_scheduler.recording.contract import Contract
from mock_scheduler.recording.paths import MANIFEST_NAME
from mock_scheduler.recording.sealed import MAX_SEALED_BYTES, decode_sealed, encode_sealed
from mock_scheduler.recording.storage import Storage

MANIFEST_FORMAT = "rollout-recording"
MANIFEST_VERSION = 1

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "safetensors", "numpy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What ``recording.json`` holds; ``run_id`` is in every step file of the recording too."""

    run_id: str
    contract: Contract
    provenance: Mapping[str, JSON]


def collect_provenance(extra: Mapping[str, JSON]) -> dict[str, JSON]:
    """Git revision, interpreter, package versions and platform of this process, and what the caller adds.

    A package that is not installed and a revision that cannot be read are ``None``. Raises ``RecordingError`` where
    ``extra`` would replace one of these.
    """
    own: dict[str, JSON] = {
        "git": read_git_revision(Path(__file__)),
        "python": sys.version.split()[0],
        "packages": {name: _package_version(name) for name in _PACKAGES},
        "platform": platform.platform(),
    }
    taken = sorted(set(own) & set(extra))
    if taken:
        raise RecordingError(f"provenance: {taken} are read by the recorder itself: give other names")
    return {**own, **extra}


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of ``recording.json``; raises ``RecordingError`` where the provenance is no JSON."""
    document: dict[str, JSON] = {
        "format": MANIFEST_FORMAT,
        "version": MANIFEST_VERSION,
        "run_id": manifest.run_id,
        "contract": manifest.contract.as_json(),
        "provenance": dict(manifest.provenance),
    }
    try:
        return encode_sealed(document)
    except (TypeError, ValueError) as error:
        raise RecordingError(f"{MANIFEST_NAME}: provenance is no JSON: {error}") from error


def decode_manifest(data: bytes, *, source: str) -> Manifest:
    """The inverse of ``encode_manifest``.

    Raises ``CorruptRecordingError`` where any bit changed, ``RecordingError`` where another version wrote it.
    """
    document = decode_sealed(data, source=source, format_name=MANIFEST_FORMAT, version=MANIFEST_VERSION)
    try:
        contract = Contract.from_json(document["contract"])
        return Manifest(run_id=document["run_id"], contract=contract, provenance=document["provenance"])
    except (KeyError, TypeError, ValueError, ContractError) as error:
        raise CorruptRecordingError(f"{source}: content is no recording: {error!r}") from error


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

    Raises ``StepNotFoundError`` naming recordings nearby where there is none, and as ``decode_manifest``.
    """
    path = storage.path(MANIFEST_NAME)
    try:
        data = storage.read_bytes(MANIFEST_NAME, max_bytes=MAX_SEALED_BYTES)
    except FileNotFoundError as error:
        raise StepNotFoundError(_missing_text(storage.location, path)) from error
    return decode_manifest(data, source=path)


def find_nearby_recordings(dump_dir: str) -> list[str]:
    """Folders beside a local ``dump_dir`` that hold a recording, sorted, spelled relative to it as the user would."""
    parent = os.path.dirname(os.path.normpath(dump_dir))
    folders = sorted(os.listdir(parent or ".")) if os.path.isdir(parent or ".") else []
    paths = [os.path.join(parent, folder) for folder in folders]
    return [path for path in paths if os.path.isfile(os.path.join(path, MANIFEST_NAME))]


def read_git_revision(module_file: Path) -> dict[str, JSON] | None:
    """Revision of the code and whether tracked files were changed.

    ``None`` without git, and where the file is not tracked: a repository that merely encloses an installed package
    (a virtual environment in a project, say) is not where the package comes from.
    """
    folder = module_file.parent
    if _run_git(folder, "ls-files", "--error-unmatch", module_file.name) is None:
        return None
    revision = _run_git(folder, "rev-parse", "HEAD")
    if revision is None:
        return None
    return {"revision": revision, "is_modified": bool(_run_git(folder, "status", "--porcelain", "-uno"))}


def _missing_text(dump_dir: str, path: str) -> str:
    is_remote = "://" in dump_dir
    nearby = "not looked for at a remote location" if is_remote else ", ".join(find_nearby_recordings(dump_dir))
    return (
        f"[Rollout Mock] Recording not found: {path}\n"
        "Possible reasons:\n"
        "  1. No run in dump mode has recorded here\n"
        f"  2. dump_dir configuration is incorrect: {dump_dir}\n"
        f"Recordings nearby: {nearby or 'none'}\n"
        "Please run in dump mode first to ensure all step data is generated."
    )


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _run_git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
