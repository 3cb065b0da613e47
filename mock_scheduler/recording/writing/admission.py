"""Whether a run may record in a place: its rights there, the contract of the recording present, and room on the disk.

Contract: rights end with ``release`` or with the process; a forked child has none of its parent's and takes its own.
A forecast is made before the first step, from its largest possible size, and after every written one, from
the average of the written ones; a location without a bound (an object store) has none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal

from mock_scheduler.errors import ContractError, MockSchedulerError, RecordingError
from mock_scheduler.recording.contract import Contract, check_contract
from mock_scheduler.recording.paths import list_shard_files, shard_stem
from mock_scheduler.recording.step.step_file import StepFile
from mock_scheduler.recording.storage import Lock, Storage
from mock_scheduler.scheduler import RolloutRequest, RowShard
from mock_scheduler.support.text import format_bytes
from mock_scheduler.support.threads import PerProcess

logger = logging.getLogger("mock_scheduler.rollout_mock")
#: The claim on the whole recording, beside the locks of its folders by their names.
_CLAIM = ""
# int32 id, float32 logprob and one bit of the mask; per row its identity, offsets, digests and a dozen turns; per file
# its header. Extras are not known before the first step.
_BYTES_PER_TOKEN = 8.125
_BYTES_PER_ROW = 512
_BYTES_PER_STEP = 64 * 2**10
_WHAT_TO_DO = (
    "Free space, set another rollout_mock.dump_dir, record fewer steps (rollout_mock.every, rollout_mock.steps), keep "
    "fewer (rollout_mock.retention.keep_last) or compress them (rollout_mock.compression: zstd)"
)


class FolderLocks:
    """The rights of one writer: its run's claim on the recording, and the locks on the folders it writes into."""

    def __init__(self, storage: Storage, shard: RowShard | None, *, run_id: str) -> None:
        self._storage = storage
        self._part = None if shard is None else shard_stem(shard)
        self._run_id = run_id
        first: dict[str, Lock | None] = {}
        self._locks = PerProcess(first, remake=lambda: {_CLAIM: storage.claim(run_id)})

    def claim(self) -> None:
        """Keep other runs out; raises ``RecordingError`` naming one that records here."""
        locks = self._locks.get()
        if _CLAIM not in locks:
            locks[_CLAIM] = self._storage.claim(self._run_id)

    def take(self, folder: str) -> None:
        """Lock a folder like ``train`` unless it is already; raises ``RecordingError`` naming who holds it."""
        locks = self._locks.get()
        if folder not in locks:
            locks[folder] = self._storage.lock(folder, part=self._part)

    def release(self) -> None:
        """Give all back."""
        # A forked child that has taken none gives none back.
        locks = self._locks.get() if self._locks.is_own else {}
        while locks:
            _, lock = locks.popitem()
            if lock is not None:
                lock.release()


def check_addition(storage: Storage, recorded: Contract, current: Contract) -> None:
    """Refuse to add to a recording with another contract than the run's own; raises ``ContractError``."""
    try:
        check_contract(recorded, current, "error", source=storage.location)
    except ContractError as error:
        raise ContractError(
            f"{error}\nA run that adds steps to a recording must have its contract: rollout_mock.on_mismatch=warn does "
            "not apply there. Set another rollout_mock.dump_dir to record a recording of this run's own."
        ) from None


def other_run_text(storage: Storage, recorded: str, current: str) -> str:
    """Returns the message for a recording of another run."""
    return (
        f"[Rollout Mock] {storage.location} holds the recording of run id {recorded}; this run is {current}. "
        "Schedulers or ranks of one run must be given one run_id (build_scheduler(run_id=...)); else set another "
        "rollout_mock.dump_dir, or remove the folder if it is not needed."
    )


def exists_text(storage: Storage, names: list[str]) -> str:
    """The message for steps (as in ``paths.find_step``) that are there and not overwritten."""
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return (
        f"[Rollout Mock] Step file exists and is not overwritten: {storage.path(names[0])}{more} "
        f"({_describe_owner(storage, names[0])}). "
        "Set another rollout_mock.dump_dir, or remove the recording if it is not needed."
    )


def _describe_owner(storage: Storage, name: str) -> str:
    shards = [f"{name}/{shard}" for shard in list_shard_files(storage, name)]
    name = shards[0] if shards else name
    try:
        return f"run id {StepFile.open(storage.open_source(name), name=storage.path(name)).info.run_id}"
    except (MockSchedulerError, FileNotFoundError) as error:
        return f"run id cannot be read: {error}"


class DiskForecast:
    """Compares the bytes still to be written with the space left.

    ``num_planned``: steps this writer will record; 0: not known, and nothing is forecast. ``num_writers``: how
    many write as much as this one onto the same disk (the shards of a step).
    """

    def __init__(
        self, storage: Storage, *, num_planned: int, on_low_disk: Literal["error", "warn"], num_writers: int = 1
    ) -> None:
        self._storage = storage
        self._num_planned = num_planned
        self._on_low_disk = on_low_disk
        self._num_writers = num_writers
        self._num_written = 0
        self._total_bytes = 0
        self._has_warned = False

    def warn_of_largest(self, requests: Sequence[RolloutRequest], *, max_row_tokens: int) -> None:
        """Log a warning where recording all ``requests`` with rows of ``max_row_tokens`` would not fit.

        One row per trajectory is reckoned with, without extras.
        """
        free_bytes = self._storage.free_bytes()
        bound = sum(_largest_step(request.batch_size, max_row_tokens) for request in requests)
        if free_bytes is None or bound <= free_bytes:
            return
        logger.warning(
            "[Rollout Mock] If every row had max_row_tokens (%d), %d steps would take up to %s; %s are free in %s. "
            "The first step's size will tell more.",
            max_row_tokens,
            len(requests),
            format_bytes(bound),
            format_bytes(free_bytes),
            self._storage.location,
        )

    def add_step(self, size_bytes: int, *, count_kept: Callable[[int], int]) -> None:
        """Count a written step and compare the coming ones with the free space.

        ``count_kept(n)``: how many more steps than now lie on the disk at most while ``n`` more are written. Raises
        ``RecordingError``, or logs a warning, where they do not fit; it warns again after there was enough space.
        """
        self._num_written += 1
        self._total_bytes += size_bytes
        num_remaining = self._num_planned - self._num_written
        free_bytes = self._storage.free_bytes() if num_remaining > 0 else None
        if free_bytes is None:
            return
        average = self._total_bytes / self._num_written
        num_kept = count_kept(num_remaining)
        needed = int(average * num_kept * self._num_writers)
        if needed <= free_bytes:
            self._has_warned = False
            return
        writers = f" by each of {self._num_writers} writers" if self._num_writers > 1 else ""
        text = (
            f"[Rollout Mock] The disk will be full before the recording ends: a step takes "
            f"{format_bytes(int(average))} (average of {self._num_written}), and {num_kept} more will be kept{writers}"
            f". They need {format_bytes(needed)}; {format_bytes(free_bytes)} are free in {self._storage.location}. "
            f"{_WHAT_TO_DO}."
        )
        if self._on_low_disk == "error":
            raise RecordingError(f"{text} To go on all the same: rollout_mock.on_low_disk: warn.")
        if not self._has_warned:
            logger.warning("%s", text)
            self._has_warned = True


def _largest_step(batch_size: int, max_row_tokens: int) -> int:
    return int(batch_size * (max_row_tokens * _BYTES_PER_TOKEN + _BYTES_PER_ROW)) + _BYTES_PER_STEP
