"""Every mode of the proxy in the real training loop: what is replayed, what is played, and the same training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.scheduler import RolloutRequest
from tests.pipelines.tiny_runs import read_json, run_several, write_tiny_config

pytestmark = pytest.mark.timeout(600)

STEPS = 4
# Name of the run -> its overrides, in the order in which they are run. {root} is the folder of all.
RUNS: dict[str, list[str]] = {
    "dumped": ["rollout_mock.mode=dump", "save_steps=2"],
    # Two steps replayed, then the real engine goes on where they end.
    "scheduled": ["rollout_mock.mode=mock", "rollout_mock.schedule=[{{mode: real, steps: '2-'}}]"],
    "half": ["rollout_mock.mode=dump", "rollout_mock.steps='0-1'", "rollout_mock.dump_dir={root}/cached"],
    "cached": ["rollout_mock.mode=cache", "rollout_mock.dump_dir={root}/cached"],
    "verified": ["rollout_mock.mode=verify"],
    "other-weights": ["rollout_mock.mode=verify", "training.lr=4.0e-3"],
    "from-checkpoint": ["rollout_mock.mode=mock", "resume_from_checkpoint={root}/dumped/checkpoints/step_000002"],
    "retained": [
        "rollout_mock.mode=dump",
        "rollout_mock.dump_dir={root}/retained-recording",
        "rollout_mock.retention.keep_last=1",
        "save_steps=2",
    ],
    "removed": ["rollout_mock.mode=mock", "rollout_mock.dump_dir={root}/retained-recording"],
    "replayable": [
        "rollout_mock.mode=mock",
        "rollout_mock.dump_dir={root}/retained-recording",
        "resume_from_checkpoint={root}/retained/checkpoints/step_000002",
    ],
    "compressed": [
        "rollout_mock.mode=dump",
        "rollout_mock.compression=zstd",
        "rollout_mock.dump_dir={root}/compressed-recording",
    ],
    "decompressed": ["rollout_mock.mode=mock", "rollout_mock.dump_dir={root}/compressed-recording"],
    "areal": ["+trajectory_debug={{replay_rollout_data: true, path: {root}/recording}}", "~rollout_mock"],
}
EXPECTED_CODES = {"other-weights": 3, "removed": 5}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs, one after the other in one process; ``stderr.txt`` holds what they printed."""
    root = tmp_path_factory.mktemp("modes")
    configs = write_tiny_config(root)
    cases: list[list[str]] = []
    for name, overrides in RUNS.items():
        arguments = [
            *("--config-path", str(configs), "--config-name", "tiny", f"max_steps={STEPS}"),
            *("rollout_mock.enable=true", f"rollout_mock.dump_dir={root / 'recording'}"),
            f"output_dir={root / name}",
            *(override.format(root=root) for override in overrides),
        ]
        if "~rollout_mock" in overrides:
            arguments = [item for item in arguments if "rollout_mock" not in item]
        cases.append(arguments)
    codes, output = run_several(root, cases, log="terminal.txt")
    expected = {name: EXPECTED_CODES.get(name, 0) for name in RUNS}
    assert dict(zip(RUNS, codes, strict=True)) == expected, output
    return root


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["step"]: (row["metrics"]["pg_loss"], row["metrics"]["grad_norm"]) for row in rows}


@pytest.mark.parametrize("name", ["scheduled", "cached", "verified", "decompressed", "areal"])
def test_training_is_that_of_the_recording_run_to_the_bit(runs: Path, name: str) -> None:
    assert losses(runs / name) == losses(runs / "dumped")
    assert len(losses(runs / name)) == STEPS


@pytest.mark.parametrize("name", ["from-checkpoint", "replayable"])
def test_a_replay_starts_at_the_step_of_its_checkpoint(runs: Path, name: str) -> None:
    whole = losses(runs / "dumped")
    assert losses(runs / name) == {step: whole[step] for step in (2, 3)}


def built(folder: Path) -> dict[str, int]:
    ledger = read_json(folder / "ledger.json")
    return {name: ledger["built"][name] for name in ("engine", "scheduler")}


def test_only_runs_that_play_build_an_engine(runs: Path) -> None:
    one, none = {"engine": 1, "scheduler": 1}, {"engine": 0, "scheduler": 0}
    expected = {
        "dumped": one,
        "scheduled": one,
        "cached": one,
        "verified": one,
        "from-checkpoint": none,
        "replayable": none,
        "decompressed": none,
        "areal": none,
    }
    assert {name: built(runs / name) for name in expected} == expected


def test_a_cache_continues_the_recording_that_it_found(runs: Path) -> None:
    reader = RecordingReader(str(runs / "cached"))
    whole = RecordingReader(str(runs / "recording"))
    assert reader.steps() == {"train": [0, 1, 2, 3]}
    for step in range(STEPS):
        request = RolloutRequest(global_step=step, batch_size=16, policy_version=step)
        assert reader.load_step(request).batch.digest() == whole.load_step(request).batch.digest()


def test_verify_names_the_first_value_that_was_played_otherwise(runs: Path) -> None:
    """A doubled learning rate changes the weights after step 0, so that step 1 is the first to be played otherwise."""
    message = read_json(runs / "other-weights" / "error.json")["message"]
    assert "train step 1" in message
    assert "rollout_logprobs" in message or "tokens" in message


def test_retention_leaves_what_can_be_replayed_from_a_checkpoint(runs: Path) -> None:
    assert RecordingReader(str(runs / "retained-recording")).steps() == {"train": [2, 3]}
    message = read_json(runs / "removed" / "error.json")["message"]
    assert "Steps removed by retention: train 0-1" in message


def test_a_foreign_section_is_announced_once(runs: Path) -> None:
    terminal = (runs / "terminal.txt").read_text(encoding="utf-8")
    assert terminal.count("trajectory_debug became rollout_mock") == 1
