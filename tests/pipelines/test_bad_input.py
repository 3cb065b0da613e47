"""Bad input through the real command line: early, clear, and whole sentences that say what to do.

What the launcher refuses is refused in this process before anything starts; what a run refuses is tried in one process
for all cases, on the recording that the end-to-end test made.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from mock_scheduler.cli import main
from tests.pipelines.conftest import TinyAlignment
from tests.pipelines.tiny_runs import ROOT, read_json, run_command
from tests.programs import run_program

pytestmark = pytest.mark.timeout(600)

CONFIGS = ROOT / "configs"
ORIGIN = f"configuration 'quickstart' ({CONFIGS}/quickstart.yaml) has 1 problem:\n"

# What each run changes against the one that recorded.
RUN_CASES = {
    "too many steps": ["max_steps=4"],
    "validation": ["eval_steps=1"],
    "wrong folder": ["rollout_mock.dump_dir={folder}/nowhere"],
    "flipped bit": ["rollout_mock.dump_dir={root}/flipped"],
    "vocabulary": ["custom_envs.FrozenLake.env_config.size=4"],
    "padded vocabulary": ["model.vocab_size=128"],
    "sequence length": ["sequence_length=96"],
    "processes": [],
    "batch": ["rollout_batch_size=32"],
    "not deterministic": ["system_envs.DETERMINISTIC_MODE='0'"],
    "other settings": ["system_envs.NCCL_ALGO=CollnetDirect"],
}
ENVIRON = {"processes": {"WORLD_SIZE": "2"}}


def refused_by_the_launcher(
    capsys: pytest.CaptureFixture[str], *overrides: str, exit_code: int = 5, command: str = "launch"
) -> str:
    """The message of ``mock-scheduler launch quickstart OVERRIDES`` on stderr."""
    assert main([command, "--config-path", str(CONFIGS), "quickstart", *overrides]) == exit_code
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    return text.removeprefix("error: ").removesuffix("\n")


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def run_errors(tiny_alignment: TinyAlignment, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """The ``error.json`` of every case."""
    root = tmp_path_factory.mktemp("bad_input")
    shutil.copytree(tiny_alignment.recording, root / "flipped")
    flip_last_bit(root / "flipped" / "train" / "step_000001.safetensors")
    cases = [
        {
            "arguments": [
                *("--config-path", str(tiny_alignment.configs), "--config-name", "tiny"),
                *("rollout_mock.enable=true", "rollout_mock.mode=mock"),
                f"rollout_mock.dump_dir={tiny_alignment.recording}",
                f"output_dir='{root / name}'",
                *(override.format(folder=tiny_alignment.folder, root=root) for override in overrides),
            ],
            "environ": ENVIRON.get(name, {}),
        }
        for name, overrides in RUN_CASES.items()
    ]
    path = root / "cases.json"
    path.write_text(json.dumps(cases), encoding="utf-8")
    finished = run_program("tests.pipelines.several_runs", [str(path)])
    assert finished.returncode == 0, finished.stderr
    errors = {name: read_json(root / name / "error.json") for name in RUN_CASES}
    assert json.loads(finished.stdout.splitlines()[-1]) == [error["exit_code"] for error in errors.values()]
    return errors


def message_of(error: dict, kind: str, exit_code: int) -> str:
    assert (error["type"], error["exit_code"], error["global_rank"]) == (kind, exit_code, 0)
    return error["message"]


def test_an_unknown_mode_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused_by_the_launcher(capsys, "rollout_mock.mode=replay") == (
        f"{ORIGIN}  - rollout_mock.mode: unknown mode 'replay'; known modes: real, dump, mock, "
        "cache, verify (given as 'rollout_mock.mode=replay')"
    )


def test_an_unknown_key_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused_by_the_launcher(capsys, "rollout_mock.dump_dirr=./x") == (
        f"{ORIGIN}  - rollout_mock.dump_dirr: unknown key; nearest known key: rollout_mock.dump_dir; known keys of "
        "rollout_mock: allow_nondeterministic, background, compression, dump_dir, enable, every, missing_step, mode, "
        "on_difference, on_duplicate_rows, on_implausible_rows, on_low_disk, on_mismatch, on_partial_groups, origin, "
        "random_states, retention, schedule, steps (given as 'rollout_mock.dump_dirr=./x')"
    )


def test_a_layout_that_does_not_divide_is_refused_with_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    text = refused_by_the_launcher(
        capsys, "parallel.tensor_model_parallel_size=3", "parallel.pipeline_model_parallel_size=4"
    )
    assert text == (
        f"{ORIGIN}  - layout tp3 pp4 dp1 (12 processes: tp 3, pp 4, vpp 1, cp 1, ep 1, etp 1, dp 1, sequence "
        "parallelism off) cannot be run:\n"
        "    - model.num_attention_heads 4 is not a multiple of tensor_model_parallel_size 3\n"
        "    - model.num_query_groups 2 is not a multiple of tensor_model_parallel_size 3\n"
        "    - model.ffn_hidden_size 128 is not a multiple of tensor_model_parallel_size 3\n"
        "    - model.num_layers 2 is not a multiple of pipeline_model_parallel_size 4"
    )


def test_a_missing_determinism_setting_is_refused_with_the_line_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused_by_the_launcher(capsys, "~system_envs.NCCL_ALGO", exit_code=4) == (
        "system_envs do not make a deterministic run:\n"
        "    - NCCL_ALGO is not set; set it to 'Ring'\n"
        "  Write in the configuration:\n"
        "  system_envs:\n"
        "    NCCL_ALGO: 'Ring'\n"
        "  docs/determinism.md explains it"
    )


def test_an_environment_that_comes_too_late_is_refused_with_the_way_to_start(tmp_path: Path) -> None:
    """Python itself reads PYTHONHASHSEED when it starts; a run started by hand has missed it."""
    arguments = ["-m", "pipelines.agentic", "--config-name", "quickstart", f"output_dir={tmp_path / 'run'}"]
    finished = run_command(arguments, environ={"PYTHONHASHSEED": "1"})
    assert finished.returncode == 4
    assert message_of(read_json(tmp_path / "run" / "error.json"), "DeterminismError", 4) == (
        "too late to set in this process:\n"
        "  - PYTHONHASHSEED is '1', must be '0', and is read by Python when the Python interpreter starts\n"
        "Start the run through launch/train.sh (or export it before python)."
    )
    assert "Traceback" not in finished.stderr


def test_more_steps_than_were_recorded_are_refused_before_the_first(
    run_errors: dict[str, dict], tiny_alignment: TinyAlignment
) -> None:
    recording = tiny_alignment.recording
    assert message_of(run_errors["too many steps"], "StepNotFoundError", 5) == (
        f"[Rollout Mock] Mock file not found: {recording}/train/step_000002.safetensors (and 1 more)\n"
        "Possible reasons:\n"
        "  1. Steps train 2-3 were not run in dump mode\n"
        f"  2. dump_dir configuration is incorrect: {recording}\n"
        "  3. mode mismatch (current: train)\n"
        "Steps present: train 0-1\n"
        "Please run in dump mode first to ensure all step data is generated."
    )


def test_validation_on_a_recording_of_training_is_refused(
    run_errors: dict[str, dict], tiny_alignment: TinyAlignment
) -> None:
    recording = tiny_alignment.recording
    assert message_of(run_errors["validation"], "StepNotFoundError", 5) == (
        f"[Rollout Mock] Mock file not found: {recording}/val/step_000000.safetensors (and 2 more)\n"
        "Possible reasons:\n"
        "  1. Steps val 0-2 were not run in dump mode\n"
        f"  2. dump_dir configuration is incorrect: {recording}\n"
        "  3. mode mismatch (current: val)\n"
        "Steps present: train 0-1\n"
        "Please run in dump mode first to ensure all step data is generated."
    )


def test_a_folder_without_a_recording_is_refused_by_name(
    run_errors: dict[str, dict], tiny_alignment: TinyAlignment
) -> None:
    wrong = tiny_alignment.folder / "nowhere"
    assert message_of(run_errors["wrong folder"], "StepNotFoundError", 5) == (
        f"[Rollout Mock] Recording not found: {wrong}/recording.json\n"
        "Possible reasons:\n"
        "  1. No run in dump mode has recorded here\n"
        f"  2. dump_dir configuration is incorrect: {wrong}\n"
        f"Recordings nearby: {tiny_alignment.recording}\n"
        "Please run in dump mode first to ensure all step data is generated."
    )


def test_one_flipped_bit_in_the_last_step_is_refused_before_the_first(run_errors: dict[str, dict]) -> None:
    """Digests were checked at the load of each step: the run trained all steps before the damaged one first."""
    text = message_of(run_errors["flipped bit"], "CorruptRecordingError", 5)
    path = text.partition(": ")[0]
    assert path.endswith("/flipped/train/step_000001.safetensors")
    assert text == (
        f"{path}: tensor 'terminations' does not match its digest: the file was changed after it was written. "
        "Restore it from a copy or record the step again."
    )
    assert not (Path(path).parents[2] / "flipped bit" / "metrics.jsonl").exists()


def contract_text(tiny_alignment: TinyAlignment, *lines: str) -> str:
    count = "1 field" if len(lines) == 1 else f"{len(lines)} fields"
    listed = "".join(f"\n  {line}" for line in lines)
    return f"[Rollout Mock] This run breaks the contract of {tiny_alignment.recording} in {count}:{listed}"


def other_weights(recorded: str, current: str) -> str:
    return (
        f"initial_weights: recorded {recorded}, current {current} (other content). They follow from seed, the model "
        "section and the vocabulary: set these as in the recording run."
    )


def test_another_map_size_is_another_vocabulary(run_errors: dict[str, dict], tiny_alignment: TinyAlignment) -> None:
    text = message_of(run_errors["vocabulary"], "ContractError", 3)
    # The digests of vocabularies and weights are the only part that is not spelled out.
    digests = re.findall(r"(?:recorded|current) ([0-9a-f]{12})\b", text)
    assert len(set(digests)) == 4
    assert text == contract_text(
        tiny_alignment,
        f"vocabulary: recorded {digests[0]}, current {digests[1]} (other content). The recorded token ids mean "
        "something else here (118 tokens now): use the recording run's environments.",
        "model.vocab_size: recorded 69, current 118. Set model.vocab_size as in the recording run.",
        other_weights(*digests[2:]),
        "custom_envs.FrozenLake.env_config.size: recorded 3, current 4. Set custom_envs.FrozenLake.env_config.size as "
        "in the recording run.",
    )


def test_another_vocabulary_size_of_the_model_is_refused(
    run_errors: dict[str, dict], tiny_alignment: TinyAlignment
) -> None:
    text = message_of(run_errors["padded vocabulary"], "ContractError", 3)
    digests = re.findall(r"(?:recorded|current) ([0-9a-f]{12})\b", text)
    assert len(set(digests)) == 2
    assert text == contract_text(
        tiny_alignment,
        "model.vocab_size: recorded 69, current 128. Set model.vocab_size as in the recording run.",
        other_weights(*digests),
    )


def test_another_sequence_length_is_refused(run_errors: dict[str, dict], tiny_alignment: TinyAlignment) -> None:
    assert message_of(run_errors["sequence length"], "ContractError", 3) == contract_text(
        tiny_alignment, "sequence_length: recorded 192, current 96. Set sequence_length as in the recording run."
    )


def test_another_batch_size_is_refused(run_errors: dict[str, dict], tiny_alignment: TinyAlignment) -> None:
    assert message_of(run_errors["batch"], "ContractError", 3) == contract_text(
        tiny_alignment, "rollout_batch_size: recorded 16, current 32. Set rollout_batch_size as in the recording run."
    )


def test_settings_that_changed_since_the_recording_are_refused(
    run_errors: dict[str, dict], tiny_alignment: TinyAlignment
) -> None:
    assert message_of(run_errors["other settings"], "ContractError", 3) == contract_text(
        tiny_alignment,
        'determinism.NCCL_ALGO: recorded "Ring", current "CollnetDirect". Set system_envs as in the recording run.',
    )


def test_a_wrong_number_of_processes_is_refused_before_anything_communicates(run_errors: dict[str, dict]) -> None:
    assert message_of(run_errors["processes"], "LayoutError", 5) == (
        "layout tp1 pp1 dp1 needs 1 × 1 × 1 = 1 processes, but 2 were started. Start the run with launch/train.sh, "
        "which takes the number from the configuration, or set parallel.data_parallel_size."
    )


def test_a_replay_without_deterministic_mode_is_refused_with_the_lines_to_write(run_errors: dict[str, dict]) -> None:
    assert message_of(run_errors["not deterministic"], "DeterminismError", 4) == (
        "rollout_mock.mode mock without deterministic settings proves nothing: two runs would differ by themselves. "
        "Add to the configuration:\n"
        "  system_envs:\n"
        "    NCCL_ALGO: 'Ring'\n"
        "    NVTE_ALLOW_NONDETERMINISTIC_ALGO: '0'\n"
        "    CUBLAS_WORKSPACE_CONFIG: ':4096:8'\n"
        "    DETERMINISTIC_MODE: '1'\n"
        "or set rollout_mock.allow_nondeterministic=true to go on without them."
    )


def test_nothing_of_a_refused_run_is_left_but_its_error(
    run_errors: dict[str, dict], tiny_alignment: TinyAlignment
) -> None:
    """No model was built and no metrics begun, and the recording is as it was."""
    assert sorted(path.name for path in (tiny_alignment.recording / "train").iterdir()) == [
        "step_000000.safetensors",
        "step_000001.safetensors",
    ]
    assert not (tiny_alignment.folder / "nowhere").exists()
