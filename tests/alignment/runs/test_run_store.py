"""Going on with an alignment: its folder and its finished runs."""

from pathlib import Path

import pytest

from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.alignment.runs.cache import NotReusable, Reusable
from mock_scheduler.alignment.runs.run_cache import RunCache, read_machine, read_settings
from mock_scheduler.alignment.runs.run_store import open_folder
from mock_scheduler.errors import ConfigError
from tests.alignment.finished_runs import RECORD, finish, plan_run
from tests.recording.recordings import record

MACHINE = {"processor": "A"}


def open_cache(folder: Path, **environ: str) -> RunCache:
    return RunCache(root=folder, recording_dir=folder / "recording", environ=environ, machine=MACHINE)


def run_all(folder: Path) -> tuple[PlannedRun, PlannedRun]:
    """A baseline that recorded and a candidate that replayed, both kept."""
    baseline, candidate = plan_run(folder, "baseline", mode=RECORD), plan_run(folder, "tp2")
    cache = open_cache(folder)
    for run in (baseline, candidate):
        cache.clear(run)
        if run is baseline:
            record(folder / "recording", [0, 1])
        finish(run)
        cache.keep(run, elapsed_s=3.0)
    return baseline, candidate


def test_what_completed_is_taken_again_by_another_command(tmp_path: Path) -> None:
    for run in run_all(tmp_path):
        assert open_cache(tmp_path).find(run) == Reusable(elapsed_s=3.0)


def test_a_run_that_was_interrupted_is_not(tmp_path: Path) -> None:
    run_all(tmp_path)
    later = plan_run(tmp_path, "later")
    cache = open_cache(tmp_path)
    assert cache.find(later) == NotReusable(reason="it has not run yet", was_there=False)
    cache.clear(later)
    finish(later)  # and the launcher was killed before it said so
    assert cache.find(later) == NotReusable(
        reason="there is no fingerprint.json: the run did not complete, or its files were changed"
    )


def test_a_baseline_without_its_recording_is_not_taken(tmp_path: Path) -> None:
    baseline, _ = run_all(tmp_path)
    step = next((tmp_path / "recording" / "train").iterdir())
    step.unlink()
    assert open_cache(tmp_path).find(baseline) == NotReusable(reason=f"recording/train/{step.name} is gone")


def test_candidates_of_another_recording_are_not_taken(tmp_path: Path) -> None:
    baseline, candidate = run_all(tmp_path)
    cache = open_cache(tmp_path)
    cache.clear(baseline)
    assert not (tmp_path / "recording").exists()
    assert list(baseline.output_dir.iterdir()) == []
    record(tmp_path / "recording", [0])
    assert cache.find(candidate) == NotReusable(reason="recording has changed")


def test_what_else_a_run_reads_is_part_of_it(tmp_path: Path) -> None:
    """A resumed alignment began anew after an interrupt, and so did every graft."""
    run_all(tmp_path)
    checkpoint, trace = tmp_path / "step_000001", tmp_path / "other" / "trace"
    for folder in (checkpoint, trace):
        folder.mkdir(parents=True)
        (folder / "file").write_text("before")
    for name, folder, override in (
        ("checkpoint", checkpoint, f"resume_from_checkpoint={checkpoint}"),
        ("graft", trace, f"graft.trace_dir={trace}"),
    ):
        run = plan_run(tmp_path, name, override, *(["graft.names=[a]"] if name == "graft" else []))
        cache = open_cache(tmp_path)
        cache.clear(run)
        finish(run)
        cache.keep(run, elapsed_s=1.0)
        assert open_cache(tmp_path).find(run) == Reusable(elapsed_s=1.0)
        (folder / "file").write_text("behind")
        assert open_cache(tmp_path).find(run) == NotReusable(reason=f"{name} has changed")


