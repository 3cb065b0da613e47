"""Every candidate of the shipped alignments of commands can be loaded: each change reaches the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from mock_scheduler.command_program.program import PROGRAM
from mock_scheduler.config.align import CandidateConfig
from mock_scheduler.support.versions import ROOT

EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*megatron*/align.yaml"))


def candidates_of(path: Path) -> list[CandidateConfig]:
    return list(PROGRAM.build_loader(path.stem, path.parent)(()).align.candidates)


def test_both_examples_are_there() -> None:
    assert [path.parent.name for path in EXAMPLES] == ["megatron_training", "own_megatron"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_every_candidate_reaches_the_command(path: Path) -> None:
    """Once the ranks were started by ``{ranks}``, nothing seemed to tell the command of data parallelism."""
    load = PROGRAM.build_loader(path.stem, path.parent)
    candidates = candidates_of(path)
    assert any(
        "parallel.data_parallel_size" in override for candidate in candidates for override in candidate.overrides
    )
    for candidate in candidates:
        assert load(candidate.overrides).parallel.world_size >= 1
