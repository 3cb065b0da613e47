"""A recomputation is held to the forward pass of the candidate itself, whatever the baseline has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from mock_scheduler.comparison.findings import Finding, OtherRecomputation
from mock_scheduler.comparison.walk.traces import compare_trace_folders
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.trace.entries import RankPlace, RowTable, StepFooter, TraceEntry
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.trace.shards import Block, ShardSpec, Split, even_split
from mock_scheduler.trace.sketch.files import SketchSink
from mock_scheduler.verdict.divergences import find_divergences
from mock_scheduler.verdict.replicas import check_replicas
from tests.comparison.stated import stated
from tests.rank_traces import save_rank_trace

NORM = "decoder.layers.1.input_layernorm"
#: Two rows of two tokens; a micro-batch has one row, and each of two ranks half of the channels.
FOOTER = StepFooter(rows=RowTable(identities=("a", "b"), lengths=(2, 2)), update_rows=((0, 1),), ranks=(0, 1))
FIRST = torch.arange(1.0, 17.0).view(4, 4)


def list_entries(rank: int, values: torch.Tensor, kind: TraceKind, rows: Sequence[int]) -> list[TraceEntry]:
    """Pieces of one rank, of these rows."""
    entries = []
    for row in rows:
        tokens = Split(dim=0, blocks=(Block(local_start=0, global_start=2 * row, length=2),))
        channels = even_split(1, size=4, rank=rank, num_ranks=2)
        spec = ShardSpec(name=NORM, global_shape=(4, 4), local_shape=(2, 2), splits=(tokens, *channels))
        part = values[2 * row : 2 * row + 2, 2 * rank : 2 * rank + 2]
        entries.append(TraceEntry(update=0, kind=kind, spec=spec, tensor=part, dims=("token", "channel")))
    return entries


def write(folder: Path, *, recomputed: torch.Tensor | None = None, has_first: bool = True) -> Path:
    """Writes both ranks; rank 1 recomputed row 1 otherwise, where ``recomputed`` says so."""
    for rank in range(2):
        entries = list_entries(rank, FIRST, "activation", (0, 1)) if has_first else []
        if recomputed is not None and rank == 1:
            entries += list_entries(rank, recomputed, "recomputed", (1,))
        # A trace must have a tensor.
        entries += list_entries(rank, FIRST, "activation_gradient", (0, 1))
        save_rank_trace(
            folder, step=0, global_rank=rank, world_size=2, coordinates={"tp": rank}, entries=entries, footer=FOOTER
        )
    return folder


OTHER = FIRST.clone()
OTHER[3, 2] += 3.0


def find(tmp_path: Path, baseline: torch.Tensor | None, candidate: torch.Tensor | None, **of: bool) -> list[Finding]:
    folders = [write(tmp_path / name, recomputed=side, **of) for name, side in (("a", baseline), ("b", candidate))]
    return list(compare_trace_folders(*folders, bounds=stated()).findings)


def test_other_bits_than_in_the_first_pass_are_a_finding_with_micro_batch_and_token(tmp_path: Path) -> None:
    (found,) = find(tmp_path, None, OTHER)
    relative = 3.0 / float(FIRST[2:, 2:].norm())
    assert found == Finding(
        kind="recomputed",
        step=0,
        update=0,
        name=NORM,
        fact=OtherRecomputation(
            num_different=1,
            num_elements=4,
            relative=pytest.approx(relative, rel=1e-6),
            sample="b",
            position=1,
            micro_batch=1,
        ),
    )


def test_a_law_that_the_baseline_breaks_too_says_nothing(tmp_path: Path) -> None:
    assert find(tmp_path, OTHER, OTHER) == []
    assert find(tmp_path / "other", OTHER, None) == []


def test_without_the_first_pass_it_is_found_and_not_measured(tmp_path: Path) -> None:
    (found,) = find(tmp_path, None, OTHER, has_first=False)
    assert found.fact == OtherRecomputation()


def test_it_comes_before_the_forward_passes_of_later_micro_batches(tmp_path: Path) -> None:
    folders = write(tmp_path / "a"), write(tmp_path / "b", recomputed=OTHER)
    found = compare_trace_folders(*folders, bounds=stated())
    assert [item.kind for item in find_divergences(None, found)] == ["recomputed"]
    # One rank's part is no gap in a trace that all ranks wrote.
    with open_trace(folders[1]) as trace:
        assert check_replicas(trace, str(folders[1])).conflicts == ()


def test_sketches_find_it_without_its_size(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for rank in range(2):
            place = RankPlace(global_rank=rank, coordinates={"tp": rank})
            sink = SketchSink(tmp_path / name, step=0, place=place, world_size=2)
            for entry in list_entries(rank, FIRST, "activation", (0, 1)):
                sink.add(entry)
            if name == "b" and rank == 1:
                for entry in list_entries(rank, OTHER, "recomputed", (1,)):
                    sink.add(entry)
            sink.close(FOOTER)
    (found,) = compare_trace_folders(tmp_path / "a", tmp_path / "b", bounds=stated()).findings
    assert (found.kind, found.name, found.fact) == ("recomputed", NORM, OtherRecomputation())
