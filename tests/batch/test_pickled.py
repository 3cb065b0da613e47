"""Batches through pickle: tensors out of band, and no write that reaches memory of others."""

from __future__ import annotations

import copy
import gc
import mmap
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.batch import RolloutBatch, Trajectory
from mock_scheduler.batch.columns import JsonColumn, TensorColumn
from mock_scheduler.support import own_memory
from mock_scheduler.support.tensor_bytes import DTYPES, as_bytes
from tests.batches import SAMPLING, make_batch, make_row

SHAPES = [(), (2,), (2, 3), (0,), (3, 0)]


def through_buffers(value: object) -> tuple[object, int, list[bytes]]:
    """What arrives where each buffer is read only, the size of the stream, and the buffers."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    contents = [bytes(buffer.raw()) for buffer in buffers]
    return pickle.loads(stream, buffers=contents), len(stream), contents


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), as_bytes(tensor).numpy().tobytes()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@settings(max_examples=80, deadline=None)
@given(
    *(st.data(), st.sampled_from(sorted(DTYPES)), st.sampled_from(SHAPES), st.integers(0, 4), st.integers(2, 5)),
    st.booleans(),
)
def test_every_bit_of_any_column_arrives(
    data: st.DataObject, dtype: str, shape: Sequence[int], num_rows: int, protocol: int, is_strided: bool
) -> None:
    """With views, whose memory holds other values beside."""
    size = num_rows * torch.Size(shape).numel() * DTYPES[dtype].itemsize
    content = data.draw(st.binary(min_size=size, max_size=size))
    raw = torch.tensor([byte % 2 if dtype == "bool" else byte for byte in content], dtype=torch.uint8)
    values = torch.empty(num_rows, *shape, dtype=DTYPES[dtype])
    if size:
        doubled = raw.reshape(num_rows, -1).repeat_interleave(2, dim=0).reshape(-1).view(DTYPES[dtype])
        values = raw.view(DTYPES[dtype]).reshape(num_rows, *shape)
        values = doubled.reshape(2 * num_rows, *shape)[::2] if is_strided else values
    column = TensorColumn(values=values, offsets=torch.arange(num_rows + 1))
    arrived, _, buffers = through_buffers(column)
    for found in (arrived, pickle.loads(pickle.dumps(column, protocol)), copy.deepcopy(column), copy.copy(column)):
        assert isinstance(found, TensorColumn)
        assert found.offsets is not None
        assert (bits(found.values), bits(found.offsets)) == (bits(values), bits(torch.arange(num_rows + 1)))
    assert buffers == [bits(values)[2], bits(torch.arange(num_rows + 1))[2]]


def make_large(num_tokens: int) -> RolloutBatch:
    """Rows with a column of a dtype that NumPy lacks, one of texts, and meta."""
    rows = [
        make_row(
            env_id=index,
            tokens=[index] * num_tokens,
            response=[False, False] + [True] * (num_tokens - 2),
            rollout_logprobs=[-0.5] * (num_tokens - 2),
        )
        for index in range(2)
    ]
    extras = {"hidden": torch.arange(num_tokens, dtype=torch.bfloat16), "text": ["a", {"b": 1}]}
    rows = [replace(row, extras=extras) for row in rows]
    return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=2, meta={"task": {"name": "x"}})


def test_the_stream_holds_no_tensor() -> None:
    small, large = make_large(10), make_large(10_000)
    (arrived, size, buffers), (_, small_size, _) = through_buffers(large), through_buffers(small)
    assert isinstance(arrived, RolloutBatch)
    assert arrived.is_identical(large)
    assert isinstance(arrived.extras["text"], JsonColumn)
    assert arrived.identities == large.identities
    assert size - small_size < 100
    tensors = {**large.tensors(), "hidden": large.extras["hidden"].values}  # type: ignore[union-attr]
    assert sum(map(len, buffers)) == sum(tensor.nbytes for tensor in tensors.values()) + 2 * 4 * 8  # and identities
    arrived.rewards[0] = 5.0  # no bytes that are Python's own are written to
    assert buffers[list(tensors).index("rewards") + 1] == as_bytes(large.rewards).numpy().tobytes()


def test_a_row_is_pickled_without_the_batch_that_it_is_a_view_of() -> None:
    row = make_batch(64, 8).rows()[3]
    stream = pickle.dumps(row)
    assert len(stream) < 1500
    found = pickle.loads(stream)
    assert isinstance(found, Trajectory)
    assert (found.identity, found.reward, bits(found.tokens)) == (row.identity, row.reward, bits(row.tokens))


def test_copies_share_memory_or_do_not() -> None:
    batch = make_batch()
    assert copy.copy(batch).tokens is batch.tokens
    deep = copy.deepcopy(batch)
    deep.tokens[0] += 1
    assert not deep.is_identical(batch)


def test_what_has_no_bytes_of_its_own_goes_the_way_of_torch() -> None:
    """A column that no batch takes is refused by the batch, not by pickle."""
    sparse = torch.eye(2).to_sparse()
    found = pickle.loads(pickle.dumps(TensorColumn(values=sparse), protocol=5))
    assert found.values.layout is torch.sparse_coo
    weight = torch.nn.Parameter(torch.ones(2))
    assert isinstance(pickle.loads(pickle.dumps(TensorColumn(values=weight))).values, torch.nn.Parameter)


class Store:
    """Shared memory that holds pickled buffers, as the object store of a Ray node does; readers get it read only."""

    def __init__(self, path: Path, value: object) -> None:
        buffers: list[pickle.PickleBuffer] = []
        self._stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        self.sizes = [buffer.raw().nbytes for buffer in buffers]
        path.write_bytes(b"\0" * 64 + b"".join(bytes(buffer.raw()) for buffer in buffers))
        self.path = path
        self.descriptor = os.open(path, os.O_RDWR)
        self._memory = mmap.mmap(self.descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)

    def get(self) -> RolloutBatch:
        view, starts = memoryview(self._memory).toreadonly(), [64 + sum(self.sizes[:i]) for i in range(len(self.sizes))]
        parts = [view[start : start + size] for start, size in zip(starts, self.sizes, strict=True)]
        batch: RolloutBatch = pickle.loads(self._stream, buffers=parts)
        return batch

    def num_mappings(self) -> int:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            return sum(str(self.path) in line for line in maps)


@pytest.fixture(scope="module")
def batch() -> RolloutBatch:
    return make_large(200_000)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems copy")
def test_a_batch_out_of_shared_memory_is_not_copied_and_no_write_comes_there(
    tmp_path: Path, batch: RolloutBatch
) -> None:
    """Ray maps its store for writing, so a tensor on it would change what every reader gets."""
    store = Store(tmp_path / "store", batch)
    before = store.path.read_bytes()
    first, second = store.get(), store.get()
    large = sum(size >= 256 * 1024 for size in store.sizes)
    assert large == 4
    assert store.num_mappings() == 1 + 2 * large
    assert first.is_identical(batch)
    first.tokens[7] = 999
    first.rewards[0] = 999.0
    assert second.is_identical(batch)
    assert store.path.read_bytes() == before
    assert (int(first.tokens[7]), int(first.tokens[6])) == (999, int(batch.tokens[6]))
    # What was not written to is the store's own memory: it shows what is done to that.
    token = 64 + sum(store.sizes[:1]) + 4 * 300_000
    os.pwrite(store.descriptor, (123).to_bytes(4, "little"), token)
    assert int(second.tokens[300_000]) == 123
    tokens = first.tokens[:10]
    del first, second
    gc.collect()
    assert tokens.tolist() == [*[0] * 7, 999, 0, 0]
    assert store.num_mappings() == 1 + 1
    del tokens
    gc.collect()
    assert store.num_mappings() == 1


def test_shared_memory_whose_file_nobody_lends_is_copied(
    tmp_path: Path, batch: RolloutBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the store belongs to another user, say."""
    store = Store(tmp_path / "store", batch)
    monkeypatch.setattr(own_memory, "_borrow", lambda key: None)
    found = store.get()
    found.tokens[0] = 5
    assert store.num_mappings() == 1
    assert store.get().is_identical(batch)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems copy")
def test_a_file_that_was_closed_is_borrowed_from_the_process_of_the_store(tmp_path: Path, batch: RolloutBatch) -> None:
    """Ray closes it as soon as it is mapped; the node's own process has it open."""
    store = Store(tmp_path / "store", batch)
    ours = [
        name for name in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{name}") == str(store.path)
    ]
    with subprocess.Popen(["sleep", "60"], pass_fds=[store.descriptor]) as other:
        for name in ours:
            os.close(int(name))
        found = store.get()
        other.kill()
    assert store.num_mappings() == 5
    found.tokens[0] = 5
    assert store.get().is_identical(batch)
