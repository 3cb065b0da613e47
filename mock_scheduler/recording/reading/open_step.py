"""Reads an open recorded step, whatever its form: all of its rows, one process's part of them, and its prompts.

Contract: rows come in identity order whether one file holds them or several. A step recorded in as many shards
as it is read in gives each as it was recorded; any other is cut into equal contiguous parts of its trajectories, and a
group may be cut too. Files of shards are opened when they are needed, and just their needed rows are read.

Prompts, live or recorded, are compared by one rule. A request names them once per trajectory (as many as its
``batch_size``; the prompt of a trajectory is that of its first row) or, with any other number, once per group, each of
whose trajectories then has the one prompt. Their order does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.trajectory import RowKey, TrajectoryKey
from mock_scheduler.errors import BatchError, CorruptRecordingError, RecordingError
from mock_scheduler.recording.shards import Commit, count_trajectories, load_commit, open_shard
from mock_scheduler.recording.step.step_file import StepFile
from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.recording.storage import Storage
from mock_scheduler.scheduler import RolloutRequest, RowShard


class OpenStep:
    """One recorded step, made by ``open_step``. ``path``: its file or folder, for messages."""

    def __init__(self, *, path: str, parts: Sequence[Callable[[], StepFile]], commit: Commit | None) -> None:
        self.path = path
        self._parts = parts
        self._commit = commit
        self._files: dict[int, StepFile] = {}

    @property
    def info(self) -> StepInfo:
        """Returns the step's description of itself; of a sharded one, that of shard 0."""
        return self._file(0).info if self._commit is None else self._commit.info

    @property
    def digest(self) -> str:
        """Stands for the whole content: equal exactly where two steps are."""
        return self._file(0).digest if self._commit is None else " ".join(s.digest for s in self._commit.shards)

    @property
    def num_rows(self) -> int:
        """Counts rows of the whole step."""
        return self._file(0).num_rows if self._commit is None else self._commit.num_rows

    @property
    def num_trajectories(self) -> int:
        """Trajectories of the whole step; fewer than rows where a row is a turn."""
        return self._file(0).num_trajectories if self._commit is None else self._commit.num_trajectories

    @property
    def num_bytes_read(self) -> int:
        """Counts bytes read so far, of all its files."""
        return sum(file.num_bytes_read for file in self._files.values())

    def size_of(self, shard: RowShard | None) -> int:
        """Bytes of the files, decompressed, that ``load`` of this part reads from; opens them."""
        indices = range(len(self._parts))
        if shard is not None and self.is_recorded_as(shard):
            indices = range(shard.index, shard.index + 1)
        return sum(self._file(index).size_bytes for index in indices)

    def info_of(self, shard: RowShard | None) -> StepInfo:
        """The description of one process's part where it was recorded as such; else that of the step."""
        if shard is None or not self.is_recorded_as(shard):
            return self.info
        return replace(self._file(shard.index).info, shard=None)

    def is_recorded_as(self, shard: RowShard | None) -> bool:
        """Whether one process recorded just the rows of ``shard`` (None: all of them)."""
        # The same cut as the writers': each shard is then one file, with its writer's own scheduler state.
        return (None if self._commit is None else len(self._commit.shards)) == (None if shard is None else shard.count)

    def load(self, shard: RowShard | None = None, *, verify: bool = True) -> RolloutBatch:
        """The whole step, or the part of one of ``shard.count`` processes; raises as ``StepFile.load``.

        Raises ``RecordingError`` where the trajectories cannot be shared equally.
        """
        if shard is None:
            return self._load_rows(range(self.num_rows), verify=verify)
        if self.is_recorded_as(shard):
            return self._file(shard.index).load(verify=verify)
        return self._load_rows(self._rows_of(shard), verify=verify)

    def verify(self) -> None:
        """Read every file, check every digest and that they hold a batch; raises as ``load``."""
        for index in range(len(self._parts)):
            self._file(index).verify()
        if self._commit is not None:
            # Each shard may be sound and their rows still overlap.
            found = (len(self._order), count_trajectories(key for key, _ in self._order))
            if found != (self._commit.num_rows, self._commit.num_trajectories):
                raise CorruptRecordingError(
                    f"{self.path}: its shards hold {found[0]} rows of {found[1]} trajectories; its commit says "
                    f"{self._commit.num_rows} of {self._commit.num_trajectories}"
                )

    def prompt_digests(self) -> dict[TrajectoryKey, str]:
        """Returns trajectory -> digest of its prompt (of its first row), in identity order."""
        files = [self._file(index).read_keys() for index in range(len(self._parts))]
        return first_prompts(pair for rows in files for pair in zip(rows.keys, rows.prompt_digests, strict=True))

    @cached_property
    def _order(self) -> list[tuple[RowKey, int]]:
        """Returns every row's key and the part holding it, in identity order."""
        files = [self._file(index).read_keys() for index in range(len(self._parts))]
        return sorted((key, index) for index, rows in enumerate(files) for key in rows.keys)

    def _file(self, index: int) -> StepFile:
        if index not in self._files:
            self._files[index] = self._parts[index]()
        return self._files[index]

    def _rows_of(self, shard: RowShard) -> range:
        if self.num_trajectories % shard.count:
            raise RecordingError(
                f"[Rollout Mock] {self.path} holds {self.num_trajectories} trajectories, which {shard.count} processes "
                "cannot share equally. Use a number of processes that divides it, or record again."
            )
        starts = [*self._trajectory_starts(), self.num_rows]
        size = self.num_trajectories // shard.count
        return range(starts[shard.index * size], starts[(shard.index + 1) * size])

    def _trajectory_starts(self) -> list[int]:
        if self.num_trajectories == self.num_rows:
            return list(range(self.num_rows))
        if self._commit is None:
            return self._file(0).trajectory_starts()
        keys = [key[:4] for key, _ in self._order]
        return [row for row, key in enumerate(keys) if row == 0 or key != keys[row - 1]]

    def _load_rows(self, rows: range, *, verify: bool) -> RolloutBatch:
        if self._commit is None:
            return self._file(0).load(rows, verify=verify)
        before = [0] * len(self._parts)
        inside = [0] * len(self._parts)
        for row, (_, index) in enumerate(self._order[: rows.stop]):
            (before if row < rows.start else inside)[index] += 1
        # A part's rows are sorted too, so those inside the range are contiguous in it.
        wanted = {i: range(before[i], before[i] + inside[i]) for i in range(len(self._parts)) if inside[i]} or {
            0: range(0)
        }
        batches = [self._file(index).load(part, verify=verify) for index, part in wanted.items()]
        group_size = self._commit.group_size if self._has_whole_groups(rows) else None
        try:
            joined = RolloutBatch.concat([batch.with_group_size(None) for batch in batches])
            return joined.with_group_size(group_size)
        except BatchError as error:
            raise CorruptRecordingError(f"{self.path}: its shards are no rollout batch: {error}") from error

    def _has_whole_groups(self, rows: range) -> bool:
        """Whether no group is cut at either end of the given rows."""
        ends = [end for end in (rows.start, rows.stop) if 0 < end < self.num_rows]
        return all(self._order[end][0][:3] != self._order[end - 1][0][:3] for end in ends)


