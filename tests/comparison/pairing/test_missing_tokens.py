"""Tokens that a run gave to no rank: its fault where its trace is whole, and nothing to judge where it is not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from mock_scheduler.comparison.tensors import TensorComparison
from mock_scheduler.comparison.walk.traces import compare_trace_folders
from mock_scheduler.errors import TraceError
from mock_scheduler.trace.entries import RankPlace, RowTable, StepFooter, TraceEntry
from mock_scheduler.trace.full.writing import FullSink
from mock_scheduler.trace.shards import ShardSpec, Split, blocks_of_indices, cut_shard, whole
from mock_scheduler.trace.sketch.files import SketchSink
from mock_scheduler.verdict.direct_verdict import decide
from mock_scheduler.verdict.verdict import Verdict, VerdictKind
from mock_scheduler.verdict.wording.divergences import describe_evidence
from mock_scheduler.verdict.wording.findings import describe_finding
from mock_scheduler.verdict.wording.verdicts import describe_sentence
from tests.comparison.stated import stated

BOUNDS = stated()
#: Four rows, of 2, 3, 4 and 1 tokens: tokens 0 and 1, 2 to 4, 5 to 8, 9.
ROWS = RowTable(identities=("g0/e0", "g0/e1", "g1/e0", "g1/e1"), lengths=(2, 3, 4, 1))
FOOTER = StepFooter(rows=ROWS, update_rows=((0, 1, 2, 3),))
ALL = range(10)
TOKENS = torch.arange(10) * 7
HIDDEN = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
LAYER = "decoder.layers.0"


def write(
    folder: Path,
    held: Sequence[Sequence[int]],
    *,
    axis: str = "dp",
    is_sketch: bool = False,
    hidden: torch.Tensor = HIDDEN,
) -> Path:
    """Ranks that each hold some tokens of the input and of an activation, and all of a gradient."""
    for rank, tokens in enumerate(held):
        place = RankPlace(global_rank=rank, coordinates={axis: rank})
        make = SketchSink if is_sketch else FullSink
        sink = make(folder, step=0, place=place, world_size=len(held))
        for kind, name, tensor in (("input", "tokens", TOKENS), ("activation", LAYER, hidden)):
            shape = (len(tokens), *tensor.shape[1:])
            splits = (Split(dim=0, blocks=blocks_of_indices(tokens)),)
            spec = ShardSpec(name=name, global_shape=tuple(tensor.shape), local_shape=shape, splits=splits)
            dims = ("token", "channel")[: tensor.dim()]
            sink.add(TraceEntry(update=0, kind=kind, spec=spec, tensor=cut_shard(tensor, spec), dims=dims))  # type: ignore[arg-type]
        sink.add(TraceEntry(update=0, kind="gradient", spec=whole("w", (3,)), tensor=torch.ones(3)))
        sink.close(StepFooter(rows=ROWS, update_rows=FOOTER.update_rows, ranks=tuple(range(len(held)))))
    return folder


def compare(baseline: Path, candidate: Path) -> TensorComparison:
    return compare_trace_folders(baseline, candidate, bounds=BOUNDS)


def judge(found: TensorComparison) -> Verdict:
    return decide(None, found, bounds=BOUNDS, required=())


def test_ranks_that_hold_the_same_rows_are_a_divergence_that_names_the_rows_that_nobody_holds(tmp_path: Path) -> None:
    baseline = write(tmp_path / "a", [ALL])
    alignment = judge(compare(baseline, write(tmp_path / "b", [range(5), range(5)])))
    assert alignment.kind is VerdictKind.DIVERGED
    assert describe_sentence(alignment) == (
        "step 0, update 0, inputs: input of tokens at step 0, update 0: 5 of 10 tokens are held by no rank, the first "
        "is position 0 of row g1/e0; global ranks 0 and 1 hold the same rows; nothing was compared before it"
    )
    assert alignment.first is not None
    assert (alignment.first.kind, alignment.first.name) == ("input", "tokens")


def test_a_row_that_is_dropped_is_a_divergence_without_ranks_that_are_alike(tmp_path: Path) -> None:
    baseline = write(tmp_path / "a", [ALL])
    found = compare(baseline, write(tmp_path / "b", [range(5), range(5, 9)]))
    assert [describe_finding(item) for item in found.findings] == [
        "input of tokens at step 0, update 0: 1 of 10 tokens are held by no rank, the first is position 0 of row "
        "g1/e1; pieces come from global rank 0, 1",
        f"activation of {LAYER} at step 0, update 0: 1 of 10 tokens are held by no rank, the first is position 0 of "
        "row g1/e1; pieces come from global rank 0, 1",
    ]


def test_ranks_of_one_dp_place_that_hold_the_same_rows_are_not_blamed(tmp_path: Path) -> None:
    baseline = write(tmp_path / "a", [ALL])
    found = compare(baseline, write(tmp_path / "b", [range(9), range(9)], axis="tp"))
    assert describe_finding(found.findings[0]).endswith("; pieces come from global rank 0, 1")


def test_what_both_hold_is_still_compared(tmp_path: Path) -> None:
    other = HIDDEN.clone()
    other[1, 2] += 1.0
    found = compare(write(tmp_path / "a", [ALL]), write(tmp_path / "b", [range(5), range(5)], hidden=other))
    (difference,) = found.exceeding
    assert difference.figures is not None
    assert difference.figures.worst is not None
    assert (difference.num_elements, difference.num_absent) == (20, 20)
    assert difference.figures.worst.index == (1, 2)


def test_a_baseline_that_lacks_tokens_is_no_reference(tmp_path: Path) -> None:
    candidate = write(tmp_path / "b", [ALL])
    with pytest.raises(TraceError, match="5 of 10 tokens are held by no rank"):
        compare(write(tmp_path / "a", [range(5), range(5)]), candidate)


def test_a_trace_that_lost_a_rank_is_refused(tmp_path: Path) -> None:
    candidate = write(tmp_path / "b", [range(5), range(5, 10)])
    sorted(candidate.rglob("*.safetensors"))[-1].unlink()
    with pytest.raises(TraceError, match="global rank 1"):
        compare(write(tmp_path / "a", [ALL]), candidate)


def test_a_damaged_trace_is_refused_whatever_it_lacks(tmp_path: Path) -> None:
    candidate = write(tmp_path / "b", [range(5), range(5)])
    for path in candidate.rglob("*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    with pytest.raises(TraceError, match="does not match its digest"):
        compare(write(tmp_path / "a", [ALL]), candidate)


def test_sketches_say_that_elements_are_held_by_nobody(tmp_path: Path) -> None:
    sides = [write(tmp_path / "a", [ALL], is_sketch=True), write(tmp_path / "b", [range(5), range(5)], is_sketch=True)]
    alignment = judge(compare(*sides))
    assert alignment.kind is VerdictKind.DIVERGED
    assert alignment.first is not None
    assert describe_evidence(alignment.first) == (
        "input of tokens at step 0, update 0: 5 elements are held, where there are 10; parts come from global rank 0, 1"
    )
    with pytest.raises(TraceError, match="elements are held, where there are"):
        compare(*sides[::-1])


def test_whole_tensors_held_against_sketches_say_which_tokens(tmp_path: Path) -> None:
    found = compare(write(tmp_path / "a", [ALL], is_sketch=True), write(tmp_path / "b", [range(5), range(5)]))
    assert describe_finding(found.findings[0]).endswith("global ranks 0 and 1 hold the same rows")
