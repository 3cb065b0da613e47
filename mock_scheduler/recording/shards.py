"""A step whose rows several writers hold: one file per writer, and a commit file that makes the step exist.

Format of ``commit.json``, version 1: sealed JSON with ``info`` (that of the step, without a shard), ``group_size`` of
the whole, ``num_rows``, ``num_trajectories``, and ``shards``: name, header digest, rows and trajectories of each file.
Contract: it is written last, by one writer, and only over shards that fit together: of one step and run, alike in
sampling, meta and extras, with disjoint rows. A shard whose digest it does not list is refused, however sound it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mock_scheduler.batch.trajectory import RowKey, SampleIdentity, count_groups, partial_group_problems
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import CorruptRecordingError, RecordingError, StepExistsError
from mock_scheduler.recording.paths import (
    COMMIT_NAME,
    SHARD_NAME,
    commit_name,
    file_name,
    find_file,
    list_shard_files,
)
from mock_scheduler.recording.sealed import MAX_SEALED_BYTES, SealedFile
from mock_scheduler.recording.step.layout import RowKeys
from mock_scheduler.recording.step.step_file import StepFile
from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.recording.storage import Storage
from mock_scheduler.scheduler import RowShard
from mock_scheduler.support.digests import JSON, canonical_json
from mock_scheduler.support.documents import Count

COMMIT_FORMAT = "rollout-commit"
COMMIT_VERSION = 1

_MAX_LISTED = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """One shard as the commit knows it; ``name`` within the step's folder."""

    name: str
    digest: str
    num_rows: Count
    num_trajectories: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """Holds the content of ``commit.json``; ``shards`` in the order of their indices."""

    info: StepInfo
    group_size: int | None
    num_rows: int
    num_trajectories: int
    shards: tuple[ShardEntry, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredCommit:
    """A ``Commit`` as the file has it."""

    info: dict[str, JSON]
    group_size: int | None
    num_rows: Count
    num_trajectories: Count
    shards: tuple[ShardEntry, ...]


_FILE = SealedFile[_StoredCommit](_StoredCommit, format_name=COMMIT_FORMAT, version=COMMIT_VERSION, noun="commit")


def missing_shards(storage: Storage, step_name: str, count: int) -> list[int]:
    """The indices of the missing ones of ``count`` shards; ``step_name`` as ``paths.step_name`` gives it."""
    return [i for i in range(count) if find_file(storage, step_name, shard=RowShard(index=i, count=count)) is None]


def commit_shards(storage: Storage, step_name: str, *, count: int) -> None:
    """Write the commit file of a step whose ``count`` shards are all there; one writer calls it, once they are.

    A step that is already committed over the same shards stays as it is. Raises ``RecordingError`` listing the shards
    missing or every way in which they do not fit together, ``CorruptRecordingError`` for a damaged one,
    ``StepExistsError`` where other shards were committed.
    """
    where = storage.path(step_name)
    missing = missing_shards(storage, step_name, count)
    if missing:
        raise RecordingError(
            f"[Rollout Mock] {where} cannot be committed: {len(missing)} of {count} shards are missing: "
            f"{StepRanges.of(missing)}"
        )
    files = [_open_file(storage, step_name, RowShard(index=index, count=count)) for index in range(count)]
    keys = {_base_name(file): file.read_keys() for file in files}
    group_size = _whole_group_size(files)
    all_keys = [key for rows in keys.values() for key in rows.keys]
    # Shards of another count are an earlier run's: which of the two is meant cannot be known.
    strangers = [name for name in list_shard_files(storage, step_name) if name not in keys]
    problems = [f"{name} is of another number of shards" for name in strangers]
    problems += _difference_problems(files) + _overlap_problems(keys)
    problems += [] if group_size is None else _group_problems(all_keys, group_size)
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise RecordingError(f"[Rollout Mock] {where} cannot be committed: its shards do not fit together:{lines}")
    entries = [
        ShardEntry(name=_base_name(f), digest=f.digest, num_rows=f.num_rows, num_trajectories=f.num_trajectories)
        for f in files
    ]
    commit = Commit(
        info=replace(files[0].info, shard=None),
        group_size=group_size,
        num_rows=len(all_keys),
        num_trajectories=count_trajectories(all_keys),
        shards=tuple(entries),
    )
    # Last of all: its presence makes the step exist.
    _publish(storage, step_name, commit)


def load_commit(storage: Storage, step_name: str) -> Commit:
    """Read the commit file of a sharded step.

    Raises ``CorruptRecordingError`` where any bit of it changed, ``RecordingError`` where another version wrote it.
    """
    name = commit_name(step_name)
    return decode_commit(storage.read_bytes(name, max_bytes=MAX_SEALED_BYTES), source=storage.path(name))


def open_shard(storage: Storage, step_name: str, commit: Commit, *, index: int) -> StepFile:
    """Open shard ``index`` of a committed step.

    Raises ``CorruptRecordingError`` where it is absent or not the committed file, and as ``StepFile.open``.
    """
    entry = commit.shards[index]
    path = storage.path(f"{step_name}/{entry.name}")
    try:
        file = StepFile.open(storage.open_source(f"{step_name}/{entry.name}"), name=path)
    except FileNotFoundError as error:
        raise CorruptRecordingError(
            f"{path}: this shard of a committed step is missing. Restore it from a copy or record the step again."
        ) from error
    # A sound file of another run would load without a word.
    if file.digest != entry.digest:
        raise CorruptRecordingError(
            f"{path}: this is not the shard that was committed: its digest is {file.digest}, that of {COMMIT_NAME} is "
            f"{entry.digest}. It was replaced by another file: restore it from a copy or record the step again."
        )
    return file


def encode_commit(commit: Commit) -> bytes:
    """Gives the bytes of ``commit.json``."""
    return _FILE.encode(
        _StoredCommit(
            info=commit.info.as_json(),
            group_size=commit.group_size,
            num_rows=commit.num_rows,
            num_trajectories=commit.num_trajectories,
            shards=commit.shards,
        )
    )


def decode_commit(data: bytes, *, source: str) -> Commit:
    """Gives the commit of the given bytes; raises as ``load_commit``, naming ``source``."""
    stored = _FILE.decode(data, source=source)
    try:
        # A name with a slash would lead out of the step's folder.
        if not stored.shards or not all(SHARD_NAME.fullmatch(shard.name) for shard in stored.shards):
            raise ValueError(f"shards are named {[shard.name for shard in stored.shards]}")
        info = StepInfo.from_json(stored.info)
    except (KeyError, TypeError, ValueError) as error:
        raise _FILE.corrupt(error, source=source) from error
    return Commit(
        info=info,
        group_size=stored.group_size,
        num_rows=stored.num_rows,
        num_trajectories=stored.num_trajectories,
        shards=stored.shards,
    )


def _publish(storage: Storage, step_name: str, commit: Commit) -> None:
    try:
        storage.publish(commit_name(step_name), [encode_commit(commit)])
    except FileExistsError as error:
        if load_commit(storage, step_name) != commit:
            raise StepExistsError(
                f"[Rollout Mock] {storage.path(commit_name(step_name))} exists and commits other shards: it is not "
                "overwritten. Set another rollout_mock.dump_dir, or remove the step if it is not needed."
            ) from error


def _open_file(storage: Storage, step_name: str, shard: RowShard) -> StepFile:
    name = find_file(storage, step_name, shard=shard)
    if name is None:
        raise RecordingError(f"[Rollout Mock] {storage.path(file_name(step_name, shard=shard))} was removed")
    return StepFile.open(storage.open_source(name), name=storage.path(name))


def _base_name(file: StepFile) -> str:
    return file.name.rpartition("/")[2]


def _difference_problems(files: Sequence[StepFile]) -> list[str]:
    """Lists differences of shards from the first one, or from their own names."""
    problems = []
    for index, file in enumerate(files):
        if file.info.shard != (index, len(files)):
            problems.append(f"{_base_name(file)} says that it is shard {file.info.shard}")
        expected, found = _shared_values(files[0]), _shared_values(file)
        problems += [
            f"{_base_name(file)} has {name} {canonical_json(value)}; shard 0 has {canonical_json(expected[name])}"
            for name, value in found.items()
            if canonical_json(value) != canonical_json(expected[name])
        ]
    # A shard without rows has extras without a dtype.
    filled = [file for file in files if file.num_rows]
    problems += [
        f"{_base_name(file)} has extras {canonical_json(file.extra_kinds)}; {_base_name(filled[0])} has "
        f"{canonical_json(filled[0].extra_kinds)}"
        for file in filled
        if file.extra_kinds != filled[0].extra_kinds
    ]
    return problems


def _shared_values(file: StepFile) -> dict[str, JSON]:
    info = file.info
    return {
        "step": info.step,
        "mode": info.mode,
        "scheduler_id": info.scheduler_id,
        "run_id": info.run_id,
        "policy_version": info.policy_version,
        "data_cursor": info.data_cursor,
        "group_size of the whole": info.group_size,
        "sampling": file.sampling,
        "meta": file.meta,
    }


def _whole_group_size(files: Sequence[StepFile]) -> int | None:
    """Returns the writers' statement about the whole step or, without one, about their own rows if all agree."""
    if files[0].info.group_size is not None:
        return files[0].info.group_size
    sizes = {file.group_size for file in files if file.num_rows} or {files[0].group_size}
    return sizes.pop() if len(sizes) == 1 else None


def count_trajectories(keys: Iterable[RowKey]) -> int:
    """Number of different trajectories."""
    return count_groups(key[:4] for key in keys).total()


def _overlap_problems(files: Mapping[str, RowKeys]) -> list[str]:
    """Rows that more than one file holds, each with the files' names; the first 20 of them where there are more."""
    holders: dict[RowKey, list[str]] = {}
    for name, rows in files.items():
        for key in rows.keys:
            holders.setdefault(key, []).append(name)
    twice = [(key, names) for key, names in sorted(holders.items()) if len(names) > 1]
    return _some([f"{_name_row(key)} is in {' and in '.join(names)}" for key, names in twice])


def _group_problems(keys: Iterable[RowKey], group_size: int) -> list[str]:
    """Groups with another number of trajectories; the first 20 of them where there are more."""
    return _some(partial_group_problems(count_groups(key[:4] for key in sorted(keys)), group_size))


def _name_row(key: RowKey) -> str:
    scheduler_id, group_id, episode_id, env_id, turn = key
    return str(
        SampleIdentity(scheduler_id=scheduler_id, group_id=group_id, episode_id=episode_id, env_id=env_id, turn=turn)
    )


def _some(problems: list[str]) -> list[str]:
    hidden = len(problems) - _MAX_LISTED
    return problems if hidden <= 0 else [*problems[:_MAX_LISTED], f"and {hidden} more"]