def open_step(storage: Storage, name: str) -> OpenStep:
    """Open the step lying at ``name``, as ``paths.find_step`` gives it, and check its headers.

    Raises ``CorruptRecordingError``, or ``RecordingError`` where another version wrote it.
    """
    path = storage.path(name)
    if name.endswith((".safetensors", ".zst")):
        file = StepFile.open(storage.open_source(name), name=path)
        return OpenStep(path=path, parts=[lambda: file], commit=None)
    commit = load_commit(storage, name)
    parts = [lambda i=index: open_shard(storage, name, commit, index=i) for index in range(len(commit.shards))]
    return OpenStep(path=path, parts=parts, commit=commit)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptDifference:
    """``absent``: digests asked for and lacking in the batch; ``not_asked``: the other way round; with their counts;
    ``unit``: one prompt is asked for and counted for each of these."""

    num_asked: int
    absent: Counter[str]
    not_asked: Counter[str]
    unit: str

    @property
    def example(self) -> str:
        """One digest that is on one side only."""
        return next(iter(self.absent or self.not_asked))


def prompts_of(batch: RolloutBatch) -> dict[TrajectoryKey, str]:
    """Returns trajectory -> digest of its prompt, taken from its first row."""
    keys = [(identity.scheduler_id, *identity.numbers) for identity in batch.identities]
    return first_prompts(zip(keys, batch.prompt_digests, strict=True))


def first_prompts(rows: Iterable[tuple[RowKey, str]]) -> dict[TrajectoryKey, str]:
    """Returns trajectory -> digest of the prompt of its first row, in identity order; ``rows``: in any order."""
    first: dict[TrajectoryKey, str] = {}
    for key, digest in sorted(rows):
        first.setdefault(key[:4], digest)
    return first


def compare_prompts(
    prompts: Mapping[TrajectoryKey, str], request: RolloutRequest, *, is_part: bool = False
) -> PromptDifference | None:
    """Compares the prompts present with those asked for; None where nothing differs, or none was asked for.

    ``is_part``: the trajectories are one process's part of the batch, so prompts may be absent.
    """
    asked = request.prompt_digests
    if asked is None:
        return None
    if len(asked) == request.batch_size:
        unit, found = "trajectory", Counter(prompts.values())
    else:
        unit, found = "group", Counter(digest for _, digest in {(key[:3], value) for key, value in prompts.items()})
    absent, not_asked = Counter(asked) - found, found - Counter(asked)
    if is_part:
        absent.clear()
    if not absent and not not_asked:
        return None
    return PromptDifference(num_asked=len(asked), absent=absent, not_asked=not_asked, unit=unit)
