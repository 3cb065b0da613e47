"""The boxes that any layout writes are read by any other, to the bit; each element lies in one file, once."""

from __future__ import annotations

import json
import re
import struct
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mock_scheduler.errors import ConfigError
from mock_scheduler.trace.shards import Block, ShardSpec, Split, cut_shard, even_split, whole
from pipelines.megatron.stored_boxes import LocalTensor, StoredTensors, encode_tensors, write_tensors
from tests.pipelines.megatron.ranks import ThreadRank, one_rank, run_ranks

SHAPE = (8, 6)
WHOLE = torch.arange(48, dtype=torch.float64).view(SHAPE)
PADDED = 10  # rows of a vocabulary of 8, padded


def even(rank: int, num_ranks: int, *, dim: int = 0, num_parts: int = 1) -> ShardSpec:
    splits = even_split(dim, size=SHAPE[dim], rank=rank, num_ranks=num_ranks, num_parts=num_parts)
    local = tuple(size // num_ranks if index == dim else size for index, size in enumerate(SHAPE))
    return ShardSpec(name="w", global_shape=SHAPE, local_shape=local, splits=splits)


def padded(rank: int) -> ShardSpec:
    """One of two ranks with five rows each, of which the second has three of the vocabulary."""
    length = (5, 3)[rank]
    blocks = (Block(local_start=0, global_start=5 * rank, length=length),)
    return ShardSpec(name="w", global_shape=SHAPE, local_shape=(5, 6), splits=(Split(dim=0, blocks=blocks),))


LAYOUTS: dict[str, list[ShardSpec]] = {
    "whole": [whole("w", SHAPE)],
    "replicas": [whole("w", SHAPE)] * 3,
    "rows": [even(rank, 4) for rank in range(4)],
    "columns": [even(rank, 2, dim=1) for rank in range(2)],
    "gate and up": [even(rank, 2, num_parts=2) for rank in range(2)],
    "rows, twice": [even(rank % 2, 2) for rank in range(4)],
    "a padded vocabulary": [padded(0), padded(1)],
}
_LAYOUT = st.sampled_from(sorted(LAYOUTS))


def write(folder: Path, specs: list[ShardSpec], tensor: torch.Tensor = WHOLE) -> list[Path]:
    """Writes one tensor under a layout; returns the files."""

    def save(spec: ShardSpec, rank: ThreadRank) -> list[Path]:
        local = cut_shard(tensor, spec)
        if local.shape != tensor.shape:
            local = local.masked_fill(_padding(spec), 99.0)  # what lies in a padding is nobody's
        written = write_tensors(folder, [LocalTensor(key="parameter/w", spec=spec, tensor=local)], rank)
        return [folder / name for name in written]

    return [path for paths in run_ranks([partial(save, spec) for spec in specs]) for path in paths]


def _padding(spec: ShardSpec) -> torch.Tensor:
    return ~cut_shard(torch.ones(spec.global_shape, dtype=torch.bool), spec)


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_what_one_layout_writes_any_other_reads(source: str, target: str, tmp_path: Path) -> None:
    with StoredTensors(write(tmp_path, LAYOUTS[source])) as stored:
        for spec in LAYOUTS[target]:
            assert torch.equal(stored.read("parameter/w", spec, torch.float64), cut_shard(WHOLE, spec))


@pytest.mark.parametrize("source", LAYOUTS)
def test_each_element_is_written_once(source: str, tmp_path: Path) -> None:
    files = [load_file(path) for path in write(tmp_path, LAYOUTS[source])]
    values = torch.cat([tensor.flatten() for file in files for tensor in file.values()])
    assert torch.equal(values.sort().values, WHOLE.flatten())
    assert all(re.fullmatch(r"parameter/w@\d+,\d+", name) for file in files for name in file)


def test_ranks_with_the_same_tensors_share_the_writing(tmp_path: Path) -> None:
    tensors = [
        LocalTensor(key=f"parameter/{index}", spec=whole(str(index), (4,)), tensor=torch.zeros(4)) for index in range(6)
    ]
    run_ranks([partial(write_tensors, tmp_path, tensors)] * 3)
    assert [len(load_file(path)) for path in sorted(tmp_path.iterdir())] == [2, 2, 2]


@given(
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]), st.binary(min_size=8, max_size=8)
)
def test_every_bit_comes_back(dtype: torch.dtype, content: bytes) -> None:
    """NaN with its payload, infinities and -0.0 too, as safetensors itself reads them."""
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype)
    data = b"".join(bytes(piece) for piece in encode_tensors({"a@0": tensor, "b@0": torch.zeros(3, dtype=torch.uint8)}))
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    start, stop = header["a@0"]["data_offsets"]
    assert data[8 + size + start : 8 + size + stop] == content
    assert len(data) == 8 + size + 8 + 3


