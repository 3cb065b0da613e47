"""A reproduction cut out of real runs of one process: it replays its own recording, and still differs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from mock_scheduler.commands.extract import run_extract
from mock_scheduler.support.files import load_json_object
from tests.pipelines.tiny_runs import ROOT, run_command, run_tiny, write_tiny_config
from tests.programs import run_program

CHANGE = "pg_clip=0.1"


def launch(configs: Path, root: Path, name: str, overrides: Sequence[str]) -> None:
    """One side of the alignment, in its folder."""
    common = [
        f"output_dir={root / name}",
        f"exp_name=tiny-{name}",
        "rollout_mock.enable=true",
        f"rollout_mock.dump_dir={root / 'recording'}",
        "save_steps=1",
    ]
    done = run_tiny(configs, [*common, *overrides])
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def alignment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an alignment leaves of a candidate that clips earlier, as far as an extraction looks at it."""
    folder = tmp_path_factory.mktemp("aligned")
    root, configs = folder / "align", write_tiny_config(folder)
    launch(configs, root, "baseline", ["rollout_mock.mode=dump"])
    launch(configs, root, "clip-range", ["rollout_mock.mode=mock", CHANGE])
    candidate = {"name": "clip-range", "overrides": [CHANGE], "verdict": "diverged", "sentence": "it clips more"}
    (root / "align.json").write_text(json.dumps({"candidates": [{**candidate, "first_divergence": {"step": 0}}]}))
    return root


def replay(folder: Path, overrides: Sequence[str], *, output: str) -> tuple[Mapping[str, float], Mapping[str, object]]:
    """One side of a reproduction, in its folder: metrics of its last step, and what the run says of itself.

    The side without overrides is started by the command line, the other as the command line starts it.
    """
    options = [f"output_dir={output}", *overrides]
    if overrides:
        done = run_program("pipelines.agentic", ["--config-path", ".", "--config-name", "config", *options], cwd=folder)
    else:
        arguments = ["-m", "mock_scheduler.cli", "launch", "config", "--config-path", ".", *options]
        import_path = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        launcher = "import os, sys; os.chdir(sys.argv[1]); os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
        done = run_command(["-c", launcher, str(folder), *arguments], environ=import_path)
    assert done.returncode == 0, done.stderr
    lines = (folder / output / "metrics.jsonl").read_text().splitlines()
    metrics: dict[str, float] = json.loads(lines[-1])["metrics"]
    built = load_json_object(folder / output / "ledger.json")["built"]
    assert not any(built.values()), built
    return metrics, load_json_object(folder / output / "run.json")


@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.all), 1])
def test_a_cut_recording_is_replayed_by_both_sides(alignment: Path, tmp_path: Path, step: int) -> None:
    """Its contract is kept, its weights are found (of step 1 a checkpoint of other batch sizes), and it trains."""
    folder = tmp_path / "small"
    groups = 1 if step == 0 else 2
    run_extract(alignment, "clip-range", output=folder, step=step, num_groups=groups, is_checked=False)
    (ours, stated), (theirs, _) = (
        replay(folder, overrides, output=f"output/{name}") for name, overrides in (("a", ()), ("b", (CHANGE,)))
    )
    batches = stated["batches"]
    assert isinstance(batches, dict)
    assert list(batches) == [str(step)]
    # Two epochs over four or eight trajectories, which are one update each.
    assert ours["num_updates"] == 2.0
    assert ours["rollout_logprob_diff_max"] == theirs["rollout_logprob_diff_max"]
    assert ours["rollout_logprob_diff_max"] < 1e-5, "other weights than those that played"
    if step == 0:
        assert ours["pg_loss"] != theirs["pg_loss"]
    size_bytes = sum(path.stat().st_size for path in (folder / "recording").rglob("*") if path.is_file())
    assert size_bytes < 100_000
