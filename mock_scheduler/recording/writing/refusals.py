"""Why a run may not write into a recording, as messages and errors."""

from __future__ import annotations

from mock_scheduler.errors import ContractError, MockSchedulerError
from mock_scheduler.recording.contract import Contract, check_contract
from mock_scheduler.recording.paths import list_shard_files
from mock_scheduler.recording.step.step_file import StepFile
from mock_scheduler.recording.storage import Storage


def check_addition(storage: Storage, recorded: Contract, current: Contract) -> None:
    """Refuse a run whose contract is not that of the recording to which it would add; raises ``ContractError``."""
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
    """The message for steps (as in ``paths.find_step``) that are there and are not overwritten."""
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