def test_a_scalar_and_an_empty_tensor_come_back(tmp_path: Path) -> None:
    tensors = [
        LocalTensor(key="buffer/scalar", spec=whole("scalar", ()), tensor=torch.tensor(2.5)),
        LocalTensor(key="buffer/empty", spec=whole("empty", (0, 3)), tensor=torch.zeros(0, 3)),
    ]
    names = write_tensors(tmp_path, tensors, one_rank())
    with StoredTensors([tmp_path / name for name in names]) as stored:
        assert stored.read("buffer/scalar", whole("scalar", ()), torch.float32).item() == 2.5
        assert stored.read("buffer/empty", whole("empty", (0, 3)), torch.float32).shape == (0, 3)


REFUSED = {
    "another dtype": ({"parameter/w@0,0": WHOLE.float()}, "is of torch.float32, this run has torch.float64"),
    "a part of it": ({"parameter/w@0,0": WHOLE[:7].clone()}, "6 of 48 elements of parameter/w are not there"),
    "a larger one": ({"parameter/w@0,0": torch.zeros(9, 6, dtype=torch.float64)}, "is no part of [8, 6]"),
    "another number of dimensions": ({"parameter/w@0": torch.zeros(8, dtype=torch.float64)}, "is no part of [8, 6]"),
    # Counted together they are as many as the whole tensor has.
    "elements twice": (
        {"parameter/w@0,0": WHOLE[:4].clone(), "parameter/w@2,0": WHOLE[2:6].clone()},
        "elements of parameter/w@2,0 are there twice",
    ),
    "a column twice": (
        {"parameter/w@0,0": WHOLE.clone(), "parameter/w@7,5": WHOLE[7:, 5:].clone()},
        "elements of parameter/w@7,5 are there twice",
    ),
    "another tensor": ({"parameter/v@0,0": WHOLE}, "48 of 48 elements of parameter/w are not there"),
    "a tensor that is no box": ({"parameter/w": WHOLE}, "is no box of a whole one"),
    "a place below 0": ({"parameter/w@-1,0": WHOLE}, "is no box of a whole one"),
    "a place of 19 digits": ({f"parameter/w@{'9' * 19},0": WHOLE}, "is no box of a whole one"),
    "a place of 5,000 digits": ({f"parameter/w@0,{'9' * 5000}": WHOLE}, "is no box of a whole one"),
    "a place far outside": ({f"parameter/w@{'9' * 18},0": WHOLE}, "is no part of [8, 6]"),
    "a place in other digits": ({"parameter/w@²,0": WHOLE}, "is no box of a whole one"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_part_of_the_model_is_refused_by_file(kind: str, tmp_path: Path) -> None:
    tensors, expected = REFUSED[kind]
    path = tmp_path / "rank_00000.safetensors"
    save_file(tensors, path)
    with pytest.raises(ConfigError) as caught, StoredTensors([path]) as stored:
        stored.read("parameter/w", whole("w", SHAPE), torch.float64)
    assert expected in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x08\0\0\0\0\0\0\0{}      ", b"\x80\x04N."])
def test_a_file_of_another_kind_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rank_00000.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError), StoredTensors([path]) as stored:
        stored.read("parameter/w", whole("w", SHAPE), torch.float64)


def test_two_files_with_one_box_are_refused(tmp_path: Path) -> None:
    """Of a tensor in two halves, one was copied over the other: the second half would stay 0."""
    half = WHOLE[:4].clone()
    for rank in range(2):
        save_file({"parameter/w@0,0": half}, tmp_path / f"rank_{rank:05d}.safetensors")
    with (
        StoredTensors(sorted(tmp_path.iterdir())) as stored,
        pytest.raises(ConfigError, match=r"rank_00001\.safetensors cannot be read.* are there twice"),
    ):
        stored.read("parameter/w", whole("w", SHAPE), torch.float64)
