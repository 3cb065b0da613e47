"""``mock-scheduler compare`` on folders as two finished runs leave them."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from mock_scheduler.align.finished import run_compare
from mock_scheduler.align.plan import PlannedRun
from mock_scheduler.config.loading import dump_config, load_config
from mock_scheduler.errors import AlignmentError, ConfigError
from tests.align.test_align import CONFIG, NORM, write_results


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
            name=name, entry="", own_overrides=(), overrides=(), config=config, output_dir=self.folder / name
        )
        run.output_dir.mkdir()
        write_results(run, gradient=gradient, batches=batches)
        (run.output_dir / "config.yaml").write_text(dump_config(config))
        return run.output_dir

    def compare(self, baseline: Path, candidate: Path, *, json_path: Path | None = None) -> int:
        return run_compare(baseline, candidate, json_path=json_path, console=Console(file=self.output, width=100))

    def refused(self, kind: type[Exception], baseline: Path, candidate: Path) -> str:
        with pytest.raises(kind) as caught:
            self.compare(baseline, candidate)
        assert self.output.getvalue() == ""
        return str(caught.value)


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_two_equal_runs_are_identical_with_the_report_of_an_alignment(runs: Runs) -> None:
    code = runs.compare(runs.make("base"), runs.make("tp2", "parallel.tensor_model_parallel_size=2"))
    printed = runs.output.getvalue()
    assert code == 0
    assert "tp2: identical\n" in printed
    assert "Alignment of lake " in printed
    assert "engines built 0, environments built 0" in printed
    # There is no folder of an alignment run to point to.
    assert "align.json" not in printed
    assert "run.log" not in printed


def test_another_gradient_is_diverged_and_named_in_the_json(runs: Runs) -> None:
    json_path = runs.folder / "verdict.json"
    assert runs.compare(runs.make("base"), runs.make("new", gradient=1.5), json_path=json_path) == 1
    result = json.loads(json_path.read_text())
    assert (result["exit_code"], result["baseline"]["name"], result["baseline"]["elapsed_s"]) == (1, "base", 10.0)
    (candidate,) = result["candidates"]
    assert (candidate["name"], candidate["verdict"]) == ("new", "diverged")
    assert (candidate["first_divergence"]["kind"], candidate["first_divergence"]["name"]) == ("gradient", NORM)


def test_the_candidates_tolerance_decides(runs: Runs) -> None:
    loose = "align.tolerance={gradient: 1.0}"
    assert runs.compare(runs.make("base"), runs.make("loose", loose, gradient=1.5)) == 0
    assert "loose: rounding\n" in runs.output.getvalue()


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
        "new: incomparable the two runs trained on other rollouts from step 1 on (1 of 2 steps), so nothing in their "
        "training can be compared; replay the baseline's recording in the candidate: rollout_mock.mode=mock and its "
        "rollout_mock.dump_dir"
    ) in printed


def test_the_json_names_a_log_only_where_there_is_one(runs: Runs) -> None:
    """It named a run.log that only align keeps."""
    json_path = runs.folder / "verdict.json"
    base, new = runs.make("base"), runs.make("new")
    runs.compare(base, new, json_path=json_path)
    result = json.loads(json_path.read_text())
    assert (result["recording_dir"], result["candidates"][0]["log_path"]) == (f"{runs.folder}/recording", None)
    (new / "run.log").touch()
    runs.compare(base, new, json_path=json_path)
    assert json.loads(json_path.read_text())["candidates"][0]["log_path"] == f"{new}/run.log"
    assert runs.output.getvalue().endswith(f"\nresult       {json_path}\n")


@pytest.mark.parametrize("side", ["base", "new"])
def test_a_run_without_a_trace_is_refused_with_the_key_to_set(runs: Runs, side: str) -> None:
    base, new = runs.make("base"), runs.make("new")
    shutil.rmtree(runs.folder / side / "trace")
    assert runs.refused(AlignmentError, base, new) == (
        f"{runs.folder / side} has no trace, without which gradients and parameters cannot be compared: run it again "
        "with trace.level=full (it had trace.level=full)"
    )


def test_a_run_that_has_not_completed_is_refused(runs: Runs) -> None:
    base, new = runs.make("base"), runs.make("new")
    (new / "run.json").unlink()
    assert runs.refused(AlignmentError, base, new) == (
        f"{new} has no run.json: its run has not completed (it is still going, or {new}/error.json says why it failed)"
    )


def test_a_folder_that_is_no_run_is_refused(runs: Runs) -> None:
    base = runs.make("base")
    assert runs.refused(ConfigError, base, runs.folder / "typo") == (
        f"{runs.folder}/typo is not the output_dir of a run: there is no config.yaml in it"
    )


def test_what_is_wrong_with_either_folder_is_said_at_once(runs: Runs) -> None:
    base = runs.make("base")
    shutil.rmtree(base / "trace")
    text = runs.refused(AlignmentError, base, runs.folder / "typo")
    assert text.splitlines() == [
        f"{base} has no trace, without which gradients and parameters cannot be compared: run it again with "
        "trace.level=full (it had trace.level=full)",
        f"{runs.folder}/typo is not the output_dir of a run: there is no config.yaml in it",
    ]


def test_a_run_is_not_compared_with_itself(runs: Runs) -> None:
    base = runs.make("base")
    (runs.folder / "link").symlink_to(base)
    assert runs.refused(ConfigError, base, runs.folder / "link") == (
        f"{base} and {runs.folder}/link are the same folder: it would be compared with itself"
    )
