"""Columns that miles' own writer made are read by the real pyarrow of ``.venv-engines``; lying files are refused."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from mock_scheduler import read_recording
from mock_scheduler.commands.foreign import ImportCommand, run_import

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
ENGINES = ROOT / ".venv-engines" / "bin" / "python"
READ = """
import json, sys
from pathlib import Path
from mock_scheduler.adapters.imports.miles_columns import read_rollouts
from mock_scheduler.adapters.imports.steps import ImportOptions
from mock_scheduler.errors import MockSchedulerError
try:
    for step in read_rollouts(Path(sys.argv[1]), ImportOptions()):
        names = ("tokens", "response_mask", "rollout_logprobs", "lengths")
        values = {name: getattr(step.batch, name).tolist() for name in names}
        print(json.dumps({"step": step.step, "mode": step.mode, "lacks": step.lacks, **values}))
except MockSchedulerError as error:
    print(f"{type(error).__name__}: {error}")
"""
#: One row of ten million ones, which take a few bytes as run lengths.
LARGE = """
import sys, pyarrow as pa, pyarrow.parquet as pq
ones = pa.array([[1] * 10_000_000], pa.list_(pa.int8()))
columns = {"sample_index": pa.array([0], pa.int32()), "response_length": pa.array([1], pa.int32()), "loss_mask": ones}
columns |= {name: pa.array([[1]], pa.list_(kind)) for name, kind in
            (("tokens", pa.int32()), ("rollout_log_probs", pa.float32()))}
pq.write_table(pa.table(columns), sys.argv[1])
"""


def run(code: str, path: Path) -> list[str]:
    """Run code in ``.venv-engines``, where pyarrow is, and return what it printed."""
    assert ENGINES.is_file(), f"{ENGINES} is not there; launch/test.sh --integrations makes it (Python 3.11)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [str(ENGINES), "-W", "ignore", "-c", code, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def written(tmp_path: Path) -> Path:
    with tarfile.open(ROOT / "tests/adapters/imports/written_by_others.tar.xz") as archive:
        members = [member for member in archive if member.name.startswith("miles-columns/")]
        archive.extractall(tmp_path, members, filter="data")
    return tmp_path / "miles-columns"


def test_miles_own_columns_are_its_own_samples(written: Path, tmp_path: Path) -> None:
    steps = {step["mode"]: step for step in map(json.loads, run(READ, written / "dashboard_columns"))}
    found, evaluated = steps["train"], steps["val"]
    run_import("slime", written / "rollout_data", tmp_path / "samples", ImportCommand())
    expected = read_recording(tmp_path / "samples").batch(12)
    assert found["step"] == evaluated["step"] == 12
    assert found["lengths"] == expected.lengths.tolist() == list(range(5, 15))  # ten rows of two row groups
    for name in ("tokens", "response_mask", "rollout_logprobs"):
        assert found[name] == getattr(expected, name).tolist(), name
    assert {"rewards", "policy_versions", "groups"} < set(found["lacks"])
    # A sample without mask and log-probabilities.
    assert (evaluated["tokens"], evaluated["rollout_logprobs"]) == ([1, 2, 3], [0.0, 0.0])
    assert evaluated["response_mask"] == [False, True, True]
    assert "rollout_logprobs" in evaluated["lacks"]


def test_columns_that_are_cut_or_lie_are_refused(written: Path, tmp_path: Path) -> None:
    path = written / "dashboard_columns" / "rollout_12.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    (text,) = run(READ, path)
    assert text.startswith(f"ForeignFileError: {path} cannot be read as parquet of miles' columns: ")
    assert run(LARGE, tmp_path / "rollout_3.parquet") == []
    size_bytes = (tmp_path / "rollout_3.parquet").stat().st_size
    assert size_bytes < 100_000
    (text,) = run(READ, tmp_path / "rollout_3.parquet")
    assert f"has {size_bytes} bytes and states 10000004 values or bytes in them: more than 64 times" in text
