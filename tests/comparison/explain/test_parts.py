"""Copies that are not equal: what each rank holds is held against the baseline, and a missing reduction is named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from mock_scheduler.comparison.explain import parts as parts_module
from mock_scheduler.comparison.tensors import TensorDifference
from mock_scheduler.comparison.walk.traces import compare_trace_folders
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.trace.entries import DimName, RankPlace, RowTable, StepFooter, TraceEntry
from mock_scheduler.trace.full.writing import FullSink
from mock_scheduler.trace.shards import whole
from mock_scheduler.verdict.direct_verdict import decide
from mock_scheduler.verdict.verdict import Verdict, VerdictKind
from mock_scheduler.verdict.wording.residuals import describe_residual
from mock_scheduler.verdict.wording.verdicts import describe_sentence
from tests.comparison.stated import stated

BOUNDS = stated()
NORM = "decoder.layers.1.input_layernorm.weight"
LATER = "decoder.layers.2.input_layernorm.weight"
TABLE = "embedding.word_embeddings.weight"
SIZE = 64
Copies = Mapping[str, torch.Tensor]


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (SIZE,)), generator=torch.Generator().manual_seed(seed))


def places(**sizes: int) -> list[RankPlace]:
    """Ranks of a grid, the first axis fastest."""
    found: list[dict[str, int]] = [{}]
    for axis, size in reversed(sizes.items()):
        found = [{axis: place, **rest} for rest in found for place in range(size)]
    return [RankPlace(global_rank=rank, coordinates=place) for rank, place in enumerate(found)]


def write(
    folder: Path,
    copies: list[tuple[RankPlace, Copies]],
    *,
    kind: TraceKind = "gradient",
    dims: tuple[DimName, ...] = (),
    rows: RowTable | None = None,
) -> Path:
    """One step in which each rank holds its own copy of whole tensors."""
    footer = StepFooter(ranks=tuple(range(len(copies))), rows=rows or RowTable())
    for place, tensors in copies:
        sink = FullSink(folder, step=0, place=place, world_size=len(copies))
        for name, tensor in tensors.items():
            spec = whole(name, tuple(tensor.shape))
            sink.add(TraceEntry(update=0, kind=kind, spec=spec, tensor=tensor, dims=dims))
        sink.close(footer)
    return folder


def write_baseline(folder: Path, tensors: Copies, **options: object) -> Path:
    return write(folder, [(places(tp=1)[0], tensors)], **options)  # type: ignore[arg-type]


def judge(baseline: Path, candidate: Path) -> tuple[Verdict, tuple[TensorDifference, ...]]:
    found = compare_trace_folders(baseline, candidate, bounds=BOUNDS)
    return decide(None, found, bounds=BOUNDS, required=()), found.exceeding


def residual_text(baseline: Path, candidate: Path) -> str:
    _, exceeding = judge(baseline, candidate)
    assert exceeding[0].residual is not None
    return describe_residual(exceeding[0].residual)


def test_gradients_that_were_not_summed_over_tensor_parallel_ranks_are_called_so(tmp_path: Path) -> None:
    """What a run shows in which the gradients of norms are not reduced under sequence parallelism."""
    own = {name: [noise(2 * seed), noise(2 * seed + 1)] for seed, name in enumerate((NORM, LATER))}
    table = noise(9, 8, 8)
    baseline = write_baseline(tmp_path / "a", {TABLE: table, **{name: sum(parts) for name, parts in own.items()}})  # type: ignore[dict-item]
    ranks = [
        (place, {TABLE: table, **{name: parts[place.global_rank] for name, parts in own.items()}})
        for place in places(tp=2)
    ]
    alignment, exceeding = judge(baseline, write(tmp_path / "b", ranks))
    assert alignment.kind is VerdictKind.DIVERGED
    largest = float((own[NORM][0].double() - own[NORM][1].double()).abs().max())
    assert describe_sentence(alignment) == (
        f"step 0, update 0, backward: copies within the candidate differ: {NORM}: ranks tp0 and tp1 hold different "
        f"gradients at step 0 (64 elements, by up to {largest:.3g}): not summed over tp: each tp rank holds its own "
        "part, and their sum is the baseline; the 1 tensor before it is equal"
    )
    assert [item.key.name for item in exceeding] == [NORM, LATER]
    assert all(item.residual is not None and item.residual.kind == "missing part" for item in exceeding)
    assert all(item.residual is not None and item.residual.explained > 0.999 for item in exceeding)


def test_an_axis_without_disagreement_is_not_named(tmp_path: Path) -> None:
    own = [noise(0), noise(1)]
    baseline = write_baseline(tmp_path / "a", {NORM: own[0] + own[1]})
    ranks = [(place, {NORM: own[place.coordinates["tp"]]}) for place in places(tp=2, dp=2)]
    expected = "not summed over tp: each tp rank holds its own part, and their sum is the baseline"
    assert residual_text(baseline, write(tmp_path / "b", ranks)) == expected


def test_a_sum_over_two_axes_that_is_missing_is_named_with_both(tmp_path: Path) -> None:
    own = [noise(seed) for seed in range(4)]
    baseline = write_baseline(tmp_path / "a", {NORM: torch.stack(own).sum(0)})
    ranks = [(place, {NORM: own[place.global_rank]}) for place in places(tp=2, cp=2)]
    expected = "not summed over tp and cp: each tp and cp rank holds its own part, and their sum is the baseline"
    assert residual_text(baseline, write(tmp_path / "b", ranks)) == expected


def test_a_mean_that_is_missing_is_told_from_a_sum(tmp_path: Path) -> None:
    own = [noise(seed) for seed in range(4)]
    baseline = write_baseline(tmp_path / "a", {NORM: torch.stack(own).mean(0)})
    ranks = [(place, {NORM: own[place.global_rank]}) for place in places(dp=4)]
    expected = "not averaged over dp: each dp rank holds its own part, and their mean is the baseline"
    assert residual_text(baseline, write(tmp_path / "b", ranks)) == expected


def test_a_sum_of_a_wrong_scale_is_named_by_the_layout(tmp_path: Path) -> None:
    """Each of four ranks' part is half of what it should be."""
    own = [noise(seed) for seed in range(4)]
    baseline = write_baseline(tmp_path / "a", {NORM: 0.5 * torch.stack(own).sum(0)})
    ranks = [(place, {NORM: own[place.coordinates["tp"]]}) for place in places(tp=4, dp=2)]
    assert residual_text(baseline, write(tmp_path / "b", ranks)) == (
        "not summed over tp: each tp rank holds its own part, and their sum is 2 times the baseline: dp"
    )


