"""Refuses a run that could not go on from its checkpoint, or not save its own, before anything is built.

Contract: three things are looked at, each with what differs in the message. The checkpoint: of the same settings, every
file as it was written. The recording: of the same timeline as the checkpoint, which notes the run id of the recording
and the digest of its last step. The folder of the run's own checkpoints: none lies where one will be saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.errors import ConfigError, StepNotFoundError
from mock_scheduler.recording.paths import find_step, step_folder, step_name
from mock_scheduler.recording.reading.open_step import open_step
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.writing.subset import CUT_FROM
from mock_scheduler.scheduler import DEFAULT_SCHEDULER_ID
from mock_scheduler.support.run_files import CHECKPOINTS_FOLDER
from mock_scheduler.support.text import bullet_list
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.run_state import (
    RecordingPlace,
    RunState,
    check_contents,
    check_files,
    check_same_settings,
    describe_differences,
    find_checkpoints,
    fixed_settings,
    read_run_state,
    training_settings,
)

# Answers that lie in the recording, bit for bit.
_RECORDED_MODES = ("dump", "mock")
_MAX_SHOWN = 10


def read_resumed_state(config: PipelineConfig, *, vocab_size: int) -> RunState | None:
    """Reads where the run to resume stood; ``None`` for a new run.

    Raises:
        ConfigError: it cannot be continued, or the checkpoints to be saved have others in their way.
    """
    resumed = None
    if config.resume_from_checkpoint is not None:
        folder = Path(config.resume_from_checkpoint)
        resumed = read_run_state(folder)
        check_same_settings(folder, resumed, fixed_settings(config, vocab_size=vocab_size))
        check_files(folder, resumed)
        if resumed.next_step >= config.max_steps:
            raise ConfigError(
                f"resume_from_checkpoint: {config.resume_from_checkpoint} is where step {resumed.next_step} starts, "
                f"and max_steps is {config.max_steps}: nothing is left to run; raise max_steps"
            )
    _check_way(config, first_step=resumed.next_step if resumed else 0, vocab_size=vocab_size)
    return resumed


def check_resumed(config: PipelineConfig, resumed: RunState, ranks: RankGroup, *, vocab_size: int) -> None:
    """Checks every bit of the checkpoint, and that the recording is of its timeline. Collective.

    Raises:
        ConfigError: a file of the checkpoint is damaged, or the recording is of another timeline.
    """
    folder = Path(str(config.resume_from_checkpoint))
    check_contents(folder, resumed, ranks)
    if config.rollout_mock.enable and resumed.recording is not None:
        problems = _find_differences(config, resumed, resumed.recording, vocab_size=vocab_size)
        if problems:
            raise ConfigError(
                f"rollout_mock.dump_dir: {config.rollout_mock.dump_dir} is of another timeline than the checkpoint "
                f"{folder}:{bullet_list(problems, limit=_MAX_SHOWN)}\n"
                "Set the dump_dir of the checkpoint's run, a new one where this run records, or resume from a "
                "checkpoint of the recording's run."
            )


# --- Checkpoints in the way -------------------------------------------------------------------------------------------


def checkpoints_root(config: PipelineConfig) -> Path:
    """Names the folder of the run's checkpoints."""
    return Path(config.checkpoint_config.output_dir or Path(config.output_dir) / CHECKPOINTS_FOLDER)


def is_save_due(config: PipelineConfig, next_step: int) -> bool:
    """Says whether a checkpoint is saved before a step."""
    return config.save_steps > 0 and next_step % config.save_steps == 0


def _check_way(config: PipelineConfig, *, first_step: int, vocab_size: int) -> None:
    due = [step for step in range(first_step + 1, config.max_steps + 1) if is_save_due(config, step)]
    root = checkpoints_root(config)
    found = find_checkpoints(root, due)
    if found:
        lines = [f"{folder.name}: {_describe(folder, config, vocab_size)}" for folder in found[:_MAX_SHOWN]]
        lines += [folder.name for folder in found[_MAX_SHOWN:]]
        raise ConfigError(
            f"save_steps: {root} has checkpoints where this run would save its own:"
            f"{bullet_list(lines, limit=_MAX_SHOWN)}\n"
            "Choose another checkpoint_config.output_dir, resume from the last of them (resume_from_checkpoint="
            f"{found[-1]}), or remove them."
        )


