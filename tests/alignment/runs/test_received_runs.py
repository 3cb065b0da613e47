"""An alignment's folder that a stranger sent is gone on with: no verdict from runs never made, no file outside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.alignment.runs.folder_digests import describe_run_files
from mock_scheduler.commands.align import AlignOptions, run_align
from mock_scheduler.errors import ConfigError
from mock_scheduler.support import loaded_code
from mock_scheduler.support.digests import JSON, open_sealed, seal
from tests.alignment.test_align import CONFIG, Bench, FakeLauncher, write_results


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, Path]:
    """A finished alignment whose candidate tp2 diverged, and a copy of its folder."""
    folder = tmp_path_factory.mktemp("received")
    bench, kept = Bench(folder / "here"), folder / "kept"
    bench.folder.mkdir()
    bench.write(
        CONFIG.format(output_dir=bench.folder / "out dir=1") + "  proofs: {num_perturbations: 1, localise: false}\n"
    )
    assert bench.align(FakeLauncher(behave={"tp2": diverge})) == 1
    shutil.copytree(bench.folder, kept)
    return bench, kept


@pytest.fixture
def bench(finished: tuple[Bench, Path]) -> Bench:
    """The finished alignment, as it was: a run's maker is told with the place where it lies."""
    bench, kept = finished
    shutil.rmtree(bench.folder)
    shutil.copytree(kept, bench.folder)
    return bench


def diverge(run: PlannedRun) -> int:
    return write_results(run, gradient=2.0)


def again(bench: Bench, **options: bool) -> tuple[int, list[str]]:
    launcher = FakeLauncher(behave={"tp2": diverge})
    code = run_align(
        config_name="lake",
        config_path=bench.folder,
        overrides=(),
        options=AlignOptions(**options),
        make_launch=launcher.make,
    )
    return code, [run.name for run in launcher.started]


def forge(run_dir: Path, change: Callable[[dict[str, JSON]], None] = lambda document: None) -> None:
    """Write the fingerprint again, with digests that fit."""
    path = run_dir / "fingerprint.json"
    document = open_sealed(path.read_bytes())
    document["files"] = describe_run_files(run_dir, None)
    change(document)
    path.write_text(json.dumps(seal(document)))


def forge_traces(bench: Bench) -> None:
    """The diverged candidate gets the baseline's trace."""
    for run_dir in (bench.root / "tp2", bench.root / "proofs" / "emulated-tp2"):
        shutil.rmtree(run_dir / "trace")
        shutil.copytree(bench.root / "baseline" / "trace", run_dir / "trace")
        forge(run_dir)


def test_ones_own_runs_are_taken_again(bench: Bench) -> None:
    assert again(bench) == (1, [])


def test_a_forged_fingerprint_gives_no_verdict(bench: Bench) -> None:
    forge_traces(bench)
    with pytest.raises(ConfigError, match="tp2 is a finished run, but another user, or this one on another machine"):
        again(bench)
    assert (bench.root / "tp2" / "run.json").is_file()  # nothing was removed


def test_no_file_that_a_strangers_run_names_is_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of this machine were looked for and hashed, as its record named them, before its maker was known."""
    read: list[Path] = []
    monkeypatch.setattr(loaded_code, "_digest", lambda path: read.append(path) or "")
    record = {"files": {"/etc/passwd": "0" * 64}, "changed_while_running": [], "calls": {}}
    for path in (bench.root / "tp2" / "code").iterdir():
        path.write_text(json.dumps(record))
    forge(bench.root / "tp2")
    with pytest.raises(ConfigError, match="tp2 is a finished run, but another user"):
        again(bench)
    assert Path("/etc/passwd") not in read


def test_whoever_trusts_the_sender_takes_it_and_overwrite_makes_it_anew(bench: Bench) -> None:
    forge_traces(bench)
    assert again(bench, run_stored_code=True) == (0, [])
    code, started = again(bench, overwrite=True)
    assert (code, started[:3]) == (1, ["baseline", "same", "tp2"])


def test_a_forged_run_is_not_taken_by_a_reduction_that_was_not_asked_to(bench: Bench) -> None:
    """It lets the code of its own configuration run, which it has asked about before."""
    forge_traces(bench)
    with pytest.raises(ConfigError, match="is a finished run, but another user"):
        again(bench, run_stored_code=True, takes_foreign=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(maker="0" * 64),
        lambda document: document.update(maker=""),
        lambda document: document.update(elapsed_s=1e6),
        lambda document: document.update(further={}),
    ],
)
def test_no_other_content_has_the_makers_digest(bench: Bench, change: Callable[[dict[str, JSON]], None]) -> None:
    forge(bench.root / "tp2", change)
    with pytest.raises(ConfigError, match="tp2 is a finished run, but another user"):
        again(bench)


def test_another_users_key_makes_it_a_foreign_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(bench.folder / "of another user"))
    with pytest.raises(ConfigError, match="baseline is a finished run, but another user"):
        again(bench)


def test_a_fingerprint_without_a_maker_is_made_anew(bench: Bench) -> None:
    forge(bench.root / "tp2", lambda document: document.__delitem__("maker"))
    assert again(bench) == (1, ["tp2"])


@pytest.mark.parametrize("name", ["proofs", "proofs/noise-0", "tp2", "recording", "baseline"])
def test_nothing_is_removed_or_written_through_a_link(bench: Bench, name: str) -> None:
    victim = bench.folder / "victim"
    for inner in (".", "noise-0", "emulated-tp2", "train"):
        (victim / inner).mkdir(exist_ok=True)
        (victim / inner / "precious").write_text("x")
    before = sorted(victim.rglob("*"))
    linked = bench.root / name
    shutil.rmtree(linked, ignore_errors=True)
    linked.symlink_to(victim)
    with pytest.raises(ConfigError, match=f"{linked} is a link to {victim}: an alignment follows no links"):
        again(bench)
    assert sorted(victim.rglob("*")) == before


def test_a_link_that_a_cluster_left_beside_its_logs_is_no_part_of_the_run(bench: Bench) -> None:
    """Slurm's jobs by submitit have one to their own script."""
    logs = bench.root / "tp2" / "job" / "4"
    logs.mkdir(parents=True)
    (logs / ".submission.sh").symlink_to(logs / "4_submission.sh")
    assert again(bench) == (1, [])
    (bench.root / "tp2" / "job").rename(bench.folder / "job")
    (bench.root / "tp2" / "job").symlink_to(bench.folder / "job")
    assert again(bench) == (1, ["tp2"])


@pytest.mark.parametrize("name", ["trace", "trace/step_000000", "metrics.jsonl", "run.json"])
def test_a_run_with_a_link_in_it_is_made_anew(bench: Bench, name: str) -> None:
    outside, linked = bench.folder / "outside", bench.root / "tp2" / name
    linked.rename(outside)
    linked.symlink_to(outside)
    code, started = again(bench)
    assert (code, started) == (1, ["tp2"])
    assert outside.exists()
    assert not linked.is_symlink()
