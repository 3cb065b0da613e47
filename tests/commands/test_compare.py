"""``mock-scheduler compare`` on folders as two finished runs leave them."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.commands.compare import CompareOptions, run_compare, run_replicas
from mock_scheduler.comparison.pairing.selection import EVERYTHING
from mock_scheduler.config.loading import dump_config
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.display.console import Console
from mock_scheduler.errors import AlignmentError, ConfigError
from mock_scheduler.run_folder.inputs import parse_selection
from pipelines.config.loading import load_config
from pipelines.program import PROGRAM
from tests.alignment.test_align import CONFIG, NORM, write_results


@dataclass
class Runs:
    """Makes run folders, compares two of them, and keeps what was printed."""

    folder: Path
    output: io.StringIO = field(default_factory=io.StringIO)

    def make(self, name: str, *overrides: str, gradient: float = 1.0, batches: tuple[str, str] = ("a", "b")) -> Path:
        """A finished run in mock, under this folder; ``batches``: the digests of what its two steps trained on."""
        (self.folder / "lake.yaml").write_text(CONFIG.format(output_dir="out"))
        chosen = [
            *("rollout_mock.enable=true", "rollout_mock.mode=mock", "trace.level=full"),
            f"rollout_mock.dump_dir='{self.folder / 'recording'}'",
            *overrides,
        ]
        config = load_config("lake", config_path=self.folder, overrides=chosen)
        run = PlannedRun(
            program=PROGRAM,
            name=name,
            entry="",
            own_overrides=(),
            overrides=(),
            config=config,
            output_dir=self.folder / name,
        )
        run.output_dir.mkdir()
        write_results(run, gradient=gradient, batches=batches)
        (run.output_dir / "config.yaml").write_text(dump_config(config))
        return run.output_dir

    def compare(self, baseline: Path, candidate: Path, *, json_path: Path | None = None) -> int:
        options = CompareOptions(json_path=None if json_path is None else str(json_path))
        return run_compare(baseline, candidate, options, console=Console(file=self.output, width=100))

    def refused(self, kind: type[Exception], baseline: Path, candidate: Path) -> str:
        with pytest.raises(kind) as caught:
            self.compare(baseline, candidate)
        assert self.output.getvalue() == ""
        return str(caught.value)


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_two_equal_runs_are_identical(runs: Runs) -> None:
    code = runs.compare(runs.make("base"), runs.make("tp2", "parallel.tensor_model_parallel_size=2"))
    printed = runs.output.getvalue()
    assert code == 0
    assert "identical: tp2 against base\n" in printed
    assert "one changed bit would have been found" in " ".join(printed.split())


def test_another_gradient_is_diverged_and_named_in_the_json(runs: Runs) -> None:
    json_path = runs.folder / "verdict.json"
    assert runs.compare(runs.make("base"), runs.make("new", gradient=1.5), json_path=json_path) == 1
    result = json.loads(json_path.read_text())
    run = result["baseline"]["run"]
    assert (result["exit_code"], run["name"], run["elapsed_s"]) == (1, "base", 10.0)
    assert (result["candidate"]["name"], result["verdict"]) == ("new", "diverged")
    assert (result["first_divergence"]["kind"], result["first_divergence"]["name"]) == ("gradient", NORM)


def test_the_candidates_tolerance_decides(runs: Runs) -> None:
    loose = "align.tolerance={gradient: 1.0}"
    assert runs.compare(runs.make("base"), runs.make("loose", loose, gradient=1.5)) == 0
    assert "rounding: loose against base\n" in runs.output.getvalue()


@pytest.mark.parametrize("side", ["base", "new"])
def test_a_difference_is_unverified_where_one_run_was_not_deterministic(runs: Runs, side: str) -> None:
    loose = ("system_envs.DETERMINISTIC_MODE='0'", "rollout_mock.allow_nondeterministic=true")
    base = runs.make("base", *(loose if side == "base" else ()))
    assert runs.compare(base, runs.make("new", *(loose if side == "new" else ()), gradient=1.5)) == 4


def test_runs_that_trained_on_other_rollouts_are_incomparable(runs: Runs) -> None:
    """Two recordings made in the same folder were told apart by what lay in the folder later."""
    base, new = runs.make("base"), runs.make("new", batches=("a", "c"))
    assert runs.compare(base, new) == 3
    printed = " ".join(runs.output.getvalue().split())
    assert (
        "the two runs trained on other rollouts from step 1 on (1 of 2 steps), so nothing in their "
        "training can be compared; replay the baseline's recording in the candidate: rollout_mock.mode=mock and its "
        "rollout_mock.dump_dir"
    ) in printed


@pytest.mark.parametrize("side", ["base", "new"])
def test_a_run_without_a_trace_is_refused_with_the_key_to_set(runs: Runs, side: str) -> None:
    base, new = runs.make("base"), runs.make("new")
    shutil.rmtree(runs.folder / side / "trace")
    assert runs.refused(AlignmentError, base, new) == (
        f"{runs.folder / side} has no trace (its run had trace.level=full), and a comparison of gradients and "
        "parameters needs one; run it again with trace.level=full"
    )


def test_a_run_that_has_not_completed_is_refused(runs: Runs) -> None:
    base, new = runs.make("base"), runs.make("new")
    (new / "run.json").unlink()
    assert runs.refused(AlignmentError, base, new) == (
        f"{new} has no run.json: its run has not completed (it is still running, or {new}/error.json says why it "
        "failed)"
    )


def test_a_folder_that_is_no_run_is_refused(runs: Runs) -> None:
    base = runs.make("base")
    assert runs.refused(ConfigError, base, runs.folder / "typo") == f"{runs.folder}/typo does not exist"
    (runs.folder / "typo").mkdir()
    assert runs.refused(ConfigError, base, runs.folder / "typo") == (
        f"{runs.folder}/typo cannot be compared; give a run's output_dir (with config.yaml), a trace (with "
        "step_000000/), metrics (metrics.jsonl) or a recording (with recording.json)"
    )


def test_what_is_wrong_with_either_folder_is_said_at_once(runs: Runs) -> None:
    base = runs.make("base")
    shutil.rmtree(base / "trace")
    text = runs.refused(AlignmentError, base, runs.folder / "typo")
    assert text.splitlines() == [
        f"{base} has no trace (its run had trace.level=full), and a comparison of gradients and "
        "parameters needs one; run it again with trace.level=full",
        f"{runs.folder}/typo does not exist",
    ]


def test_the_folder_of_an_alignment_is_told_with_the_runs_in_it(runs: Runs) -> None:
    """It was called nothing that can be compared, with the names of files that it need not have."""
    base, folder = runs.make("base"), runs.folder / "align"
    (folder / "proofs").mkdir(parents=True)
    (folder / "align.json").write_text("{}")
    what = f"{folder} is the folder of an alignment, not of a run"
    assert runs.refused(ConfigError, folder, base) == f"{what}, and it has no finished run"
    for name in ("proofs/noise-0", "dp2", "baseline"):
        (folder / name).mkdir()
        (folder / name / "run.json").write_text("{}")
    (folder / "going").mkdir()
    assert runs.refused(ConfigError, folder, base) == (
        f"{what}; give one of its runs, such as {folder}/dp2: baseline, dp2, proofs/noise-0"
    )


def test_a_step_that_is_not_there_is_refused_with_those_that_are(runs: Runs) -> None:
    base, new = runs.make("base"), runs.make("new")
    (new / "trace" / "step_000001").rename(new / "trace" / "step_000004")
    (new / "metrics.jsonl").unlink()
    options = CompareOptions(selection=parse_selection(steps=StepRanges.parse("7")))
    with pytest.raises(ConfigError) as caught:
        run_compare(base, new, options)
    assert str(caught.value) == "steps 7: there is no such step; base has steps 0-1; new has steps 0, 4"
    with pytest.raises(ConfigError) as caught:
        run_replicas(new, options.selection)
    assert str(caught.value) == f"steps 7: there is no such step; {new} has steps 0, 4"


def test_a_run_is_not_compared_with_itself(runs: Runs) -> None:
    base = runs.make("base")
    (runs.folder / "link").symlink_to(base)
    assert runs.refused(ConfigError, base, runs.folder / "link") == (
        f"{base} and {runs.folder}/link are the same folder; give two different ones"
    )


def test_two_trace_folders_are_compared_without_their_runs(runs: Runs) -> None:
    base, new = runs.make("base"), runs.make("new", gradient=1.5)
    assert runs.compare(base / "trace", new / "trace") == 1
    assert "diverged: new against base\n" in runs.output.getvalue()


def test_two_metric_logs_are_compared_and_say_that_they_prove_little(runs: Runs) -> None:
    base, new = runs.make("base"), runs.make("new", gradient=1.5)
    assert runs.compare(base / "metrics.jsonl", new / "metrics.jsonl") == 0
    assert "metrics alone do not prove that gradients are equal" in " ".join(runs.output.getvalue().split())


def test_a_run_and_a_trace_are_refused_with_the_path_to_give(runs: Runs) -> None:
    base, new = runs.make("base"), runs.make("new")
    assert runs.refused(ConfigError, base, new / "trace") == (
        f"{base} is a run and {new}/trace is a trace, and the two cannot be compared; give the run's trace, "
        f"{base}/trace"
    )


def test_a_stored_configuration_that_could_not_run_here_still_loads(runs: Runs) -> None:
    """A run of another Megatron was refused by the rules about layouts that this one computes wrongly."""
    base, new = runs.make("base"), runs.make("new")
    for folder in (base, new):
        path = folder / "config.yaml"
        path.write_text(path.read_text().replace("tensor_model_parallel_size: 1", "tensor_model_parallel_size: 777"))
    assert runs.compare(base, new) == 0


def test_what_is_wrong_in_a_stored_configuration_is_listed(runs: Runs) -> None:
    base, new = runs.make("base"), runs.make("new")
    (new / "config.yaml").write_text("trace: [full]\nalign: {tolerance: {gradient: -1}}\n")
    assert runs.refused(ConfigError, base, new) == (
        f"{new}/config.yaml is not the configuration of a run:"
        "\n  - precision is None, expected a text"
        "\n  - trace is ['full'], expected keys"
        "\n  - trace.level is None, expected a text"
        "\n  - align.tolerance.gradient: is -1, should be greater than or equal to 0"
    )


def test_a_bound_on_the_command_line_goes_over_the_candidates(runs: Runs) -> None:
    base, new = runs.make("base"), runs.make("new", gradient=1.5)
    options = CompareOptions(tolerance=("gradient=1.0",))
    assert run_compare(base, new, options, console=Console(file=runs.output, width=100)) == 0


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        ("gradient", "'gradient' has no value"),
        ("gradient=", "'gradient=' has no value"),
        ("gradients=1", "there is no bound 'gradients', nearest is gradient"),
        ("x=1", "there is no bound 'x'"),
        ("gradient=small", "gradient is 'small', expected a finite number of at least 0"),
        ("gradient=-1", "gradient is '-1', expected a finite number of at least 0"),
        ("gradient=inf", "gradient is 'inf', expected a finite number of at least 0"),
        ("gradient=nan", "gradient is 'nan', expected a finite number of at least 0"),
        ("x=1, update", "there is no bound 'x'; ' update' has no value"),
    ],
)
def test_a_bound_that_is_none_is_refused(runs: Runs, bound: str, message: str) -> None:
    base, new = runs.make("base"), runs.make("new")
    with pytest.raises(ConfigError) as caught:
        run_compare(base, new, CompareOptions(tolerance=(bound,)))
    assert str(caught.value) == (
        f"tolerance: {message}; bounds are metric, metric_floor, activation, gradient, update, as in activation=1e-5"
    )


def test_an_unknown_kind_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_selection(steps=None, kinds=["gradient,gradiant"])
    assert str(caught.value).startswith("kinds: there is no kind gradiant; kinds are initial, input, score, ")


def test_chosen_kinds_alone_decide(runs: Runs) -> None:
    base, new = runs.make("base"), runs.make("new", gradient=1.5)
    options = CompareOptions(selection=parse_selection(steps=None, kinds=["parameter"]))
    assert run_compare(base, new, options, console=Console(file=runs.output, width=100)) in (0, 1)
    assert "gradient" not in runs.output.getvalue().split("Bounds:")[0]


def test_a_run_whose_ranks_hold_nothing_twice_proves_nothing(runs: Runs) -> None:
    assert run_replicas(runs.make("base"), EVERYTHING, console=Console(file=runs.output, width=100)) == 3
    assert "nothing compared: no element of this trace is held twice" in runs.output.getvalue()


def test_the_json_goes_to_stdout_in_place_of_the_text(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    base, new = runs.make("base"), runs.make("new")
    assert run_compare(base, new, CompareOptions(json_path="-")) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "identical"


def test_a_page_is_not_written_to_a_file_named_dash(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--html: - is not a file"):
        run_compare(tmp_path, tmp_path, CompareOptions(html_path=Path("-")))
    assert not Path("-").exists()
