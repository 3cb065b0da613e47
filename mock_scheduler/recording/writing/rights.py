"""Who may write into a recording: the locks one writer holds, and the messages for whoever may not.

Contract: rights end with ``release`` or with the process; a forked child has none of its parent's and takes its own.
"""

from __future__ import annotations

from mock_scheduler.errors import ContractError, MockSchedulerError
from mock_scheduler.recording.contract import Contract, check_contract
from mock_scheduler.recording.paths import list_shard_files, shard_stem
from mock_scheduler.recording.step.step_file import StepFile
from mock_scheduler.recording.storage import Lock, Storage
from mock_scheduler.scheduler import RowShard
from mock_scheduler.support.forks import PerProcess

#: The claim on the whole recording, beside the locks of its folders by their names.
_CLAIM = ""


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
    """The message for a recording of another run."""
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
