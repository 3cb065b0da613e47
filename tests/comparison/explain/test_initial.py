"""Parameters that were loaded wrongly: what each looks like is said, and what is only another number is not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from mock_scheduler.comparison.walk.traces import compare_trace_folders
from mock_scheduler.trace.entries import RankPlace, StepFooter, TraceEntry
from mock_scheduler.trace.full.writing import FullSink
from mock_scheduler.trace.shards import Block, ShardSpec, Split, even_split, whole
from mock_scheduler.verdict.wording.findings import describe_finding
from tests.comparison.stated import stated

FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
PROJ = "decoder.layers.0.self_attention.linear_proj.weight"
SAME = "both runs must start from the same weights, to the last bit"
Pieces = Mapping[ShardSpec, torch.Tensor]


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def write(folder: Path, ranks: list[Pieces]) -> Path:
    for rank, pieces in enumerate(ranks):
        place = RankPlace(global_rank=rank, coordinates={"tp": rank, "dp": 0})
        sink = FullSink(folder, step=0, place=place, world_size=len(ranks))
        for spec, tensor in pieces.items():
            sink.add(TraceEntry(update=0, kind="initial", spec=spec, tensor=tensor))
        sink.close(StepFooter(ranks=tuple(range(len(ranks))), update_rows=((),)))
    return folder


def messages(baseline: Path, candidate: Path) -> list[str]:
    return [describe_finding(item) for item in compare_trace_folders(baseline, candidate, bounds=stated()).findings]


def looks_like(tmp_path: Path, baseline: Mapping[str, torch.Tensor], candidate: list[Pieces]) -> str:
    """What the first parameter that differs looks like."""
    wholes = {whole(name, tuple(tensor.shape)): tensor for name, tensor in baseline.items()}
    first, *_ = messages(write(tmp_path / "a", [wholes]), write(tmp_path / "b", candidate))
    _, _, text = first.partition("differs: ")
    return text.removesuffix(SAME).removesuffix("; ")


def column_spec(rank: int) -> ShardSpec:
    """Half of 16 columns."""
    splits = even_split(1, size=16, rank=rank, num_ranks=2)
    return ShardSpec(name=PROJ, global_shape=(12, 16), local_shape=(12, 8), splits=splits)


def gated_spec(rank: int) -> ShardSpec:
    """A half of gate rows 0 to 11, and of up rows 12 to 23."""
    blocks = tuple(Block(local_start=6 * part, global_start=12 * part + 6 * rank, length=6) for part in range(2))
    return ShardSpec(name=FC1, global_shape=(24, 8), local_shape=(12, 8), splits=(Split(dim=0, blocks=blocks),))


def test_shards_of_each_others_ranks_are_told(tmp_path: Path) -> None:
    full = noise(0, 12, 16)
    ranks: list[Pieces] = [{column_spec(0): full[:, 8:]}, {column_spec(1): full[:, :8]}]
    assert looks_like(tmp_path, {PROJ: full}, ranks) == (
        "candidate has columns 0 to 7 and 8 to 15 of the baseline exchanged: the shards of tp0 and tp1 are swapped, "
        "each holds the other's part"
    )


def test_a_gated_layer_that_was_cut_in_one_piece_is_told(tmp_path: Path) -> None:
    full = noise(0, 24, 8)
    ranks: list[Pieces] = [{gated_spec(0): full[:12]}, {gated_spec(1): full[12:]}]
    assert looks_like(tmp_path, {FC1: full}, ranks) == (
        "candidate has rows 6 to 11 and 12 to 17 of the baseline exchanged: it was cut over tp in one piece, where "
        "gate and up are each cut over tp"
    )


def test_a_parameter_of_another_layer_is_told_by_its_name(tmp_path: Path) -> None:
    names = [f"decoder.layers.{layer}.mlp.linear_fc2.weight" for layer in range(12)]
    tensors = {name: noise(seed, 8, 6) for seed, name in enumerate(names)}
    loaded: Pieces = {whole(name, (8, 6)): tensors[names[1] if name == names[2] else name] for name in names}
    assert looks_like(tmp_path, tensors, [loaded]) == f"candidate is the baseline's {names[1]}"


def test_a_multiple_and_a_lost_part_are_told(tmp_path: Path) -> None:
    full = noise(0, 24, 8)
    scaled: Pieces = {whole(FC1, (24, 8)): full * 1.01}
    assert looks_like(tmp_path / "scaled", {FC1: full}, [scaled]) == "candidate is 1.010 times the baseline"
    lost = full.clone()
    lost[3:7] = 0.0
    assert looks_like(tmp_path / "lost", {FC1: full}, [{whole(FC1, (24, 8)): lost}]) == (
        "candidate is zero in 32 elements of 192"
    )


def test_other_numbers_look_like_nothing(tmp_path: Path) -> None:
    other: Pieces = {whole(FC1, (24, 8)): noise(1, 24, 8)}
    assert looks_like(tmp_path, {FC1: noise(0, 24, 8)}, [other]) == ""


def test_of_many_the_first_six_are_looked_at(tmp_path: Path) -> None:
    names = [f"decoder.layers.{layer}.mlp.linear_fc2.weight" for layer in range(8)]
    baseline = write(tmp_path / "a", [{whole(name, (8, 6)): noise(0, 8, 6) for name in names}])
    candidate = write(tmp_path / "b", [{whole(name, (8, 6)): 2 * noise(0, 8, 6) for name in names}])
    found = messages(baseline, candidate)
    assert ["2.000 times" in message for message in found] == [True] * 6 + [False] * 2
    assert found[7] == f"parameter of {names[7]} before step 0 differs: {SAME}"
