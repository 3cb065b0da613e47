"""A checkpoint and a recording are of one timeline, or what differs is said before anything is built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mock_scheduler.errors import ConfigError
from mock_scheduler.recording.writing.opening import open_recording
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.file_seals import FileSeal
from pipelines.megatron.run_state import (
    RecordingPlace,
    RunState,
    checkpoint_folder,
    fixed_settings,
    training_settings,
    write_run_state,
)
from pipelines.resuming import check_resumed, read_recording_place, read_resumed_state
from tests.pipelines.megatron.ranks import one_rank
from tests.recording.builders import make_batch, make_contract, make_info

VOCAB = 69
RUN_ID = "run-1"


def config_of(root: Path, **changes: Any) -> PipelineConfig:
    values: dict[str, Any] = {
        "exp_name": "resuming",
        "output_dir": str(root / "run"),
        "max_steps": 6,
        "resume_from_checkpoint": str(root / "checkpoint"),
        "rollout_mock": {"enable": True, "mode": "dump", "dump_dir": str(root / "recording")},
    }
    return PipelineConfig.model_validate({**values, **changes})


def record(root: Path, steps: range, *, seed: int = 0, run_id: str = RUN_ID) -> None:
    writer = open_recording(
        str(root / "recording"), contract=make_contract(), plan=(), provenance={}, resume=False, run_id=run_id
    )
    for step in steps:
        writer.write_step(make_batch(seed=10 * seed + step), make_info(step, run_id=run_id))
    writer.close()


def checkpoint_of(config: PipelineConfig, next_step: int) -> RunState:
    """The checkpoint that a run of this configuration would leave."""
    return RunState(
        next_step=next_step,
        mode="dump",
        fixed={},
        scheduler={},
        learner={},
        training=training_settings(config, vocab_size=VOCAB),
        recording=read_recording_place(config, next_step, last_mode="dump"),
        files={"none": FileSeal(size_bytes=0, crc32="")},
    )


def problems_of(config: PipelineConfig, state: RunState) -> list[str]:
    """The lines of the refusal; none where the run may go on."""
    try:
        check_resumed(config, state, one_rank(), vocab_size=VOCAB)
    except ConfigError as error:
        return [line.removeprefix("  - ") for line in str(error).splitlines() if line.startswith("  - ")]
    return []


def test_a_checkpoint_notes_run_and_last_step_of_its_recording(tmp_path: Path) -> None:
    record(tmp_path, range(3))
    config = config_of(tmp_path)
    place = read_recording_place(config, 2, last_mode="dump")
    assert place is not None
    assert (place.run_id, place.last_step) == (RUN_ID, 1)
    assert len(place.digest or "") == 64
    assert read_recording_place(config, 2, last_mode="real") == RecordingPlace(run_id=RUN_ID)
    assert read_recording_place(config, 9, last_mode="dump") == RecordingPlace(run_id=RUN_ID)
    off = {"enable": False, "mode": "dump", "dump_dir": str(tmp_path / "recording")}
    assert read_recording_place(config_of(tmp_path, rollout_mock=off), 2, last_mode="real") is None


def test_the_same_timeline_goes_on(tmp_path: Path) -> None:
    record(tmp_path, range(4))
    config = config_of(tmp_path)
    assert problems_of(config, checkpoint_of(config, 2)) == []
    assert problems_of(config_of(tmp_path, max_steps=9), checkpoint_of(config, 2)) == []


def test_a_new_recording_goes_on(tmp_path: Path) -> None:
    record(tmp_path, range(4))
    state = checkpoint_of(config_of(tmp_path), 2)
    new = {"enable": True, "mode": "dump", "dump_dir": str(tmp_path / "new")}
    assert problems_of(config_of(tmp_path, rollout_mock=new), state) == []


def test_a_checkpoint_that_knows_no_recording_goes_with_any(tmp_path: Path) -> None:
    record(tmp_path, range(4))
    config = config_of(tmp_path)
    assert problems_of(config, replace(checkpoint_of(config, 2), recording=None)) == []


def test_another_run_is_named(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    record(tmp_path, range(4), run_id="other")
    state = replace(checkpoint_of(config, 2), recording=RecordingPlace(run_id=RUN_ID))
    assert problems_of(config, state) == [f"the checkpoint is of run {RUN_ID}, the recording of run other"]


def test_another_last_step_of_the_same_run_is_named(tmp_path: Path) -> None:
    """Two branches of a run: each has recorded step 1 of its own."""
    one, two = tmp_path / "one", tmp_path / "two"
    record(one, range(3), seed=1)
    record(two, range(3), seed=2)
    (line,) = problems_of(config_of(two), checkpoint_of(config_of(one), 2))
    assert line.startswith("train step 1: the checkpoint was trained on the batch of digest ")


@pytest.mark.parametrize("changes", [{"training": {"lr": 3e-3}}, {"pg_clip": 0.1}, {"ppo_epochs": 2}])
def test_steps_that_would_be_played_otherwise_are_named_with_the_setting(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """The step after the checkpoint follows from its weights; the next one could not be played again."""
    record(tmp_path, range(4))
    state = checkpoint_of(config_of(tmp_path), 2)
    (line,) = problems_of(config_of(tmp_path, **changes), state)
    assert line.startswith("train step 3, which is recorded, would come out differently: ")
    assert "the checkpoint has" in line
    replayed = {"enable": True, "mode": "mock", "dump_dir": str(tmp_path / "recording")}
    assert problems_of(config_of(tmp_path, **changes, rollout_mock=replayed), state) == []
    assert problems_of(config_of(tmp_path, **changes), replace(state, next_step=3)) == []


def test_a_checkpoint_in_the_way_of_a_new_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    config = config_of(tmp_path, resume_from_checkpoint=None, save_steps=2, seed=1)
    assert read_resumed_state(config, vocab_size=VOCAB) is None
    folder = checkpoint_folder(tmp_path / "run" / "checkpoints", 4)
    folder.mkdir(parents=True)
    other = config.model_copy(update={"seed": 2})
    fixed = fixed_settings(other, vocab_size=VOCAB)
    write_run_state(folder, replace(checkpoint_of(other, 4), fixed=fixed, recording=None))
    with pytest.raises(ConfigError) as caught:
        read_resumed_state(config, vocab_size=VOCAB)
    assert "seed: the checkpoint has 2, this run has 1" in str(caught.value)
    # One between the steps of this run's is in nobody's way.
    assert read_resumed_state(config_of(tmp_path, resume_from_checkpoint=None, save_steps=3), vocab_size=VOCAB) is None
