"""Trace files: what goes in comes out merged, and every damage is found and named."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mock_scheduler.digests import canonical_json, open_sealed, seal
from mock_scheduler.errors import TraceError
from mock_scheduler.trace.entries import TraceEntry, TraceKey
from mock_scheduler.trace.files import METADATA_KEY, save_rank_trace
from mock_scheduler.trace.kinds import TraceKind
from mock_scheduler.trace.reader import open_trace
from mock_scheduler.trace.shards import Block, ShardSpec, Split, cut_shard, whole

NORM = "decoder.layers.0.input_layernorm.weight"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


def key(name: str, *, kind: TraceKind = "gradient", step: int = 0, update: int = 0) -> TraceKey:
    return TraceKey(step=step, update=update, kind=kind, name=name)


def entry(spec: ShardSpec, tensor: torch.Tensor, *, kind: TraceKind = "gradient", update: int = 0) -> TraceEntry:
    return TraceEntry(update=update, kind=kind, spec=spec, tensor=tensor)


def save(trace_dir: Path, rank: int, world_size: int, entries: list[TraceEntry], *, step: int = 0) -> Path:
    return save_rank_trace(
        trace_dir,
        step=step,
        global_rank=rank,
        world_size=world_size,
        coordinates={"tp": rank, "pp": 0, "dp": 0},
        entries=entries,
    )


def gated_spec(tp_rank: int, *, flat_range: tuple[int, int] | None = None) -> ShardSpec:
    """Rank ``tp_rank`` of 2: half of the gate rows 0-3 and half of the up rows 4-7."""
    blocks = tuple(Block(local_start=2 * half, global_start=4 * half + 2 * tp_rank, length=2) for half in range(2))
    return ShardSpec(
        name=FC1, global_shape=(8, 3), local_shape=(4, 3), splits=(Split(dim=0, blocks=blocks),), flat_range=flat_range
    )


def test_a_gated_mlp_split_over_tp_merges_to_the_whole(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).reshape(8, 3)
    for tp_rank in range(2):
        spec = gated_spec(tp_rank)
        save(tmp_path, tp_rank, 2, [entry(spec, cut_shard(tensor, spec))])
    with open_trace(tmp_path) as reader:
        merged = reader.merge(key(FC1))
    assert merged.tensor.tolist() == tensor.tolist()
    assert merged.conflicts == ()


def test_flat_ranges_of_the_distributed_optimizer_merge_and_store_only_what_is_owned(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).reshape(8, 3)
    spans = [(0, (0, 5)), (0, (5, 12)), (1, (0, 12)), (1, (12, 12))]
    for rank, (tp_rank, flat_range) in enumerate(spans):
        spec = gated_spec(tp_rank, flat_range=flat_range)
        local = cut_shard(tensor, spec)
        local.view(-1)[: flat_range[0]] = math.nan
        local.view(-1)[flat_range[1] :] = math.nan
        save(tmp_path, rank, 4, [entry(spec, local)])
    with open_trace(tmp_path) as reader:
        assert torch.equal(reader.merge(key(FC1)).tensor, tensor)


def test_an_already_flat_tensor_of_the_owned_range_is_accepted(tmp_path: Path) -> None:
    spec = ShardSpec(name=NORM, global_shape=(4,), local_shape=(4,), flat_range=(1, 3))
    rest = [ShardSpec(name=NORM, global_shape=(4,), local_shape=(4,), flat_range=(a, b)) for a, b in ((0, 1), (3, 4))]
    save(tmp_path, 0, 3, [entry(spec, torch.tensor([1.0, 2.0]))])
    save(tmp_path, 1, 3, [entry(rest[0], torch.tensor([0.0]))])
    save(tmp_path, 2, 3, [entry(rest[1], torch.tensor([3.0]))])
    with open_trace(tmp_path) as reader:
        assert reader.merge(key(NORM)).tensor.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_one_flipped_bit_in_one_replica_is_a_conflict_that_names_axis_and_ranks(tmp_path: Path) -> None:
    values = torch.ones(4)
    flipped = values.clone()
    flipped.view(torch.int32)[2] ^= 1
    save(tmp_path, 0, 2, [entry(whole(NORM, (4,)), values)])
    save(tmp_path, 1, 2, [entry(whole(NORM, (4,)), flipped)])
    with open_trace(tmp_path) as reader:
        merged = reader.merge(key(NORM))
    (conflict,) = merged.conflicts
    assert conflict.axes == ("tp",)
    assert (conflict.num_elements, conflict.max_abs) == (1, 2**-23)
    assert conflict.describe() == (
        "decoder.layers.0.input_layernorm.weight: ranks tp0 and tp1 hold different gradients at step 0 "
        "(1 element, by up to 1.19e-07)"
    )
    assert torch.equal(merged.tensor, values)


def test_the_sign_of_zero_is_a_conflict_and_equal_nans_are_none(tmp_path: Path) -> None:
    save(tmp_path, 0, 2, [entry(whole(NORM, (2,)), torch.tensor([0.0, math.nan]))])
    save(tmp_path, 1, 2, [entry(whole(NORM, (2,)), torch.tensor([-0.0, math.nan]))])
    with open_trace(tmp_path) as reader:
        (conflict,) = reader.merge(key(NORM)).conflicts
    assert (conflict.num_elements, conflict.max_abs) == (1, 0.0)


def test_an_element_that_no_rank_holds_is_an_error_naming_the_gap(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).reshape(8, 3)
    spec = gated_spec(0)
    save(tmp_path, 0, 1, [entry(spec, cut_shard(tensor, spec))])
    with open_trace(tmp_path) as reader, pytest.raises(TraceError) as caught:
        reader.merge(key(FC1))
    assert str(caught.value) == (
        "gradient of decoder.layers.0.mlp.linear_fc1.weight at step 0, update 0: 12 of 24 elements are held by no "
        "rank, the first at index [2, 0]; pieces come from global rank 0"
    )


def test_a_missing_rank_file_is_an_error_naming_the_rank(tmp_path: Path) -> None:
    for rank in range(2):
        save(tmp_path, rank, 2, [entry(whole(NORM, (1,)), torch.ones(1))])
    (tmp_path / "step_000000" / "rank_00001.safetensors").unlink()
    with pytest.raises(TraceError) as caught:
        open_trace(tmp_path)
    assert str(caught.value) == f"{tmp_path / 'step_000000'}: no file of global rank 1 of 2"


def test_swapped_rank_files_are_an_error_naming_both(tmp_path: Path) -> None:
    first, second = (save(tmp_path, rank, 2, [entry(whole(NORM, (1,)), torch.ones(1))]) for rank in range(2))
    aside = tmp_path / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    with pytest.raises(TraceError) as caught:
        open_trace(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / 'step_000000'}: rank_00000.safetensors holds step 0 of global rank 1; "
        "rank_00001.safetensors holds step 0 of global rank 0"
    )


def test_a_damaged_byte_is_found_and_named(tmp_path: Path) -> None:
    path = save(tmp_path, 0, 1, [entry(whole(NORM, (4,)), torch.ones(4))])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with open_trace(tmp_path) as reader, pytest.raises(TraceError) as caught:
        reader.merge(key(NORM))
    assert str(caught.value) == (
        f"{path}: 000000/gradient/{NORM} does not match its digest; "
        "the file was changed or damaged after it was written"
    )


def save_one(trace_dir: Path) -> Path:
    return save(trace_dir, 0, 1, [entry(whole(NORM, (4,)), torch.ones(4))])


def refused(trace_dir: Path) -> str:
    with pytest.raises(TraceError) as caught:
        open_trace(trace_dir)
    return str(caught.value)


def rewrite_metadata(path: Path, change: Callable[[str], str]) -> None:
    """Replace the text of the metadata in a trace file, and nothing else."""
    with safe_open(path, framework="pt") as handle:
        text = handle.metadata()[METADATA_KEY]
    save_file(load_file(path), path, metadata={METADATA_KEY: change(text)})


def reseal(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the metadata's content and give it a digest that fits."""

    def rewrite(text: str) -> str:
        content = open_sealed(text)
        change(content)
        return canonical_json(seal(content))

    rewrite_metadata(path, rewrite)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: text.replace('"tp":0', '"tp":1'), "does not match its digest"),
        (lambda text: text.replace('"format_version":2', '"format_version":3'), "does not match its digest"),
        (lambda text: text.replace('"digest"', '"digets"'), "does not match its digest"),
        (lambda text: text.replace('"tp":0', '"tp":NaN'), "does not match its digest"),
        (lambda text: text[1:], "is not JSON: Extra data: line 1 column 14 (char 13)"),
        (lambda _: "[]", "is of type list, expected an object"),
        (lambda _: "null", "is of type NoneType, expected an object"),
    ],
    ids=["value", "version", "no-digest", "nan", "no-json", "list", "null"],
)
def test_changed_metadata_is_found_before_anything_in_it_is_read(
    tmp_path: Path, change: Callable[[str], str], problem: str
) -> None:
    """Metadata that was no JSON, or no object, was a JSONDecodeError or AttributeError, which ended a whole align."""
    path = save_one(tmp_path)
    rewrite_metadata(path, change)
    assert refused(tmp_path) == (
        f"{path}: the metadata {problem}; the file was changed or damaged after it was written"
    )


