"""Merging: what ranks wrote comes out whole, bit for bit; what disagrees, is missing or too much is named."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mock_scheduler.config.instruments import TRACE_KINDS
from mock_scheduler.errors import TraceError
from mock_scheduler.trace.entries import StepFooter, TraceEntry, TraceKey
from mock_scheduler.trace.full.reader import MergedTensor, open_trace
from mock_scheduler.trace.replicas import ReplicaConflict
from mock_scheduler.trace.shards import Block, ShardSpec, Split, cut_shard, even_split, whole
from tests.trace.builders import (
    FC1,
    HIDDEN,
    LOGPROBS,
    NORM,
    ROWS,
    entry,
    gated_spec,
    key,
    place,
    refused_merge,
    save,
    token_piece,
)

LOGPROBS_KEY = key(LOGPROBS, kind="output")
HIDDEN_KEY = key(HIDDEN, kind="activation")


def merge(trace_dir: Path, wanted: TraceKey) -> MergedTensor:
    with open_trace(trace_dir) as reader:
        return reader.merge(wanted)


def save_ranks(trace_dir: Path, ranks: Sequence[Sequence[TraceEntry]], footer: StepFooter | None = None) -> None:
    for rank, entries in enumerate(ranks):
        save(trace_dir, rank, len(ranks), entries, footer=footer)


def hidden_piece(tensor: torch.Tensor, tokens: Sequence[int], channels: Sequence[int] | None = None) -> TraceEntry:
    return token_piece(tensor, tokens, name=HIDDEN, kind="activation", channels=channels)


def test_a_gated_mlp_split_over_tp_merges_to_the_whole(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).reshape(8, 3)
    save_ranks(tmp_path, [[entry(gated_spec(rank), cut_shard(tensor, gated_spec(rank)))] for rank in range(2)])
    merged = merge(tmp_path, key(FC1))
    assert merged.tensor.tolist() == tensor.tolist()
    assert (merged.conflicts, merged.present) == ((), None)


def test_flat_ranges_of_the_distributed_optimizer_merge_and_store_only_what_is_owned(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).reshape(8, 3)
    spans = [(0, (0, 5)), (0, (5, 12)), (1, (0, 12)), (1, (12, 12))]
    for rank, (tp_rank, flat_range) in enumerate(spans):
        spec = gated_spec(tp_rank, flat_range=flat_range)
        local = cut_shard(tensor, spec)
        local.view(-1)[: flat_range[0]] = math.nan
        local.view(-1)[flat_range[1] :] = math.nan
        save(tmp_path, rank, 4, [entry(spec, local)])
    assert torch.equal(merge(tmp_path, key(FC1)).tensor, tensor)


def test_an_already_flat_tensor_of_the_owned_range_is_accepted(tmp_path: Path) -> None:
    ranges, values = [(1, 3), (0, 1), (3, 4)], [[1.0, 2.0], [0.0], [3.0]]
    specs = [ShardSpec(name=NORM, global_shape=(4,), local_shape=(4,), flat_range=owned) for owned in ranges]
    save_ranks(tmp_path, [[entry(spec, torch.tensor(part))] for spec, part in zip(specs, values, strict=True)])
    assert merge(tmp_path, key(NORM)).tensor.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_flat_ranges_that_leave_out_a_local_tensors_padding_merge(tmp_path: Path) -> None:
    """A vocabulary of 3 in a local tensor of 4 rows, of which ranks own elements 0 to 3 and 3 to 7."""
    split = Split(dim=0, blocks=(Block(local_start=0, global_start=0, length=3),))
    tensor = torch.arange(6.0).reshape(3, 2)
    for rank, owned in enumerate([(0, 3), (3, 7)]):
        spec = ShardSpec(name=NORM, global_shape=(3, 2), local_shape=(4, 2), splits=(split,), flat_range=owned)
        save(tmp_path, rank, 2, [entry(spec, cut_shard(tensor, spec))])
    assert torch.equal(merge(tmp_path, key(NORM)).tensor, tensor)


def test_one_flipped_bit_in_one_replica_is_a_conflict_that_names_axis_and_ranks(tmp_path: Path) -> None:
    values = torch.ones(4)
    flipped = values.clone()
    flipped.view(torch.int32)[2] ^= 1
    save_ranks(tmp_path, [[entry(whole(NORM, (4,)), tensor)] for tensor in (values, flipped)])
    merged = merge(tmp_path, key(NORM))
    (conflict,) = merged.conflicts
    assert conflict.axes == ("tp",)
    assert (conflict.num_elements, conflict.max_abs) == (1, 2**-23)
    assert conflict.describe() == (
        "decoder.layers.0.input_layernorm.weight: ranks tp0 and tp1 hold different gradients at step 0 "
        "(1 element, by up to 1.19e-07)"
    )
    assert torch.equal(merged.tensor, values)


def test_a_conflict_of_every_kind_reads_as_english() -> None:
    said = [
        ReplicaConflict(key=key("x", kind=kind), first=place(0), second=place(1), num_elements=2, max_abs=1.0)
        .describe()
        .removeprefix("x: ranks tp0 and tp1 hold different ")
        .removesuffix(" at step 0 (2 elements, by up to 1)")
        for kind in TRACE_KINDS
    ]
    assert said == [
        "initial parameters",
        "inputs",
        "scores",
        "advantages",
        "recomputed values",
        "activations",
        "router values",
        "logits",
        "outputs",
        "loss terms",
        "activation gradients",
        "gradients",
        "gradient norms",
        "optimizer states",
        "parameters",
        "weights",
    ]


def test_the_sign_of_zero_is_a_conflict_and_equal_nans_are_none(tmp_path: Path) -> None:
    values = torch.tensor([0.0, math.nan]), torch.tensor([-0.0, math.nan])
    save_ranks(tmp_path, [[entry(whole(NORM, (2,)), tensor)] for tensor in values])
    (conflict,) = merge(tmp_path, key(NORM)).conflicts
    assert (conflict.num_elements, conflict.max_abs) == (1, 0.0)


def test_padding_that_differs_between_replicas_is_no_conflict(tmp_path: Path) -> None:
    split = Split(dim=0, blocks=(Block(local_start=0, global_start=0, length=2),))
    spec = ShardSpec(name=NORM, global_shape=(2,), local_shape=(3,), splits=(split,))
    values = torch.tensor([1.0, 2.0, 7.0]), torch.tensor([1.0, 2.0, 8.0]), torch.tensor([1.0, 3.0, 9.0])
    save_ranks(tmp_path, [[entry(spec, tensor)] for tensor in values])
    merged = merge(tmp_path, key(NORM))
    assert merged.tensor.tolist() == [1.0, 2.0]
    assert [(item.second.global_rank, item.num_elements, item.max_abs) for item in merged.conflicts] == [(2, 1, 1.0)]


def test_conflicts_of_several_micro_batches_are_one_for_each_pair_of_ranks(tmp_path: Path) -> None:
    tensor = torch.arange(9.0)
    other = tensor + torch.tensor([0, 0, 0.5, 0, 0, 0, 0, math.nan, 3])
    ranks = [[token_piece(side, part) for part in ([0, 1, 2, 3, 4], [5, 6, 7, 8])] for side in (tensor, other, tensor)]
    save_ranks(tmp_path, ranks)
    merged = merge(tmp_path, LOGPROBS_KEY)
    (conflict,) = merged.conflicts
    assert (conflict.first.global_rank, conflict.second.global_rank, conflict.num_elements) == (0, 1, 3)
    assert math.isnan(conflict.max_abs)
    assert torch.equal(merged.tensor, tensor)


def test_pieces_of_two_ranks_that_overlap_in_part_are_compared_where_they_do(tmp_path: Path) -> None:
    tensor = torch.arange(18.0).reshape(9, 2)
    other = tensor.clone()
    other[4, 1] += 0.25
    other[8, 0] = -1.0
    save_ranks(tmp_path, [[hidden_piece(tensor, range(5))], [hidden_piece(other, range(3, 9))]])
    merged = merge(tmp_path, HIDDEN_KEY)
    (conflict,) = merged.conflicts
    assert (conflict.num_elements, conflict.max_abs) == (1, 0.25)
    other[4, 1] = tensor[4, 1]
    assert torch.equal(merged.tensor, other)


@pytest.mark.parametrize("pieces", [([0, 1, 2], [2, 3]), ([2], [0, 1, 2])])
def test_an_element_that_one_rank_wrote_twice_is_an_error_naming_the_token(
    tmp_path: Path, pieces: tuple[list[int], list[int]]
) -> None:
    """A micro-batch that was traced twice, in part."""
    footer = StepFooter(rows=ROWS, update_rows=((0, 1, 2),))
    save(tmp_path, 0, 1, [token_piece(torch.ones(9), part) for part in pieces], footer=footer)
    assert refused_merge(tmp_path, LOGPROBS_KEY) == (
        "output of new_logprobs at step 0, update 0: global rank 0 (dp0 pp0 tp0) wrote the element at index [2] twice, "
        "position 2 of row train/0/a"
    )


def test_an_element_that_no_rank_holds_is_an_error_naming_the_gap(tmp_path: Path) -> None:
    save(tmp_path, 0, 1, [entry(gated_spec(0), torch.ones(4, 3))])
    assert refused_merge(tmp_path, key(FC1)) == (
        "gradient of decoder.layers.0.mlp.linear_fc1.weight at step 0, update 0: 12 of 24 elements are held by no "
        "rank, the first at index [2, 0]; pieces come from global rank 0"
    )


def test_a_flat_range_that_no_rank_holds_is_an_error_naming_the_gap(tmp_path: Path) -> None:
    spec = ShardSpec(name=NORM, global_shape=(2, 3), local_shape=(2, 3), flat_range=(0, 5))
    save(tmp_path, 0, 1, [entry(spec, torch.ones(5))])
    assert refused_merge(tmp_path, key(NORM)) == (
        f"gradient of {NORM} at step 0, update 0: 1 of 6 elements are held by no rank, the first at index [1, 2]; "
        "pieces come from global rank 0"
    )


def test_where_only_some_ranks_write_what_they_lack_is_absent(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).reshape(8, 3)
    footer = StepFooter(ranks=(1,))
    save(tmp_path, 1, 2, [entry(gated_spec(1), cut_shard(tensor, gated_spec(1)))], footer=footer)
    merged = merge(tmp_path, key(FC1))
    assert merged.present is not None
    assert merged.present.tolist() == [[row in (2, 3, 6, 7)] * 3 for row in range(8)]
    assert torch.equal(merged.tensor, tensor * merged.present)


UPDATES = StepFooter(rows=ROWS, update_rows=((0, 2), (1,)))


def test_an_update_holds_the_tokens_of_its_rows_and_no_others(tmp_path: Path) -> None:
    tensor = torch.arange(18.0).reshape(9, 2)
    save_ranks(tmp_path, [[hidden_piece(tensor, [0, 1, 2])], [hidden_piece(tensor, [5, 6, 7, 8])]], UPDATES)
    merged = merge(tmp_path, HIDDEN_KEY)
    assert merged.dims == ("token", "channel")
    assert merged.present is not None
    assert merged.present.tolist() == [[token not in (3, 4)] for token in range(9)]
    assert torch.equal(merged.tensor, tensor * merged.present)


def test_a_dropped_micro_batch_is_an_error_naming_row_and_position(tmp_path: Path) -> None:
    tensor = torch.arange(9.0)
    save_ranks(tmp_path, [[token_piece(tensor, [0, 1, 2])], [token_piece(tensor, [5, 6])]], UPDATES)
    assert refused_merge(tmp_path, LOGPROBS_KEY) == (
        "output of new_logprobs at step 0, update 0: 2 of 7 tokens are held by no rank, the first is position 2 of row "
        "train/1/c; pieces come from global rank 0, 1"
    )


def test_of_a_run_that_is_judged_tokens_that_no_rank_holds_are_absent_and_told(tmp_path: Path) -> None:
    tensor = torch.arange(9.0)
    save_ranks(tmp_path, [[token_piece(tensor, [0, 1, 2])], [token_piece(tensor, [5, 6])]], UPDATES)
    with open_trace(tmp_path) as reader:
        merged = reader.merge(LOGPROBS_KEY, may_lack_tokens=True)
    assert merged.missing == (
        "2 of 7 tokens are held by no rank, the first is position 2 of row train/1/c; pieces come from global rank 0, 1"
    )
    assert merged.present is not None
    assert merged.present.nonzero().flatten().tolist() == [0, 1, 2, 5, 6]


def test_a_shard_that_is_missing_is_an_error_of_a_run_that_is_judged_too(tmp_path: Path) -> None:
    tensor = torch.ones(9, 4)
    save_ranks(tmp_path, [[hidden_piece(tensor, range(9), [0, 1])], [hidden_piece(tensor, range(8), [2, 3])]])
    with open_trace(tmp_path) as reader, pytest.raises(TraceError, match="2 of 36 elements are held by no rank"):
        reader.merge(HIDDEN_KEY, may_lack_tokens=True)


def test_a_row_that_is_not_in_the_update_is_an_error_naming_row_position_and_rank(tmp_path: Path) -> None:
    tensor = torch.arange(9.0)
    save_ranks(tmp_path, [[token_piece(tensor, [0, 1, 2])], [token_piece(tensor, range(3, 9))]], UPDATES)
    assert refused_merge(tmp_path, LOGPROBS_KEY) == (
        "output of new_logprobs at step 0, update 0: 2 tokens are of rows that are not in the update, the first is "
        "position 0 of row train/0/b, held by global rank 1"
    )


def test_a_step_kind_has_the_tokens_of_all_rows(tmp_path: Path) -> None:
    tensor = torch.arange(9.0)
    save(tmp_path, 0, 1, [token_piece(tensor, range(8), kind="score")], footer=UPDATES)
    assert "1 of 9 tokens are held by no rank, the first is position 3 of row train/1/c" in refused_merge(
        tmp_path, key(LOGPROBS, kind="score")
    )


def test_an_update_that_the_trace_does_not_have_has_no_tokens(tmp_path: Path) -> None:
    save(tmp_path, 0, 1, [token_piece(torch.ones(9), [0], update=2)], footer=UPDATES)
    assert "1 tokens are of rows that are not in the update" in refused_merge(tmp_path, replace(LOGPROBS_KEY, update=2))


def test_a_masked_tensor_may_lack_tokens_but_has_none_of_other_rows(tmp_path: Path) -> None:
    tensor = torch.arange(9.0)
    save(tmp_path / "few", 0, 1, [token_piece(tensor, [1, 2, 8], is_masked=True)], footer=UPDATES)
    merged = merge(tmp_path / "few", LOGPROBS_KEY)
    assert merged.present is not None
    assert merged.present.nonzero().flatten().tolist() == [1, 2, 8]
    save(tmp_path / "other", 0, 1, [token_piece(tensor, [1, 4], is_masked=True)], footer=UPDATES)
    assert "position 1 of row train/0/b, held by global rank 0" in refused_merge(tmp_path / "other", LOGPROBS_KEY)


def test_a_token_of_which_a_shard_is_missing_is_an_error(tmp_path: Path) -> None:
    tensor = torch.ones(9, 4)
    ranks = [[hidden_piece(tensor, range(9), [0, 1])], [hidden_piece(tensor, range(8), [2, 3])]]
    save_ranks(tmp_path, ranks)
    assert refused_merge(tmp_path, HIDDEN_KEY) == (
        "activation of decoder.layers.0 at step 0, update 0: 2 of 36 elements are held by no rank, the first at index "
        "[8, 2]; pieces come from global rank 0, 1"
    )


def test_where_only_some_ranks_write_token_tensors_have_gaps_of_tokens_and_channels(tmp_path: Path) -> None:
    tensor = torch.ones(9, 4)
    footer = replace(UPDATES, ranks=(0,))
    save(tmp_path, 0, 2, [hidden_piece(tensor, [0, 1], [0, 1]), hidden_piece(tensor, [5], [0, 1])], footer=footer)
    present = merge(tmp_path, HIDDEN_KEY).present
    assert present is not None
    assert present.nonzero().tolist() == [[token, channel] for token in (0, 1, 5) for channel in (0, 1)]


def test_a_number_of_tokens_that_is_not_the_batchs_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, 0, 1, [token_piece(torch.ones(8), range(8))], footer=UPDATES)
    assert refused_merge(tmp_path, LOGPROBS_KEY) == (
        "output of new_logprobs at step 0, update 0: has 8 tokens, the step's batch has 9"
    )


@pytest.mark.parametrize(
    ("other", "forms"),
    [
        (entry(whole(NORM, (1,)), torch.ones(1).bfloat16()), "0: float32 [1], global rank 1: bfloat16 [1]"),
        (entry(whole(NORM, (2,)), torch.ones(2)), "0: float32 [1], global rank 1: float32 [2]"),
        (entry(whole(NORM, (1,)), torch.ones(1), dims=("row",)), "0: float32 [1], global rank 1: float32 [1] (row)"),
        (
            entry(whole(NORM, (1,)), torch.ones(1), dims=("token",), is_masked=True),
            "0: float32 [1], global rank 1: float32 [1] (token), masked",
        ),
    ],
    ids=["dtype", "shape", "dims", "masked"],
)
def test_ranks_that_disagree_on_a_tensors_form_are_an_error(tmp_path: Path, other: TraceEntry, forms: str) -> None:
    save_ranks(tmp_path, [[entry(whole(NORM, (1,)), torch.ones(1))], [other]])
    assert refused_merge(tmp_path, key(NORM)) == (
        f"gradient of {NORM} at step 0, update 0: ranks disagree on dtype or whole shape (global rank {forms})"
    )


def test_a_large_tensor_split_along_its_second_dimension_merges(tmp_path: Path) -> None:
    """8 MiB, beyond which merged tensors are in memory of another kind."""
    tensor = torch.arange(1 << 21).view(1 << 11, 1 << 10).to(torch.int32)
    for rank in range(2):
        splits = even_split(1, size=1 << 10, rank=rank, num_ranks=2)
        spec = ShardSpec(name=NORM, global_shape=(1 << 11, 1 << 10), local_shape=(1 << 11, 1 << 9), splits=splits)
        save(tmp_path, rank, 2, [entry(spec, cut_shard(tensor, spec))])
    merged = merge(tmp_path, key(NORM)).tensor
    assert torch.equal(merged, tensor)
    assert merged.is_contiguous()


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0)])
def test_scalars_and_tensors_without_elements_merge(tmp_path: Path, shape: tuple[int, ...]) -> None:
    save_ranks(tmp_path, [[entry(whole(NORM, shape), torch.zeros(shape))] for _ in range(2)])
    merged = merge(tmp_path, key(NORM))
    assert (merged.tensor.shape, merged.conflicts, merged.present) == (shape, (), None)