def test_threads_of_the_launcher_are_part_of_a_run(tmp_path: Path) -> None:
    baseline, _ = run_all(tmp_path)
    found = open_cache(tmp_path, OMP_NUM_THREADS="4").find(baseline)
    assert isinstance(found, NotReusable)
    assert found.reason.startswith("environ.OMP_NUM_THREADS was ")
    assert found.reason.endswith(" cores and is 4")


def test_code_of_the_project_and_of_the_entry_is_part_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    package, kernels = tmp_path / "pipelines", tmp_path / "kernels"
    for folder in (package, kernels):
        folder.mkdir()
        (folder / "run.py").write_text("1")
    (kernels / "part.py").write_text("2")
    run = plan_run(tmp_path, "kernel", entry="kernels.run", sources=[package])
    record(tmp_path / "recording", [0])
    finish(run)
    open_cache(tmp_path).keep(run, elapsed_s=1.0)
    assert isinstance(open_cache(tmp_path).find(run), Reusable)
    (kernels / "part.py").write_text("3")
    assert open_cache(tmp_path).find(run) == NotReusable(reason="code.entry has changed: kernels/part.py")
    (package / "run.py").write_text("4")
    assert open_cache(tmp_path).find(run) == NotReusable(
        reason="code.entry has changed: kernels/part.py; code.sources has changed: pipelines/run.py"
    )


def test_one_file_as_an_entry_is_part_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "patch_it.py").write_text("1")
    (tmp_path / "another.py").write_text("1")
    run = plan_run(tmp_path, "patched", mode=RECORD, entry="patch_it")
    finish(run)
    open_cache(tmp_path).keep(run, elapsed_s=1.0)
    (tmp_path / "another.py").write_text("2")
    assert isinstance(open_cache(tmp_path).find(run), Reusable)
    (tmp_path / "patch_it.py").write_text("2")
    assert open_cache(tmp_path).find(run) == NotReusable(reason="code.entry has changed: patch_it.py")


def test_settings_are_those_that_processes_share(tmp_path: Path) -> None:
    run = plan_run(tmp_path, "dp2", "parallel.data_parallel_size=2", "+system_envs.NCCL_ALGO=Ring")
    settings = read_settings(run, {"NCCL_PROTO": "Simple", "HOME": "/home", "CUDA_VISIBLE_DEVICES": "3"})
    assert settings == {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "OMP_NUM_THREADS": "1"}


def test_a_machine_is_told_by_its_processor_and_gpus() -> None:
    machine = read_machine()
    assert set(machine) == {"architecture", "processor", "cpu_capability", "gpus"}
    assert all(machine.values())
    assert machine == read_machine()


def test_a_folder_of_an_alignment_is_gone_on_with_or_emptied(tmp_path: Path) -> None:
    folder = tmp_path / "align"
    assert open_folder(folder, fresh=False) is False
    (folder / "baseline").mkdir()
    (folder / ".tp2.1.abcd.tmp").mkdir()  # what was being removed when it was interrupted
    assert open_folder(folder, fresh=False) is True
    assert sorted(path.name for path in folder.iterdir()) == [".mock-scheduler-align", "baseline"]
    assert open_folder(folder, fresh=True) is False
    assert not (folder / "baseline").exists()


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_that_no_alignment_made_is_left_alone(tmp_path: Path, fresh: bool) -> None:
    (tmp_path / "thesis.txt").write_text("years")
    with pytest.raises(
        ConfigError, match=r"was not made by mock-scheduler align .*; choose another folder \(--output-dir\)$"
    ):
        open_folder(tmp_path, fresh=fresh)
    assert (tmp_path / "thesis.txt").read_text() == "years"


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert open_folder(tmp_path, fresh=False) is False
    assert [path.name for path in tmp_path.iterdir()] == [".mock-scheduler-align"]


def test_of_an_unknown_variable_a_run_knows_a_digest_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = plan_run(tmp_path, "tp2")
    first, same, other = (read_settings(run, {"NCCL_MINE": value})["NCCL_MINE"] for value in ("a", "a", "b"))
    assert first == same != other
    assert len(first) == 64
