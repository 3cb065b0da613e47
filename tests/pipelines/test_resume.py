"""A mock run stopped after its first step goes on from its checkpoint as if it had never stopped."""

from __future__ import annotations

import io
import json
import re
import shutil
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mock_scheduler.errors import ConfigError, ExitCode
from mock_scheduler.recording.manifest import decode_manifest, encode_manifest
from pipelines.config.schema import PipelineConfig
from pipelines.environments.registry import build_tokenizer, vocab_size_in_effect
from pipelines.resuming import read_resumed_state
from tests.pipelines.conftest import TinyAlignment
from tests.pipelines.tiny_runs import read_json
from tests.programs import run_program

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def resumed(tiny_alignment: TinyAlignment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``whole``: two steps with a checkpoint after each; ``rest``: the second one from the first's checkpoint, twice in
    the same folder; and two runs that must be refused: a second start of ``rest`` in a folder that holds another run,
    and ``other``, which is not of the checkpoint's kind.
    """
    root = tmp_path_factory.mktemp("resume")
    common = [
        *("--config-path", str(tiny_alignment.configs), "--config-name", "tiny"),
        *("rollout_mock.enable=true", "rollout_mock.mode=mock", f"rollout_mock.dump_dir={tiny_alignment.recording}"),
        "trace.level=full",
        # A rate that changes with every update shows a schedule that is off by one.
        *("training.lr_decay_style=linear", "training.lr_warmup_iters=2", "training.lr_decay_iters=20"),
    ]
    checkpoint = root / "whole" / "checkpoints" / "step_000001"
    cases = [
        [f"output_dir={root / 'whole'}", "save_steps=1"],
        [f"output_dir={root / 'rest'}", f"resume_from_checkpoint={checkpoint}"],
        [f"output_dir={root / 'rest'}", f"resume_from_checkpoint={checkpoint}"],
        [f"output_dir={root / 'rest'}"],
        [f"output_dir={root / 'other'}", f"resume_from_checkpoint={checkpoint}", "seed=1", "precision=bfloat16"],
    ]
    path = root / "cases.json"
    path.write_text(json.dumps([{"arguments": common + case, "environ": {}} for case in cases]), encoding="utf-8")
    finished = run_program("tests.pipelines.several_runs", [str(path)])
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout.splitlines()[-1]) == [0, 0, 0, 5, 5], finished.stderr
    return root


_ZIP_END_BYTES = 22
# Runs of ``second`` -> the changed file of their checkpoint: as it is written now, or as Megatron wrote it of old.
DAMAGED = {
    "flipped-tensor": "policy/rank_00000.safetensors",
    "flipped-random-state": "random_states/rank_00000.safetensors",
    "flipped-run-state": "run_state.json",
}
POISONED = {
    "poisoned-metadata": "policy/.metadata",
    "poisoned-common": "policy/common.pt",
    "poisoned-tensors": "policy/__0_0.distcp",
}


@pytest.fixture(scope="module")
def second(resumed: Path, tiny_alignment: TinyAlignment) -> Path:
    """Further resumes of ``whole``: ``old`` from its checkpoint as releases before seals wrote it; from damaged and
    poisoned ones; ``way`` with a checkpoint in its way; and ``other-run`` with the recording of another run.
    """
    root = resumed / "second"
    checkpoint = Path(shutil.copytree(resumed / "whole" / "checkpoints" / "step_000001", root / "sealed"))
    written = run_program(
        "tests.pipelines.workers.old_checkpoint_writer", [str(resumed / "whole"), str(root / "unsealed")]
    )
    assert written.returncode == 0, written.stderr
    for name, file in DAMAGED.items():
        flip_bit(Path(shutil.copytree(checkpoint, root / f"{name}-checkpoint")) / file)
    for name, file in POISONED.items():
        poison(Path(shutil.copytree(root / "unsealed", root / f"{name}-checkpoint")), file, proof=root / name)
    give_other_run_id(Path(shutil.copytree(tiny_alignment.recording, root / "recording")))
    common = [
        *("--config-path", str(tiny_alignment.configs), "--config-name", "tiny"),
        *("rollout_mock.enable=true", "rollout_mock.mode=mock", f"rollout_mock.dump_dir={tiny_alignment.recording}"),
        *("training.lr_decay_style=linear", "training.lr_warmup_iters=2", "training.lr_decay_iters=20"),
    ]
    resume = "resume_from_checkpoint="
    cases = {
        "old": [f"{resume}{root / 'unsealed'}", "trace.level=full"],
        **{name: [f"{resume}{root / f'{name}-checkpoint'}"] for name in (*DAMAGED, *POISONED)},
        "way": [
            *(f"{resume}{checkpoint}", "save_steps=1", "training.lr=1.0e-3"),
            f"checkpoint_config.output_dir={resumed / 'whole' / 'checkpoints'}",
        ],
        "other-run": [f"{resume}{checkpoint}", f"rollout_mock.dump_dir={root / 'recording'}"],
    }
    told = [{"arguments": [*common, f"output_dir={root / n}-run", *case], "environ": {}} for n, case in cases.items()]
    path = root / "cases.json"
    path.write_text(json.dumps(told), encoding="utf-8")
    finished = run_program("tests.pipelines.several_runs", [str(path)])
    assert finished.returncode == 0, finished.stderr
    codes = dict(zip(cases, json.loads(finished.stdout.splitlines()[-1]), strict=True))
    assert codes == {name: 0 if name == "old" else ExitCode.USAGE for name in cases}, finished.stderr
    (root / "terminal.txt").write_text(finished.stdout + finished.stderr, encoding="utf-8")
    return root


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def poison(checkpoint: Path, file: str, *, proof: Path) -> None:
    """Puts a call before the data of a pickle, and sizes into the last file that fit."""
    path = checkpoint / file
    text = str(proof).encode()
    call = b"cos\nmkdir\nX" + struct.pack("<I", len(text)) + text + b"\x85R0"
    content = path.read_bytes()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as written:
        written.writestr("archive/data.pkl", b"\x80\x02" + call + b"}.")
    if file.endswith(".metadata"):
        path.write_bytes(content[:2] + call + content[2:])
    elif file.endswith(".pt"):
        path.write_bytes(archive.getvalue())
    else:
        # A file of many archives: each is read from its end, where another one now lies.
        ends = [found.start() + _ZIP_END_BYTES for found in re.finditer(b"PK\x05\x06", content)]
        poisoned = bytearray(content)
        for end in ends:
            poisoned[end - len(archive.getvalue()) : end] = archive.getvalue()
        path.write_bytes(poisoned)
    state = read_json(checkpoint / "run_state.json")
    state["files"][file] = path.stat().st_size
    (checkpoint / "run_state.json").write_text(json.dumps(state), encoding="utf-8")


def give_other_run_id(recording: Path) -> None:
    path = recording / "recording.json"
    manifest = decode_manifest(path.read_bytes(), source=str(path))
    path.write_bytes(encode_manifest(replace(manifest, run_id="another-run")))


def message_of(root: Path, name: str) -> str:
    """Why a run of ``second`` was refused; it must have been before it had a folder of its own."""
    assert [path.name for path in (root / f"{name}-run").iterdir()] == ["error.json"]
    return str(read_json(root / f"{name}-run" / "error.json")["message"])


def metrics_of(folder: Path) -> dict[int, dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {
        row["step"]: {name: value for name, value in row["metrics"].items() if not name.startswith("time/")}
        for row in rows
    }


def test_a_checkpoint_of_a_mock_run_says_so_and_where_it_stands(resumed: Path) -> None:
    state = read_json(resumed / "whole" / "checkpoints" / "step_000001" / "run_state.json")
    assert (state["next_step"], state["mode"]) == (1, "mock")
    fixed = {name: value for name, value in state["fixed"].items() if not name.startswith("model.")}
    assert fixed == {
        "seed": 42,
        "precision": "float32",
        "rollout_form": "trajectory",
        "rollout_batch_size": 16,
        "train_env_manager.num_env_groups": 4,
        "train_env_manager.group_size": 4,
        "models": ["policy"],
    }
    assert state["fixed"]["model.vocab_size"] == 69
    assert state["scheduler"] == {
        "mode": "mock",
        "policy_version": 0,
        "last_steps": {"train": 0},
        "scheduler": {},
    }


def test_the_resumed_step_has_the_same_metrics_to_the_bit(resumed: Path) -> None:
    whole, rest = metrics_of(resumed / "whole"), metrics_of(resumed / "rest")
    assert list(whole) == [0, 1]
    assert list(rest) == [1]
    assert rest[1] == whole[1]
    assert read_json(resumed / "rest" / "run.json")["num_steps"] == 1


def test_the_learning_rate_goes_on_where_it_stood(resumed: Path) -> None:
    """Four updates a step, 20 in the decay, of which 2 warm up: the last updates of the steps are 3 and 7 from 0.

    The rate of a resumed run was one ahead: Megatron's schedule adds the stored step to its own.
    """
    rates = [metrics_of(resumed / "whole")[step]["lr"] for step in (0, 1)]
    assert rates == [pytest.approx(2e-3 * 17 / 18, rel=1e-12), pytest.approx(2e-3 * 13 / 18, rel=1e-12)]
    assert metrics_of(resumed / "rest")[1]["lr"] == rates[1]


def test_a_run_of_another_kind_is_refused_before_anything_is_built(resumed: Path) -> None:
    checkpoint = resumed / "whole" / "checkpoints" / "step_000001"
    assert read_json(resumed / "other" / "error.json")["message"] == (
        f"resume_from_checkpoint: {checkpoint} is of a run with other settings, which its tensors, reference policy, "
        "environments or samples follow from:\n"
        "  - seed: the checkpoint has 42, this run has 1\n"
        '  - precision: the checkpoint has "float32", this run has "bfloat16"\n'
        "Set them as they were, or start a new run."
    )
    assert sorted(path.name for path in (resumed / "other").iterdir()) == ["error.json"]


@pytest.mark.parametrize("name", DAMAGED)
def test_a_changed_bit_is_refused_by_file_before_anything_is_built(second: Path, name: str) -> None:
    """One bit of a tensor changed six metrics of the next step, and nothing was said."""
    message = message_of(second, name)
    assert message.startswith(f"resume_from_checkpoint: {second / f'{name}-checkpoint'}")
    assert DAMAGED[name] in message
    assert "is damaged" in message or "run_state.json: " in message


def test_a_checkpoint_without_seals_resumes_to_the_bit_and_says_so(second: Path, resumed: Path) -> None:
    assert metrics_of(second / "old-run")[1] == metrics_of(resumed / "whole")[1]
    file = "trace/step_000001/rank_00000.part_000.safetensors"
    assert (second / "old-run" / file).read_bytes() == (resumed / "whole" / file).read_bytes()
    assert f"{second / 'unsealed'} is unsealed" in (second / "terminal.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", POISONED)
def test_a_poisoned_checkpoint_is_refused_and_not_run(second: Path, name: str) -> None:
    """The code in its pickle ran, and the run ended with 0."""
    assert not (second / name).exists()
    message = str(read_json(second / f"{name}-run" / "error.json")["message"])
    assert "names 'os.mkdir', which is not on the closed list; nothing of it is run" in message
    assert "weights_only" not in message


def test_checkpoints_in_the_way_are_refused_before_anything_is_built(second: Path, resumed: Path) -> None:
    """The run trained the step, and failed when it would have saved."""
    root = resumed / "whole" / "checkpoints"
    assert message_of(second, "way") == (
        f"save_steps: {root} has checkpoints where this run would save its own:\n"
        "  - step_000002: training.lr: the checkpoint has 0.002, this run has 0.001\n"
        "Choose another checkpoint_config.output_dir, resume from the last of them (resume_from_checkpoint="
        f"{root / 'step_000002'}), or remove them."
    )


def test_the_recording_of_another_run_is_refused_before_anything_is_built(
    second: Path, tiny_alignment: TinyAlignment
) -> None:
    run_id = read_json(tiny_alignment.recording / "recording.json")["run_id"]
    assert message_of(second, "other-run") == (
        f"rollout_mock.dump_dir: {second / 'recording'} is of another timeline than the checkpoint {second / 'sealed'}:"
        f"\n  - the checkpoint is of run {run_id}, the recording of run another-run\n"
        "Set the dump_dir of the checkpoint's run, a new one where this run records, or resume from a checkpoint of "
        "the recording's run."
    )


def test_a_checkpoint_that_lost_a_file_is_refused_before_anything_is_built(resumed: Path, tmp_path: Path) -> None:
    """It failed inside Megatron, after all models were built."""
    checkpoint = Path(shutil.copytree(resumed / "whole" / "checkpoints" / "step_000001", tmp_path / "step_000001"))
    path = checkpoint / "policy" / "rank_00000.safetensors"
    size = path.stat().st_size
    path.unlink()
    values = yaml.safe_load((resumed / "whole" / "config.yaml").read_text(encoding="utf-8"))
    config = PipelineConfig.model_validate({**values, "resume_from_checkpoint": str(checkpoint)})
    with pytest.raises(ConfigError) as caught:
        read_resumed_state(config, vocab_size=vocab_size_in_effect(config, build_tokenizer(config)))
    assert str(caught.value) == (
        f"resume_from_checkpoint: {checkpoint} is not whole:\n"
        f"  - policy/rank_00000.safetensors: written with {size} bytes, found missing\n"
        "Copy it again from where it was written, or resume from another checkpoint."
    )


def test_the_resumed_step_has_the_same_gradients_and_parameters_to_the_bit(resumed: Path) -> None:
    whole, rest = (
        (resumed / name / "trace" / "step_000001" / "rank_00000.part_000.safetensors").read_bytes()
        for name in ("whole", "rest")
    )
    assert rest == whole


def test_a_second_run_in_the_folder_of_another_is_refused(resumed: Path) -> None:
    assert read_json(resumed / "rest" / "error.json")["message"] == (
        f"output_dir {resumed / 'rest'} holds the metrics of another run; choose another output_dir, remove the "
        "folder, or continue that run with resume_from_checkpoint"
    )
