"""Headers that claim more than their files hold: refused before memory is taken, or read in as much as is stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mock_scheduler.comparison.pairing.order import order_keys
from mock_scheduler.comparison.pairing.pairs import pair_up
from mock_scheduler.comparison.pairing.tokens import align_tokens
from mock_scheduler.errors import TraceError
from mock_scheduler.trace.entries import RowTable, StepFooter
from mock_scheduler.trace.full.reader import MergedTensor, open_trace
from mock_scheduler.trace.full.whole import WholeTensor
from mock_scheduler.trace.geometry import canonical_mask, element_places
from mock_scheduler.trace.shards import Block, ShardSpec, Split, blocks_of_indices, whole
from tests.fuzz.mutations import limits
from tests.trace.builders import LOGPROBS, NORM, entry, key, refused, refused_merge, reseal, save

#: What a test may take beyond what the process has: far less than any of the claims.
MORE_BYTES = 512 * 2**20
BIG = (2**30, 2**37)


def claim_tokens(folder: Path, num_tokens: int, *, world_size: int = 1, is_masked: bool = True) -> None:
    """One token of a token tensor of many."""
    footer = StepFooter(
        rows=RowTable(identities=("r",), lengths=(num_tokens,)),
        update_rows=((0,),),
        ranks=(0,) if world_size > 1 else (),
        kinds=("output",),
        patterns=("*",),
    )
    spec = ShardSpec(
        name=LOGPROBS,
        global_shape=(num_tokens,),
        local_shape=(1,),
        splits=(Split(dim=0, blocks=blocks_of_indices([0])),),
    )
    item = entry(spec, torch.ones(1), kind="output", dims=("token",), is_masked=is_masked)
    save(folder, 0, world_size, [item], footer=footer)


@pytest.mark.parametrize("num_tokens", BIG)
@pytest.mark.parametrize(("world_size", "is_masked"), [(1, True), (1, False), (2, True)])
def test_tokens_beyond_what_is_stored_are_refused(
    tmp_path: Path, num_tokens: int, world_size: int, is_masked: bool
) -> None:
    """A file of 924 bytes that says 2^30 tokens took 6 GB."""
    claim_tokens(tmp_path, num_tokens, world_size=world_size, is_masked=is_masked)
    with limits(MORE_BYTES):
        problem = refused_merge(tmp_path, key(LOGPROBS, kind="output"))
    assert problem == (
        f"output of {LOGPROBS} at step 0, update 0: has {num_tokens} elements, where the files of its step store 4 "
        "bytes, from which at most 4194304 elements are put together; trace more ranks, or more of its tokens"
    )


def test_a_weight_is_read_whatever_number_of_tokens_the_step_claims(tmp_path: Path) -> None:
    """A trace of gradients alone says how many tokens were trained on, and has none."""
    footer = StepFooter(rows=RowTable(identities=("r",), lengths=(2**37,)), update_rows=((0,),))
    save(tmp_path, 0, 1, [entry(whole(NORM, (4,)), torch.arange(4.0))], footer=footer)
    with limits(MORE_BYTES), open_trace(tmp_path) as reader:
        assert reader.merge(key(NORM)).tensor.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_tokens_of_two_claims_are_matched_only_for_a_tensor_that_has_them() -> None:
    ours, theirs = (RowTable(identities=(name,), lengths=(2**37,)) for name in "ab")
    with limits(MORE_BYTES):
        tokens = align_tokens(ours, theirs)
        side = MergedTensor(values=WholeTensor.of(torch.ones(3)), conflicts=(), dims=("token",))
        pair_up(key(LOGPROBS), (side, side), tokens)
    assert not tokens.is_same_order


def odd_blocks(num: int) -> tuple[Block, ...]:
    return tuple(Block(local_start=i, global_start=2 * i, length=1) for i in range(num))


@pytest.mark.parametrize("num", [300, 3000])
@pytest.mark.parametrize("num_dims", [2, 3])
def test_blocks_that_cut_a_matrix_into_more_regions_than_elements_are_refused(
    tmp_path: Path, num: int, num_dims: int
) -> None:
    """A header of 114 KB took 6 GB: one count for each of the cells that its blocks cut."""
    splits = tuple(Split(dim=dim, blocks=odd_blocks(num)) for dim in range(num_dims))
    shapes = {"global_shape": (2 * num,) * num_dims, "local_shape": (num,) * num_dims}
    spec = ShardSpec(name=NORM, splits=splits, flat_range=(0, 0), **shapes)  # type: ignore[arg-type]
    path = save(tmp_path, 0, 1, [entry(spec, torch.ones(0))])
    with limits(MORE_BYTES):
        problem = refused(tmp_path)
    assert problem == (
        f"{path}: the metadata is not that of a trace: {NORM}: blocks cut it into {num**num_dims} regions; it stores 0 "
        "elements"
    )


def test_pieces_on_a_diagonal_do_not_make_a_cell_for_each_pair_of_them(tmp_path: Path) -> None:
    num = 600
    entries = []
    for index in range(num):
        block = (Block(local_start=0, global_start=index, length=1),)
        splits = (Split(dim=0, blocks=block), Split(dim=1, blocks=block))
        spec = ShardSpec(name=NORM, global_shape=(num, num), local_shape=(1, 1), splits=splits)
        entries.append(entry(spec, torch.ones(1, 1), kind="output", dims=("token", "channel")))
    save(tmp_path, 0, 1, entries)
    with limits(MORE_BYTES):
        problem = refused_merge(tmp_path, key(NORM, kind="output"))
    assert problem == f"{num} pieces cut a tensor into {num * num} cells; expected at most {1 << 18}"


@pytest.mark.parametrize("local_shape", [(2**18, 2**18), (2**10, 2**26)])
def test_a_flat_range_takes_as_much_as_it_holds_of_its_local_tensor(local_shape: tuple[int, int]) -> None:
    """Places and padding of a few elements were looked up in a list of all elements of the local tensor."""
    split = Split(dim=0, blocks=(Block(local_start=1, global_start=0, length=local_shape[0] - 1),))
    shape = (local_shape[0] - 1, local_shape[1])
    start = local_shape[1] - 2
    spec = ShardSpec(
        name=NORM, global_shape=shape, local_shape=local_shape, splits=(split,), flat_range=(start, start + 4)
    )
    with limits(MORE_BYTES):
        local, places = element_places(spec)
        mask = canonical_mask(spec)
    assert local.tolist() == [2, 3]
    assert places.tolist() == [0, 1]
    assert mask is not None
    assert mask.tolist() == [False, False, True, True]


@pytest.mark.parametrize("world_size", [2**19, 2**20])
def test_missing_ranks_are_counted_and_some_are_named(tmp_path: Path, world_size: int) -> None:
    """A world size of 2^20 in 6 KB took 70 MB, and made a text of a million numbers."""
    save(tmp_path, 0, world_size, [entry(whole(NORM, (4,)), torch.ones(4))])
    problem = refused(tmp_path)
    named = ", ".join(map(str, range(1, 21)))
    first = "first rank_00001.part_000.safetensors"
    expected = f"no file of global rank {named} and {world_size - 21} more of {world_size} ({first})"
    assert problem == f"{tmp_path / 'step_000000'}: {expected}"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda record: record.update(global_shape=[0, 2**62], local_shape=[0, 2**62]), "has more than"),
        (lambda record: record.update(local_shape=[2**50], splits=[[0, 0]], flat_range=[0, 4]), "has more than"),
        (lambda record: record.update(global_shape=[1] * 40, local_shape=[1] * 40), "local shape"),
        (lambda record: record.update(global_shape=[400], local_shape=[400]), "lists 1600 bytes of tensors in a file"),
        (lambda record: record.update(name="layers." + "9" * 2000), "String should have at most 1000 characters"),
        (lambda record: record.update(dtype="quint8"), "is of dtype 'quint8'"),
        (lambda record: record.update(dtype="int4"), "is of dtype 'int4'"),
    ],
)
def test_a_record_that_claims_what_no_tensor_has_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], problem: str
) -> None:
    path = save(tmp_path, 0, 1, [entry(whole(NORM, (4,)), torch.ones(4))])

    def forge(document: dict[str, Any]) -> None:
        document["blocks"].append([[0, 0, 4]])
        change(document["tensors"][f"000000/gradient/{NORM}"])

    reseal(path, forge)
    with limits(MORE_BYTES):
        assert problem in refused(tmp_path)


def test_a_stored_tensor_of_another_dtype_than_the_header_says_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 0, 1, [entry(whole(NORM, (4,)), torch.ones(4))])
    reseal(path, lambda document: document["tensors"][f"000000/gradient/{NORM}"].update(dtype="int32"))
    assert "does not match its digest" in refused_merge(tmp_path, key(NORM))


def test_a_token_tensor_without_elements_is_no_traceback(tmp_path: Path) -> None:
    """Torch cannot flatten it, which ended in a traceback."""
    spec = ShardSpec(name=LOGPROBS, global_shape=(3, 0), local_shape=(3, 0))
    footer = StepFooter(rows=RowTable(identities=("r",), lengths=(3,)), update_rows=((0,),))
    save(tmp_path, 0, 1, [entry(spec, torch.ones(3, 0), kind="output", dims=("token", "channel"))], footer=footer)
    with open_trace(tmp_path) as reader:
        assert reader.merge(key(LOGPROBS, kind="output")).tensor.shape == (3, 0)


def test_names_with_odd_digits_have_a_place_in_the_order() -> None:
    """A superscript two is a digit for Python, and no number."""
    names = ["decoder.layers.\N{SUPERSCRIPT TWO}.mlp", "decoder.layers.10.mlp", "decoder.layers.2.mlp"]
    ordered = order_keys(key(name, kind="activation") for name in names)
    assert [item.name for item in ordered][:2] == ["decoder.layers.2.mlp", "decoder.layers.10.mlp"]


def test_complex_values_are_not_compared() -> None:
    side = MergedTensor(values=WholeTensor.of(torch.ones(2, dtype=torch.complex64)), conflicts=())
    rows = RowTable()
    with pytest.raises(TraceError, match=r"values of torch.complex64 and torch.complex64 cannot be compared"):
        pair_up(key(NORM), (side, side), align_tokens(rows, rows))