def test_a_trace_of_another_format_version_says_so(tmp_path: Path) -> None:
    path = save_one(tmp_path)
    reseal(path, lambda content: content.update(format_version=1))
    assert refused(tmp_path) == (
        f"{path}: format version 1, expected 2; another release wrote it: run it again with this one"
    )


def test_missing_metadata_keys_are_listed(tmp_path: Path) -> None:
    """A missing key was a KeyError, which ended a whole align."""
    path = save_one(tmp_path)
    reseal(path, lambda content: [content.pop(name) for name in ("step", "tensors")])
    assert refused(tmp_path) == f"{path}: the metadata has no step, tensors"


STORED = f"000000/gradient/{NORM}"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda content: content.update(step="0"), "ValueError(\"'0' is no count\")"),
        (lambda content: content.update(world_size=True), "ValueError('True is no count')"),
        (
            lambda content: content.update(coordinates=[0]),
            "AttributeError(\"'list' object has no attribute 'items'\")",
        ),
        (lambda content: content["tensors"][STORED].pop("digest"), "KeyError('digest')"),
        (lambda content: content["tensors"][STORED].update(kind="grad"), "ValueError(\"unknown kind 'grad'\")"),
        (
            lambda content: content["tensors"][STORED].update(blocks=[[0, 1]]),
            "ValueError('not enough values to unpack (expected 3, got 2)')",
        ),
        (lambda content: content["tensors"][STORED].update(global_shape=[-1]), "ValueError('-1 is no count')"),
        (lambda content: content["tensors"][STORED].update(flat_range=[0]), "IndexError('list index out of range')"),
    ],
    ids=["step", "world-size", "coordinates", "digest", "kind", "blocks", "shape", "flat-range"],
)
def test_metadata_of_another_form_is_a_trace_error(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], problem: str
) -> None:
    path = save_one(tmp_path)
    reseal(path, change)
    assert refused(tmp_path) == f"{path}: the metadata is not that of a trace: {problem}"