def _describe(folder: Path, config: PipelineConfig, vocab_size: int) -> str:
    """Describes a checkpoint in the way by what differs from this run."""
    try:
        state = read_run_state(folder)
    except ConfigError as error:
        return str(error)
    recorded, current = dict(state.fixed), fixed_settings(config, vocab_size=vocab_size)
    if state.is_sealed:
        recorded |= state.training
        current |= training_settings(config, vocab_size=vocab_size)
    differences = describe_differences(recorded, current)
    return "; ".join(differences[:_MAX_SHOWN]) or "of a run with this run's settings"


# --- The recording's timeline -----------------------------------------------------------------------------------------


def read_recording_place(config: PipelineConfig, next_step: int, *, last_mode: object) -> RecordingPlace | None:
    """Reads what a checkpoint before ``next_step`` notes about the recording; ``None`` where the run has none.

    Args:
        last_mode: how the last batch came, as the scheduler's state says.
    """
    if not config.rollout_mock.enable:
        return None
    try:
        reader = RecordingReader(config.rollout_mock.dump_dir)
    except StepNotFoundError:
        return None
    run_id, last_step = reader.manifest.run_id, next_step - 1
    digest = _step_digest(reader, last_step) if last_mode in _RECORDED_MODES else None
    if digest is None:
        return RecordingPlace(run_id=run_id)
    return RecordingPlace(run_id=run_id, last_step=last_step, digest=digest)


def _step_digest(reader: RecordingReader, step: int) -> str | None:
    """Reads the digest in the header of a recorded training step; ``None`` where it is not recorded."""
    name = find_step(reader.storage, step_name(mode="train", scheduler_id=DEFAULT_SCHEDULER_ID, step=step))
    return None if name is None else open_step(reader.storage, name).digest


def _find_differences(
    config: PipelineConfig, resumed: RunState, place: RecordingPlace, *, vocab_size: int
) -> list[str]:
    """Describes every way in which the recording cannot be of the checkpoint's timeline."""
    try:
        reader = RecordingReader(config.rollout_mock.dump_dir)
    except StepNotFoundError:
        return []  # a new recording, or one whose absence is told where it is needed
    own = reader.manifest
    origin = own.provenance.get(CUT_FROM)
    if isinstance(origin, dict) and place.run_id == origin.get("run_id"):
        return []  # a part of the recording, whose steps have other rows
    if own.run_id != place.run_id:
        return [f"the checkpoint is of run {place.run_id}, the recording of run {own.run_id}"]
    return [*_compare_last_step(reader, place), *_compare_later_steps(config, resumed, reader, vocab_size=vocab_size)]


def _compare_last_step(reader: RecordingReader, place: RecordingPlace) -> Iterator[str]:
    if place.last_step is None:
        return
    digest = _step_digest(reader, place.last_step)
    if digest not in (None, place.digest):  # retention may have removed it
        yield (
            f"train step {place.last_step}: the checkpoint was trained on the batch of digest {place.digest}, the "
            f"recording has that of digest {digest}"
        )


def _compare_later_steps(
    config: PipelineConfig, resumed: RunState, reader: RecordingReader, *, vocab_size: int
) -> Iterator[str]:
    """Yields settings of training that make it impossible to play again the steps recorded after the checkpoint.

    The first of them follows from the checkpoint's weights alone, so only later ones are looked at.
    """
    recorded = reader.steps().get(step_folder("train", DEFAULT_SCHEDULER_ID), [])
    later = [
        step
        for step in recorded
        if resumed.next_step < step < config.max_steps
        and config.rollout_mock.mode_of(step=step, kind="train", scheduler_id=DEFAULT_SCHEDULER_ID) == "dump"
    ]
    if later:
        for text in describe_differences(resumed.training, training_settings(config, vocab_size=vocab_size)):
            yield f"train step {later[0]}, which is recorded, would come out differently: {text}"
