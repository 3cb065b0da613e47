"""A mock run stopped after its first step goes on from its checkpoint as if it had never stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from mock_scheduler.errors import ConfigError
from pipelines import run
from pipelines.config.schema import PipelineConfig
from pipelines.environments.registry import build_tokenizer
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


def test_a_checkpoint_that_lost_a_file_is_refused_before_anything_is_built(resumed: Path, tmp_path: Path) -> None:
    """It failed inside Megatron, after all models were built."""
    checkpoint = Path(shutil.copytree(resumed / "whole" / "checkpoints" / "step_000001", tmp_path / "step_000001"))
    size = (checkpoint / "policy" / "common.pt").stat().st_size
    (checkpoint / "policy" / "common.pt").unlink()
    values = yaml.safe_load((resumed / "whole" / "config.yaml").read_text(encoding="utf-8"))
    config = PipelineConfig.model_validate({**values, "resume_from_checkpoint": str(checkpoint)})
    with pytest.raises(ConfigError) as caught:
        run._read_resumed_state(config, build_tokenizer(config))
    assert str(caught.value) == (
        f"resume_from_checkpoint: {checkpoint} is not whole:\n"
        f"  - policy/common.pt: written with {size} bytes, found missing\n"
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