def test_stored_tensors_that_the_metadata_does_not_list_are_found(tmp_path: Path) -> None:
    path = save_one(tmp_path)
    reseal(path, lambda content: content["tensors"].clear())
    assert refused(tmp_path) == (
        f"{path}: the stored tensors are not those that the metadata lists; "
        "the file was changed or damaged after it was written"
    )


def test_every_single_changed_byte_is_a_trace_error(tmp_path: Path) -> None:
    """One changed byte in the metadata was a JSONDecodeError, which ended a whole align."""
    path = save_one(tmp_path)
    content = path.read_bytes()
    unnoticed = []
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1
        path.write_bytes(changed)
        try:
            with open_trace(tmp_path) as reader:
                reader.merge(key(NORM))
            unnoticed.append(position)
        except TraceError:
            pass
    assert unnoticed == []


def test_a_file_cut_short_is_an_error(tmp_path: Path) -> None:
    path = save(tmp_path, 0, 1, [entry(whole(NORM, (4,)), torch.ones(4))])
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(TraceError, match=r"rank_00000\.safetensors: not a readable safetensors file"):
        open_trace(tmp_path)


def test_ranks_that_disagree_on_dtype_are_an_error(tmp_path: Path) -> None:
    save(tmp_path, 0, 2, [entry(whole(NORM, (1,)), torch.ones(1))])
    save(tmp_path, 1, 2, [entry(whole(NORM, (1,)), torch.ones(1, dtype=torch.bfloat16))])
    with open_trace(tmp_path) as reader, pytest.raises(TraceError, match="ranks disagree on dtype or whole shape"):
        reader.merge(key(NORM))


