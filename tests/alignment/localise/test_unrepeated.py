"""Real alignments of candidates that cannot be compared: one that does not repeat itself, one whose ranks part."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipelines.tiny_runs import read_json, run_cli, write_tiny_config

CANDIDATES = (
    "align.candidates=[{name: any_order, entry: tests.faults.nondeterministic_sum, overrides: []}, "
    "{name: same, overrides: []}]"
)


@pytest.mark.all
@pytest.mark.timeout(1800)
def test_a_sum_in_an_order_that_no_seed_fixes_is_unverified(tmp_path: Path) -> None:
    """It is within the noise, and each run of it has other bits."""
    command = (CANDIDATES, "max_steps=1", "align.proofs.num_perturbations=2")
    finished = run_cli("align", write_tiny_config(tmp_path), ["--output-dir", str(tmp_path / "out"), *command])
    assert finished.returncode == 4, finished.stdout + finished.stderr
    any_order, same = read_json(tmp_path / "out" / "align.json")["candidates"]
    assert (any_order["verdict"], same["verdict"]) == ("unverified", "identical")
    assert any_order["reason"].startswith("the candidate does not repeat itself: two runs of it differ first in the ")
    assert "mock-scheduler doctor with its overrides and its --entry names the operation" in any_order["reason"]


@pytest.mark.all
@pytest.mark.timeout(1800)
def test_a_rank_that_leaves_a_collective_out_is_named_with_it(tmp_path: Path) -> None:
    candidate = "{name: torn, entry: tests.faults.gradient_sync_skipped, overrides: ['parallel.data_parallel_size=2']}"
    command = ("max_steps=1", f"align.candidates=[{candidate}]")
    finished = run_cli("align", write_tiny_config(tmp_path), ["--output-dir", str(tmp_path / "out"), *command])
    assert finished.returncode == 3, finished.stdout + finished.stderr
    (torn,) = read_json(tmp_path / "out" / "align.json")["candidates"]
    assert torn["why"]["collectives"]["difference"]["group"] == [0, 1]
    assert "collective 1 is reduce_scatter of " in torn["reason"]
    assert "in global rank 0, and all_reduce of 1 int32 over ranks 0, 1 in global rank 1" in torn["reason"]
