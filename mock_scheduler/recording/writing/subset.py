"""Cuts a recording: some whole groups of another one, with its own run id and a manifest naming its source.

Contract: rows are the recorded ones, bit for bit, in their order, with their identities. Measurements of a whole
batch, and where data and random generators stood, is not said of a part: ``metrics`` are empty, ``data_cursor`` and
``random_states`` are ``None``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.trajectory import GroupKey
from mock_scheduler.errors import RecordingError
from mock_scheduler.recording.contract import Contract
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.writing.opening import WriterOptions, open_recording
from mock_scheduler.scheduler import DEFAULT_SCHEDULER_ID, RolloutRequest
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.text import list_some

#: In the provenance of a cut recording: what it was cut from.
CUT_FROM = "cut_from"

#: What a recorder reads of itself (``manifest.collect_provenance``).
RECORDER_KEYS = ("git", "library_git", "python", "packages", "platform")

_NUM_NAMED = 5


def load_train_step(reader: RecordingReader, step: int) -> RolloutBatch:
    """All rows of a training step, each digest checked; raises as ``RecordingReader.open_step``."""
    # Opening does not look at the batch size, which nobody asks for here.
    return reader.open_step(RolloutRequest(global_step=step, batch_size=1)).load()


def select_groups(batch: RolloutBatch, groups: Sequence[GroupKey]) -> RolloutBatch:
    """The rows of the given groups alone; ``group_size`` stays. Raises ``RecordingError`` for groups it has not."""
    missing = [_name(group) for group in groups if group not in batch.group_sizes]
    if missing:
        raise RecordingError(f"the recorded step has no {list_some(missing, _NUM_NAMED, ', ')}")
    wanted = set(groups)
    rows = [row for row, identity in enumerate(batch.identities) if identity.group_key in wanted]
    return replace(batch.select(rows), group_size=batch.group_size)


def write_subset(
    reader: RecordingReader,
    dump_dir: str,
    groups: Mapping[int, Sequence[GroupKey]],
    *,
    contract: Mapping[str, JSON],
) -> int:
    """Write training steps with some of their groups to a new recording; returns the bytes of its steps.

    groups: by step, in whose order they are written. contract: fields of the recorded contract, by name, that are
    other for the part, like the size of a batch; all others stay as they are. The provenance stays that of the
    recording run but for what a recorder reads of itself, which is under ``cut_from`` with run id, steps and groups.
    Raises ``RecordingError`` where a step or group is not recorded, the contract has no field of a name, or the folder
    holds a recording.
    """
    manifest = reader.manifest
    origin: dict[str, JSON] = {name: value for name, value in manifest.provenance.items() if name in RECORDER_KEYS}
    named: dict[str, JSON] = {str(step): [_name(group) for group in found] for step, found in groups.items()}
    provenance = {name: value for name, value in manifest.provenance.items() if name not in (*RECORDER_KEYS, CUT_FROM)}
    writer = open_recording(
        dump_dir,
        contract=_with_values(manifest.contract, contract),
        plan=(),
        provenance={**provenance, CUT_FROM: {**origin, "run_id": manifest.run_id, "groups": named}},
        resume=False,
        options=WriterOptions(background=False),
    )
    size_bytes = 0
    try:
        for step, wanted in groups.items():
            info = reader.open_step(RolloutRequest(global_step=step, batch_size=1)).info
            own = replace(
                info,
                run_id=writer.run_id,
                metrics={},
                data_cursor=None,
                shard=None,
                group_size=None,
                random_states=None,
                late_random_states=None,
            )
            size_bytes += writer.write_step(select_groups(load_train_step(reader, step), wanted), own).size_bytes
    finally:
        writer.close()
    return size_bytes


def _with_values(contract: Contract, values: Mapping[str, JSON]) -> Contract:
    unknown = sorted(set(values) - {field.name for field in contract.fields})
    if unknown:
        raise RecordingError(f"the recording's contract has no field {', '.join(unknown)}")
    return Contract([replace(field, value=values.get(field.name, field.value)) for field in contract.fields])


def _name(group: GroupKey) -> str:
    """Names a group as ``SampleIdentity`` does; a scheduler's id only where it is not the default one."""
    scheduler_id, group_id, episode_id = group
    prefix = "" if scheduler_id == DEFAULT_SCHEDULER_ID else f"{scheduler_id}/"
    return f"{prefix}group {group_id}/episode {episode_id}"
