"""``mock-scheduler doctor`` against a fake launcher that writes what a replay would write."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from mock_scheduler.alignment.executors.protocol import LaunchRun
from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.commands.doctor import run_doctor
from mock_scheduler.determinism.operations import OperationLogHeader
from mock_scheduler.determinism.operations.recorder import record_operations
from mock_scheduler.display.console import Console
from mock_scheduler.errors import AlignmentError, ConfigError, DeterminismError, StepNotFoundError, TraceError
from pipelines.config.loading import load_config
from tests.recording.recordings import record

CONFIG = """
exp_name: lake
output_dir: {output_dir}
max_steps: 20
save_steps: 5
eval_steps: 2
system_envs:
  NCCL_ALGO: Ring
  NVTE_ALLOW_NONDETERMINISTIC_ALGO: '0'
  CUBLAS_WORKSPACE_CONFIG: ':4096:8'
  DETERMINISTIC_MODE: '1'
"""


def write_replay(run: PlannedRun, *, value: float = 1.0, loss: object = 0.5, batch: str = "a", ops: bool = True) -> int:
    """What a completed replay leaves behind, and its exit code."""
    for step in range(run.config.max_steps):
        header = OperationLogHeader(step=step, global_rank=0, world_size=1, settings={"OMP_NUM_THREADS": "1"})
        if ops and run.config.trace.operations:
            factor = torch.tensor(value if step == run.config.max_steps - 1 else 1.0)
            with record_operations(run.output_dir, header, modules={}):
                torch.ones(2).mul(factor)
    steps = range(run.config.max_steps)
    rows = [json.dumps({"step": step, "metrics": {"pg_loss": loss, "time/train": id(run)}}) for step in steps]
    (run.output_dir / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    batches = {str(step): batch for step in steps}
    (run.output_dir / "run.json").write_text(json.dumps({"status": "completed", "batches": batches}))
    return 0


@dataclass
class Bench:
    """A configuration folder, a fake launcher (``behave`` by run), and a console to read back."""

    folder: Path
    behave: dict[str, Callable[[PlannedRun], int]] = field(default_factory=dict)
    started: list[PlannedRun] = field(default_factory=list)
    output: io.StringIO = field(default_factory=io.StringIO)

    def launch(self, run: PlannedRun) -> int:
        self.started.append(run)
        return self.behave.get(run.name, write_replay)(run)

    def make_launch(self, config_name: str, config_path: Path) -> LaunchRun:
        return self.launch

    def doctor(self, *overrides: str, **options: object) -> int:
        return run_doctor(
            "lake",
            config_path=self.folder,
            overrides=overrides,
            make_launch=self.make_launch,
            console=Console(file=self.output, width=300),
            **({"output_dir": None} | options),
        )

    @property
    def root(self) -> Path:
        return self.folder / "out" / "doctor"

    def result(self) -> dict:
        return json.loads((self.root / "doctor.json").read_text())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    (tmp_path / "lake.yaml").write_text(CONFIG.format(output_dir=tmp_path / "out"))
    return Bench(tmp_path)


def test_one_step_is_recorded_and_replayed_twice_and_nothing_else(bench: Bench) -> None:
    assert bench.doctor(step=1) == 0
    configs = [load_config("lake", config_path=bench.folder, overrides=run.overrides) for run in bench.started]
    assert [run.name for run in bench.started] == ["recorder", "first", "second"]
    assert [config.rollout_mock.effective_mode for config in configs] == ["dump", "mock", "mock"]
    assert {config.rollout_mock.dump_dir for config in configs} == {str(bench.root / "recording")}
    assert [config.trace.operations for config in configs] == [False, True, True]
    assert {(config.max_steps, config.eval_steps, config.save_steps) for config in configs} == {(2, 0, 0)}


def test_it_says_beforehand_how_much_it_will_run(bench: Bench) -> None:
    assert bench.doctor(step=1) == 0
    assert bench.output.getvalue().startswith("2 steps (0 to 1) in each of 3 runs: recorder, first, second\n")
    bench.output.truncate(0)
    bench.output.seek(0)
    assert bench.doctor(recording=bench.folder / "rec") == 0
    assert bench.output.getvalue().startswith("1 step (0) in each of 2 runs: first, second\n")


def test_a_step_that_the_run_does_not_have_is_refused_unless_a_recording_has_it(bench: Bench) -> None:
    """``--step 99`` of a run of 20 steps went on for 100 steps, three times."""
    with pytest.raises(ConfigError) as caught:
        bench.doctor(step=20)
    assert str(caught.value) == "--step is 20; the configuration has steps 0 to 19 (max_steps=20)"
    recording = bench.folder / "rec"
    record(recording, [0, 20])
    with pytest.raises(ConfigError) as caught:
        bench.doctor(step=21, recording=recording)
    assert str(caught.value) == (
        f"--step is 21; the configuration has steps 0 to 19 (max_steps=20), and the recording {recording} has train 0, "
        "20"
    )
    with pytest.raises(StepNotFoundError, match="Recording not found"):
        bench.doctor(step=20, recording=bench.folder / "typo")
    assert bench.started == []
    assert bench.doctor(step=20, recording=recording) == 0


def test_equal_replays_are_identical(bench: Bench, tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    assert bench.doctor(step=1, json_path=copy) == 0
    result = bench.result()
    assert json.loads(copy.read_text()) == result
    assert (result["verdict"], result["exit_code"], result["num_operations"], result["num_digests"]) == (
        "identical",
        0,
        4,
        8,
    )
    assert "identical: every operation, batch and metric is equal to the last bit" in bench.output.getvalue()


def test_the_first_difference_is_named_with_its_cause_and_exit_code_4(bench: Bench) -> None:
    bench.behave["second"] = lambda run: write_replay(run, value=2.0)
    assert bench.doctor(step=2) == 4
    origin = bench.result()["steps"][-1]["origin"]
    assert (origin["kind"], origin["first"]["operator"]) == ("differed before the step used it", "aten.mul.Tensor")
    assert [step["step"] for step in bench.result()["steps"]] == [0, 1, 2]
    assert "first difference: step 2, rank 0: differed before the step used it" in bench.output.getvalue()


def test_a_metric_alone_that_differs_is_a_difference(bench: Bench) -> None:
    bench.behave["second"] = lambda run: write_replay(run, loss=0.25)
    assert bench.doctor() == 4
    assert bench.result()["others"] == ["metric pg_loss of step 0: 0.5 and 0.25"]
    text = bench.output.getvalue()
    assert "no operation that torch dispatches differs; what follows was computed by something else" in text


def test_a_metric_that_is_nan_in_both_is_equal_and_a_signed_zero_is_not(bench: Bench) -> None:
    bench.behave = dict.fromkeys(("first", "second"), lambda run: write_replay(run, loss="nan"))
    assert bench.doctor() == 0
    bench.behave = {
        "first": lambda run: write_replay(run, loss=0.0),
        "second": lambda run: write_replay(run, loss=-0.0),
    }
    assert bench.doctor() == 4
    assert bench.result()["others"] == ["metric pg_loss of step 0: 0.0 and -0.0"]


def test_what_a_replay_says_about_itself_is_checked(bench: Bench) -> None:
    """A run.json without batches was a KeyError, and metrics that were cut off a JSONDecodeError without a name."""

    def without_batches(run: PlannedRun) -> int:
        write_replay(run)
        (run.output_dir / "run.json").write_text('{"status": "going", "batches": {"zero": "a"}}')
        return 0

    def cut_off(run: PlannedRun) -> int:
        write_replay(run)
        (run.output_dir / "metrics.jsonl").write_text('{"step": 0, "met\n')
        return 0

    bench.behave["second"] = without_batches
    with pytest.raises(AlignmentError) as caught:
        bench.doctor()
    assert str(caught.value) == (
        f"{bench.root / 'second' / 'run.json'}: status is 'going', expected 'completed'; batches is {{'zero': 'a'}}, "
        "expected an object of digests by step"
    )
    bench.behave["second"] = cut_off
    with pytest.raises(TraceError, match=r"second/metrics\.jsonl:1: not JSON .*; the run may have been cut off$"):
        bench.doctor()


def test_other_batches_are_a_difference(bench: Bench) -> None:
    bench.behave["second"] = lambda run: write_replay(run, batch="b")
    assert bench.doctor() == 4
    assert bench.result()["others"] == ["the batch of step 0"]


def test_replays_without_operation_logs_are_an_error_never_a_pass(bench: Bench) -> None:
    bench.behave = dict.fromkeys(("first", "second"), lambda run: write_replay(run, ops=False))
    with pytest.raises(TraceError, match="step 0: the first run has operation logs of ranks \\[\\]"):
        bench.doctor()


def test_nothing_to_compare_is_unverified(bench: Bench) -> None:
    def write_views(run: PlannedRun) -> int:
        write_replay(run, ops=False)
        tensor = torch.ones(2)
        header = OperationLogHeader(step=0, global_rank=0, world_size=1, settings={})
        with record_operations(run.output_dir, header, modules={}):
            tensor.view(2, 1)
        return 0

    bench.behave = dict.fromkeys(("first", "second"), write_views)
    assert bench.doctor() == 4
    assert bench.result()["verdict"] == "nothing compared"
    assert "unverified: there was nothing to compare" in bench.output.getvalue()


def test_a_run_that_fails_is_no_difference(bench: Bench) -> None:
    def fail(run: PlannedRun) -> int:
        error = {"type": "LayoutError", "message": "too few", "exit_code": 5, "global_rank": 0}
        (run.output_dir / "error.json").write_text(json.dumps(error))
        return 5

    bench.behave["second"] = fail
    with pytest.raises(AlignmentError) as caught:
        bench.doctor()
    log = bench.root / "second" / "run.log"
    assert str(caught.value) == (
        "the second run failed (exit code 5), so nothing was compared: LayoutError: too few\n"
        f"its whole output is in {log}"
    )
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("code", [1, 70, 137])
def test_a_run_that_crashed_is_never_taken_for_a_verdict(bench: Bench, code: int) -> None:
    bench.behave["first"] = lambda run: code
    with pytest.raises(AlignmentError) as caught:
        bench.doctor()
    assert caught.value.exit_code == (70 if code == 1 else code)


def test_a_recording_that_is_given_or_configured_is_replayed(bench: Bench) -> None:
    assert bench.doctor(recording=bench.folder / "rec") == 0
    assert bench.doctor("rollout_mock.enable=true", "rollout_mock.mode=mock", "rollout_mock.dump_dir=/data/rec") == 0
    assert [run.name for run in bench.started] == ["first", "second"] * 2
    dumps = [run.config.rollout_mock.dump_dir for run in bench.started]
    assert dumps == [str(bench.folder / "rec")] * 2 + ["/data/rec"] * 2


def test_its_own_recording_can_be_replayed_again(bench: Bench) -> None:
    assert bench.doctor() == 0
    (bench.root / "recording").mkdir()
    assert bench.doctor(recording=bench.root / "recording") == 0
    assert (bench.root / "recording").is_dir()
    assert bench.doctor() == 0
    assert not (bench.root / "recording").exists()


def test_a_folder_that_is_not_its_own_is_left_alone(bench: Bench) -> None:
    bench.root.mkdir(parents=True)
    (bench.root / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError) as caught:
        bench.doctor()
    assert str(caught.value) == (
        f"{bench.root} was not made by mock-scheduler doctor (no .mock-scheduler-doctor or doctor.json in it), so "
        "nothing in it is removed; choose another folder (--output-dir)"
    )
    assert (bench.root / "thesis.tex").read_text() == "x"


def test_what_cannot_be_run_is_refused_before_anything_starts(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="--step is -1; it must be the number of a training step, from 0"):
        bench.doctor(step=-1)
    with pytest.raises(ConfigError, match=r"doctor sets max_steps, trace\.operations itself"):
        bench.doctor("max_steps=3", "trace.operations=true")
    with pytest.raises(ConfigError, match=r"entry: there is no Python module 'no\.such'"):
        bench.doctor(entry="no.such")
    with pytest.raises(DeterminismError, match="NCCL_ALGO is 'Tree'"):
        bench.doctor("system_envs.NCCL_ALGO=Tree")
    assert bench.started == []
