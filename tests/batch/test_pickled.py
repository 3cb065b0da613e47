"""Batches through pickle: tensors out of band, and no write that reaches memory of others."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.batch import RolloutBatch, Trajectory
from mock_scheduler.batch.columns import JsonColumn, TensorColumn
from mock_scheduler.batch.pickled import in_place
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


def test_a_batch_in_place_is_the_memory_of_its_store() -> None:
    batch = make_large(10)
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    store = [bytearray(buffer.raw()) for buffer in buffers]
    shown = [memoryview(content).toreadonly() for content in store]
    copied = pickle.loads(stream, buffers=shown)
    with in_place():
        first, second = pickle.loads(stream, buffers=shown), pickle.loads(stream, buffers=shown)
    after = pickle.loads(stream, buffers=shown)
    tokens = next(i for i, content in enumerate(store) if content == as_bytes(batch.tokens).numpy().tobytes())
    store[tokens][0] += 1
    assert first.tokens[0] == second.tokens[0] == batch.tokens[0] + 1
    assert copied.is_identical(batch)
    assert after.is_identical(batch)
    del shown
    gc.collect(1)
    assert first.is_identical(second)
