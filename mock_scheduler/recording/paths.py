"""Names every file of a recording.

Contract: names are relative to the recording, with ``/``, and built here only. A step lies in one of three forms:
``train/step_000000.safetensors``, ``train/step_000000.safetensors.zst``, or, where several writers hold its rows, a
folder ``train/step_000000/`` of shards; its ``commit.json`` makes it a step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import RecordingError, StepInTwoFormsError
from mock_scheduler.recording.storage import Storage
from mock_scheduler.scheduler import DEFAULT_SCHEDULER_ID, Mode, RolloutRequest, RowShard

MANIFEST_NAME = "recording.json"
COMMIT_NAME = "commit.json"
RETENTION_NAME = "retention.json"
STEP_SUFFIX = ".safetensors"
COMPRESSED_SUFFIX = ".safetensors.zst"
SHARD_NAME = re.compile(r"shard_[0-9]{5,}-of-[0-9]{5,}\.safetensors(\.zst)?")

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_STEP_STEM = re.compile(r"step_([0-9]{6,12})")
_STEP_ENDINGS = ("", STEP_SUFFIX, COMPRESSED_SUFFIX)


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


def step_name(*, mode: Mode, scheduler_id: str, step: int) -> str:
    """``train/step_000000``: the step without its form; a sharded step is the folder of this name."""
    return f"{step_folder(mode, scheduler_id)}/{step_stem(step)}"


def parse_folder(folder: str) -> tuple[Mode, str] | None:
    """Returns the mode and scheduler id of a folder that ``step_folder`` names; None for any other name."""
    mode, _, scheduler_id = folder.partition(".")
    scheduler_id = scheduler_id if "." in folder else DEFAULT_SCHEDULER_ID
    if mode not in ("train", "val") or not _SAFE_NAME.fullmatch(scheduler_id):
        return None
    # The default scheduler's folder has no id, so that none is read twice.
    found: Mode = "train" if mode == "train" else "val"
    return (found, scheduler_id) if step_folder(found, scheduler_id) == folder else None


def step_stem(step: int) -> str:
    """Returns ``step_000000``."""
    return f"step_{step:06d}"


def parse_step_stem(name: str) -> int | None:
    """The step of a name that ``step_stem`` gives; None for any other name."""
    match = _STEP_STEM.fullmatch(name)
    return int(match[1]) if match is not None and step_stem(int(match[1])) == name else None


def shard_stem(shard: RowShard) -> str:
    """Returns ``shard_00000-of-00004``."""
    return f"shard_{shard.index:05d}-of-{shard.count:05d}"


def request_name(request: RolloutRequest) -> str:
    """Returns ``step_name`` of the step for this request."""
    return step_name(mode=request.mode, scheduler_id=request.scheduler_id, step=request.global_step)


def file_name(step: str, *, shard: RowShard | None = None, is_compressed: bool = False) -> str:
    """Returns the file of a step (as in ``step_name``) or, in its folder, of one of its shards.

    ``train/step_000000.safetensors``, ``train/step_000000/shard_00000-of-00004.safetensors``; compressed, with
    ``.zst`` after it.
    """
    stem = step if shard is None else f"{step}/{shard_stem(shard)}"
    return stem + (COMPRESSED_SUFFIX if is_compressed else STEP_SUFFIX)


def commit_name(step: str) -> str:
    """Returns ``train/step_000000/commit.json``, the proof of a sharded step's presence."""
    return f"{step}/{COMMIT_NAME}"


def find_file(storage: Storage, step: str, *, shard: RowShard | None = None) -> str | None:
    """The file of a step or of a shard, compressed or not; None where there is none.

    Raises ``StepInTwoFormsError`` where there are both, since nothing tells the right one.
    """
    names = [file_name(step, shard=shard, is_compressed=is_compressed) for is_compressed in (False, True)]
    return _only_one(storage, [name for name in names if storage.exists(name)])


def find_step(storage: Storage, step: str) -> str | None:
    """Finds a step: the name of its file or, where it is sharded and committed, of its folder (= ``step``).

    None where it is not recorded. Raises ``StepInTwoFormsError`` naming both where it lies there in two forms.
    """
    names = [file_name(step, is_compressed=is_compressed) for is_compressed in (False, True)]
    found = [name for name in names if storage.exists(name)]
    return _only_one(storage, found + ([step] if storage.exists(commit_name(step)) else []))


def locate_steps(storage: Storage, folder: str) -> dict[int, str]:
    """Step -> where it lies (as in ``find_step``), sorted, of one folder like ``train``; raises as ``find_step``."""
    found: dict[int, list[str]] = {}
    for name in storage.list_names(folder):
        stem = name.partition(".")[0]
        step = parse_step_stem(stem)
        if step is None or name.removeprefix(stem) not in _STEP_ENDINGS:
            continue
        if name != stem or storage.exists(commit_name(f"{folder}/{name}")):
            found.setdefault(step, []).append(f"{folder}/{name}")
    return {step: _only_one(storage, names) or "" for step, names in sorted(found.items())}


def list_folders(storage: Storage) -> list[str]:
    """The folders that may hold steps: ``train``, ``val``, ``train.{scheduler_id}``, sorted."""
    return [name for name in storage.list_names("") if parse_folder(name) is not None]


def list_steps(storage: Storage) -> dict[str, list[int]]:
    """Folder name -> steps present, both sorted. Empty where there are none."""
    located = {folder: list(locate_steps(storage, folder)) for folder in list_folders(storage)}
    return {folder: steps for folder, steps in located.items() if steps}


def list_shard_files(storage: Storage, step: str) -> list[str]:
    """Returns the shard files in a step's folder, of whatever count, by name alone."""
    return [name for name in storage.list_names(step) if SHARD_NAME.fullmatch(name)]


def format_present(steps: Mapping[str, Sequence[int]]) -> str:
    """Steps per folder as ranges: ``train 0-4; val 0, 5``; ``none`` where there are none."""
    return "; ".join(f"{folder} {StepRanges.of(found)}" for folder, found in steps.items()) or "none"


def _only_one(storage: Storage, names: Sequence[str]) -> str | None:
    if len(names) > 1:
        raise StepInTwoFormsError(
            f"[Rollout Mock] {' and '.join(storage.path(name) for name in names)} are the same step: remove all but "
            "the one that is meant"
        )
    return names[0] if names else None


def describe_absent(steps: StepRanges | None, present: Sequence[tuple[str, Mapping[str, Sequence[int]]]]) -> str:
    """Says which chosen steps are nowhere (``StepRanges.absent_from``), with the present ones; empty without any.

    ``present``: by the name of each place searched, its steps by folder.
    """
    found_steps = {step for _, found in present for listed in found.values() for step in listed}
    absent = StepRanges(()) if steps is None else steps.absent_from(found_steps)
    if not absent.ranges:
        return ""
    listed = "; ".join(f"{name} has {format_present(found)}" for name, found in present)
    what = "there is no such step" if str(absent) == str(steps) else f"there is no step {absent}"
    return f"steps {steps}: {what}; {listed}"
