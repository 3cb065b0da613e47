"""``recording.json``: the format version, whose recording this is, its contract and where it came from.

Contract: written once, as a step file is (whole or not at all, never replaced); its ``digest`` covers everything
else in it, and its bytes must be exactly those that writing its content gives, so that no bit can change unnoticed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mock_scheduler.digests import JSON, open_sealed, seal
from mock_scheduler.errors import ContractError, CorruptRecordingError, RecordingError, StepNotFoundError
from mock_scheduler.recording.contract import Contract
from mock_scheduler.recording.paths import MANIFEST_NAME, publish_file

MANIFEST_FORMAT = "rollout-recording"
MANIFEST_VERSION = 1
MAX_MANIFEST_BYTES = 16 * 2**20

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
        "git": _git_revision(Path(__file__).parent),
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
        return _render(seal(document))
    except (TypeError, ValueError) as error:
        raise RecordingError(f"{MANIFEST_NAME}: provenance is no JSON: {error}") from error


def decode_manifest(data: bytes, *, source: str) -> Manifest:
    """The inverse of ``encode_manifest``.

    Raises ``CorruptRecordingError`` where any bit changed, ``RecordingError`` where a newer version wrote it.
    """
    document = _parse(data, source)
    if document.get("format") != MANIFEST_FORMAT or not isinstance(document.get("version"), int):
        raise CorruptRecordingError(f"{source}: format {document.get('format')!r} is not {MANIFEST_FORMAT!r}")
    if document["version"] > MANIFEST_VERSION:
        raise RecordingError(
            f"{source}: recording format version {document['version']} is newer than {MANIFEST_VERSION}, the newest "
            "that this release reads. Update mock-scheduler, or record again with this release."
        )
    try:
        contract = Contract.from_json(document["contract"])
        return Manifest(run_id=document["run_id"], contract=contract, provenance=document["provenance"])
    except (KeyError, TypeError, ValueError, ContractError) as error:
        raise CorruptRecordingError(f"{source}: content is no recording: {error!r}") from error


def save_manifest(dump_dir: str, manifest: Manifest) -> None:
    """Write ``{dump_dir}/recording.json``; raises ``RecordingError`` where another run has written one."""
    path = os.path.join(dump_dir, MANIFEST_NAME)
    try:
        publish_file(path, encode_manifest(manifest))
    except FileExistsError as error:
        raise RecordingError(
            f"{path} exists: another run is recording here. Set another rollout_mock.dump_dir."
        ) from error


def load_manifest(dump_dir: str) -> Manifest:
    """Read ``{dump_dir}/recording.json``.

    Raises ``StepNotFoundError`` naming recordings nearby where there is none, and as ``decode_manifest``.
    """
    path = os.path.join(dump_dir, MANIFEST_NAME)
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StepNotFoundError(_missing_text(dump_dir, path)) from error
    if len(data) > MAX_MANIFEST_BYTES:
        raise CorruptRecordingError(f"{path}: over the limit of {MAX_MANIFEST_BYTES} bytes: not a recording's manifest")
    return decode_manifest(data, source=path)


def find_nearby_recordings(dump_dir: str) -> list[str]:
    """Folders beside ``dump_dir`` that hold a recording, sorted, spelled relative to it as the user would."""
    parent = os.path.dirname(os.path.normpath(dump_dir))
    folders = sorted(os.listdir(parent or ".")) if os.path.isdir(parent or ".") else []
    paths = [os.path.join(parent, folder) for folder in folders]
    return [path for path in paths if os.path.isfile(os.path.join(path, MANIFEST_NAME))]


def _missing_text(dump_dir: str, path: str) -> str:
    return (
        f"[Rollout Mock] Recording not found: {path}\n"
        "Possible reasons:\n"
        "  1. No run in dump mode has recorded here\n"
        f"  2. dump_dir configuration is incorrect: {dump_dir}\n"
        f"Recordings nearby: {', '.join(find_nearby_recordings(dump_dir)) or 'none'}\n"
        "Please run in dump mode first to ensure all step data is generated."
    )


def _parse(data: bytes, source: str) -> dict[str, Any]:
    """The document, believed only where these are the very bytes that writing it gives."""
    try:
        document = open_sealed(data)
        if _render(seal(document)) != data:
            raise ValueError("is not laid out as it was written")
    except ValueError as error:
        raise CorruptRecordingError(
            f"{source}: {error}: it was changed after it was written. Restore it from a copy or record again."
        ) from error
    return document


def _render(document: Mapping[str, JSON]) -> bytes:
    return (json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_revision(folder: Path) -> dict[str, JSON] | None:
    """Revision of the code and whether tracked files were changed; ``None`` outside a repository or without git."""
    revision = _run_git(folder, "rev-parse", "HEAD")
    if revision is None:
        return None
    return {"revision": revision, "is_modified": bool(_run_git(folder, "status", "--porcelain", "-uno"))}


def _run_git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
