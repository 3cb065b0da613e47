"""Sequences that ranks share are corrected as whole ones are: two real gloo processes, launched once."""

from __future__ import annotations

from pathlib import Path

from torch.multiprocessing.spawn import spawn

from tests.correction.engine.context_parallel_worker import NUM_RANKS, run


def test_shards_of_sequences_are_corrected_as_the_whole(tmp_path: Path) -> None:
    """Weights and masks equal, metrics of added states up to rounding; see the worker for each check."""
    spawn(run, args=(str(tmp_path),), nprocs=NUM_RANKS, join=True)  # type: ignore[no-untyped-call]
    assert sorted(path.name for path in tmp_path.glob("*.done")) == ["rank0.done", "rank1.done"]