@pytest.mark.parametrize(("scale", "name"), [(2.0, "tp"), (0.5, "1/tp")])
def test_copies_of_one_wrong_scale_are_a_ratio(tmp_path: Path, scale: float, name: str) -> None:
    """They differ by rounding alone, so that each is the baseline times the number of ranks, or divided by it."""
    values = noise(0)
    baseline = write_baseline(tmp_path / "a", {NORM: values})
    copies = [scale * values, scale * values * (1 + 2.0**-22)]
    ranks = [(place, {NORM: copies[place.global_rank]}) for place in places(tp=2)]
    expected = f"candidate is {scale:.3f} times the baseline: {name}"
    assert residual_text(baseline, write(tmp_path / "b", ranks)) == expected


def test_a_rank_that_alone_is_wrong_is_named(tmp_path: Path) -> None:
    values = noise(0)
    baseline = write_baseline(tmp_path / "a", {NORM: values})
    ranks = [(place, {NORM: noise(5) if place.global_rank == 0 else values}) for place in places(tp=3)]
    expected = "copies at tp1, tp2 are the baseline's, and those at tp0 are not"
    assert residual_text(baseline, write(tmp_path / "b", ranks)) == expected


def test_a_part_that_was_added_twice_is_named_by_its_rank(tmp_path: Path) -> None:
    """The first rank holds the sum and, once more, the second's part."""
    other = noise(1)
    baseline = write_baseline(tmp_path / "a", {NORM: noise(0)})
    copies = [noise(0) + other, other]
    ranks = [(place, {NORM: copies[place.global_rank]}) for place in places(tp=2)]
    assert residual_text(baseline, write(tmp_path / "b", ranks)) == "the part of tp1 is in the candidate once more"


def test_outputs_that_were_not_summed_are_put_in_the_baselines_order_first(tmp_path: Path) -> None:
    rows = RowTable(identities=("g0/e0", "g0/e1"), lengths=(3, 5))
    turned = RowTable(identities=("g0/e1", "g0/e0"), lengths=(5, 3))
    order = torch.tensor([3, 4, 5, 6, 7, 0, 1, 2])
    own, name = [noise(0, 8, 16), noise(1, 8, 16)], "decoder.layers.0.mlp.linear_fc2"
    dims: tuple[DimName, ...] = ("token", "channel")
    baseline = write_baseline(tmp_path / "a", {name: own[0] + own[1]}, kind="activation", dims=dims, rows=rows)
    ranks = [(place, {name: own[place.global_rank][order]}) for place in places(tp=2)]
    candidate = write(tmp_path / "b", ranks, kind="activation", dims=dims, rows=turned)
    assert residual_text(baseline, candidate) == (
        "not summed over tp: each tp rank holds its own part, and their sum is the baseline"
    )


def test_copies_that_are_noise_look_like_nothing(tmp_path: Path) -> None:
    baseline = write_baseline(tmp_path / "a", {NORM: noise(0)})
    ranks = [(place, {NORM: noise(3 + place.global_rank)}) for place in places(tp=2)]
    _, (difference,) = judge(baseline, write(tmp_path / "b", ranks))
    assert difference.residual is None


def test_of_large_tensors_evenly_spaced_elements_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "SAMPLE_ELEMENTS", 20)
    own = [noise(0), noise(1)]
    baseline = write_baseline(tmp_path / "a", {NORM: own[0] + own[1]})
    ranks = [(place, {NORM: own[place.global_rank]}) for place in places(tp=2)]
    text = residual_text(baseline, write(tmp_path / "b", ranks))
    assert text.endswith("their sum is the baseline (seen in 13 of 64 elements)")