def test_no_trace_is_an_error_that_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(TraceError) as caught:
        open_trace(tmp_path)
    assert str(caught.value) == f"{tmp_path}: no trace here; run with trace.level=full"


def test_a_step_is_never_written_twice(tmp_path: Path) -> None:
    path = save(tmp_path, 0, 1, [])
    with pytest.raises(TraceError) as caught:
        save(tmp_path, 0, 1, [])
    assert str(caught.value) == (
        f"{path} exists: this step is traced already; choose another output_dir or remove the trace"
    )


def test_a_tensor_that_is_not_its_spec_is_refused_with_both_shapes(tmp_path: Path) -> None:
    with pytest.raises(TraceError) as caught:
        save(tmp_path, 0, 1, [entry(whole(NORM, (4,)), torch.ones(5))])
    assert str(caught.value) == f"step 0, global rank 0: gradient of {NORM} has shape [5], its shard spec says [4]"


def test_a_tensor_given_twice_is_refused(tmp_path: Path) -> None:
    twice = [entry(whole(NORM, (1,)), torch.ones(1))] * 2
    with pytest.raises(TraceError, match=f"000000/gradient/{NORM} is given twice"):
        save(tmp_path, 0, 1, twice)


def test_a_rank_without_entries_still_counts(tmp_path: Path) -> None:
    save(tmp_path, 0, 2, [entry(whole(NORM, (1,)), torch.ones(1))])
    save(tmp_path, 1, 2, [])
    with open_trace(tmp_path) as reader:
        assert [place.global_rank for place in reader.ranks(0)] == [0, 1]
        assert reader.keys(0) == {key(NORM)}
        assert [reader.has(key(NORM)), reader.has(key(FC1)), reader.has(key(NORM, step=7))] == [True, False, False]


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    entries = [entry(whole(name, (2,)), torch.ones(2)) for name in (NORM, FC1)]
    first = save(tmp_path / "a", 0, 1, entries)
    second = save(tmp_path / "b", 0, 1, entries[::-1])
    assert first.read_bytes() == second.read_bytes()


def test_steps_updates_and_kinds_are_told_apart_and_no_writing_file_is_left(tmp_path: Path) -> None:
    spec = whole(NORM, ())
    for step in range(2):
        entries = [
            entry(spec, torch.tensor(100.0 * step + 10 * update + place), kind=kind, update=update)
            for update in range(2)
            for place, kind in enumerate(("gradient", "parameter"))
        ]
        save(tmp_path, 0, 1, entries, step=step)
    with open_trace(tmp_path) as reader:
        assert reader.steps == (0, 1)
        assert reader.merge(key(NORM, kind="parameter", step=1, update=1)).tensor.item() == 111.0
        assert reader.merge(key(NORM, step=0, update=1)).tensor.item() == 10.0
    assert [path.name for path in (tmp_path / "step_000000").iterdir()] == ["rank_00000.safetensors"]


@given(
    bits=st.lists(st.integers(-(2**15), 2**15 - 1), max_size=6),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.int16]),
)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_bit_pattern_survives(
    tmp_path_factory: pytest.TempPathFactory, bits: list[int], dtype: torch.dtype
) -> None:
    trace_dir = tmp_path_factory.mktemp("trace")
    tensor = torch.tensor(bits, dtype=torch.int16).view(dtype)
    save(trace_dir, 0, 1, [entry(whole("w", (len(bits),)), tensor)])
    with open_trace(trace_dir) as reader:
        merged = reader.merge(key("w")).tensor
    assert merged.dtype == dtype
    assert merged.view(torch.int16).tolist() == bits
