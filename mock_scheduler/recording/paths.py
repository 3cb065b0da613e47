"""Where things lie in a recording, and the one way in which a file comes to lie there.

Contract: a published file is whole, as ``files`` says, and was never there before.
Paths are strings that begin with ``dump_dir`` exactly as the user spelled it.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mock_scheduler.errors import RecordingError
from mock_scheduler.files import make_folder, publish_new
from mock_scheduler.scheduler import DEFAULT_SCHEDULER_ID, Mode, RolloutRequest

MANIFEST_NAME = "recording.json"

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_STEP_NAME = re.compile(r"step_([0-9]{6,12})\.safetensors")
_FOLDER_NAME = re.compile(r"(train|val)(\.[A-Za-z0-9][A-Za-z0-9_.-]{0,63})?")


def step_folder(mode: Mode, scheduler_id: str) -> str:
    """``train`` or ``val``; with the id appended for a scheduler that is not the default one.

    Raises ``RecordingError`` where the id is no safe folder name.
    """
    if not _SAFE_NAME.fullmatch(scheduler_id):
        raise RecordingError(
            f"scheduler_id {scheduler_id!r} cannot name a folder: use up to 64 letters, digits, '_', '.' and '-', "
            "the first a letter or digit"
        )
    return mode if scheduler_id == DEFAULT_SCHEDULER_ID else f"{mode}.{scheduler_id}"


def step_path(dump_dir: str, *, mode: Mode, scheduler_id: str, step: int) -> str:
    """``{dump_dir}/train/step_000000.safetensors``."""
    return os.path.join(dump_dir, step_folder(mode, scheduler_id), f"step_{step:06d}.safetensors")


def request_path(dump_dir: str, request: RolloutRequest) -> str:
    """The step file that answers this request."""
    return step_path(dump_dir, mode=request.mode, scheduler_id=request.scheduler_id, step=request.global_step)


def list_steps(dump_dir: str) -> dict[str, list[int]]:
    """Folder name -> steps present, both sorted; ``train`` first. Empty where there are none."""
    if not os.path.isdir(dump_dir):
        return {}
    found: dict[str, list[int]] = {}
    for folder in sorted(name for name in os.listdir(dump_dir) if _FOLDER_NAME.fullmatch(name)):
        path = os.path.join(dump_dir, folder)
        matches = [_STEP_NAME.fullmatch(name) for name in os.listdir(path)] if os.path.isdir(path) else []
        steps = sorted(int(match[1]) for match in matches if match)
        if steps:
            found[folder] = steps
    return found


def format_steps(steps: Iterable[int]) -> str:
    """Sorted steps as ranges: ``0-4, 7``."""
    ranges: list[tuple[int, int]] = []
    for step in sorted(set(steps)):
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], step)
        else:
            ranges.append((step, step))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def format_present(steps: Mapping[str, Sequence[int]]) -> str:
    """Steps per folder as ranges: ``train 0-4; val 0, 5``; ``none`` where there are none."""
    return "; ".join(f"{folder} {format_steps(found)}" for folder, found in steps.items()) or "none"


def publish_file(path: str, data: bytes) -> None:
    """Write ``data`` to ``path`` so that it appears whole or not at all, and never over another file.

    Raises ``FileExistsError`` (the plain one) where ``path`` exists, ``RecordingError`` for any other failure.
    """
    try:
        publish_new(Path(path), data)
    except FileExistsError:
        raise
    except OSError as error:
        raise RecordingError(
            f"cannot write {path} ({len(data)} bytes): {error.strerror or error}. Nothing partial was left; "
            "earlier steps are intact. Check space and permissions of the folder, or set another "
            "rollout_mock.dump_dir."
        ) from error


def check_writable(folder: str) -> None:
    """Make the folder where it is missing; raise ``RecordingError`` where no file can be made in it."""
    probe = os.path.join(folder, f".probe.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        make_folder(Path(folder))
        Path(probe).touch(exist_ok=False)
        os.unlink(probe)
    except OSError as error:
        raise RecordingError(
            f"cannot record in {folder}: {error.strerror or error}. Check its permissions, or set another "
            "rollout_mock.dump_dir."
        ) from error


def check_inside(dump_dir: str, path: str) -> None:
    """Raise ``RecordingError`` where ``path`` leads out of ``dump_dir`` through a link."""
    root, target = os.path.realpath(dump_dir), os.path.realpath(path)
    if os.path.commonpath([root, target]) != root:
        raise RecordingError(f"{path} is a link to {target}, outside the recording: it is not followed")
