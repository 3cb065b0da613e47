"""Sequences that ranks share are corrected as whole ones are: two real gloo processes, launched once."""

from __future__ import annotations

from pathlib import Path

from tests.correction.engine.context_parallel_worker import NUM_RANKS
from tests.programs import run_ranks


def test_shards_of_sequences_are_corrected_as_the_whole(tmp_path: Path) -> None:
    """Weights and masks equal, metrics of added states up to rounding; see the worker for each check."""
    done = run_ranks(NUM_RANKS, "tests.correction.engine.context_parallel_worker", (str(tmp_path),), told_to=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.glob("*.done")) == ["rank0.done", "rank1.done"]
