"""ROLL's DataProto comes back from a recording bit for bit, of either pipeline.

What padded tensors may hold is drawn in ``tests/adapters/test_padded_round_trip.py``; here is the way to and from the
class.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.adapters.roll import codec
from mock_scheduler.adapters.roll.codec import RollCodec
from mock_scheduler.batch import RolloutBatch, SamplingParams
from mock_scheduler.errors import BatchError
from mock_scheduler.scheduler import RolloutRequest
from tests.adapters.bits import bits, stored
from tests.adapters.roll.signatures import DataProto, agentic_batch, make_data_proto

CODEC = RollCodec(sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed"))
REQUEST = RolloutRequest(global_step=0, batch_size=4, policy_version=7)


@pytest.fixture(autouse=True, scope="module")
def _proto() -> Iterator[None]:
    """ROLL is not installed here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "make_data_proto", make_data_proto)
        yield


def content(proto: DataProto) -> object:
    return bits([proto.batch, proto.non_tensor_batch, proto.meta_info])


def check(proto: DataProto) -> RolloutBatch:
    """Encodes, stores, reads, decodes and compares; gives the batch."""
    before = content(proto)
    batch = CODEC.encode(proto, REQUEST)
    assert content(proto) == before
    assert content(CODEC.decode(stored(batch))) == before
    return batch


_VALUES = (
    st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.builds(np.float64, st.floats())
) | st.lists(st.floats(), max_size=2)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(0, 9), st.integers(1, 6))
def test_any_batch_comes_back(data: st.DataObject, step: int, rows: int) -> None:
    proto = agentic_batch(step, rows=rows)
    proto.batch["garbage"] = torch.randint(-(2**31), 2**31, (rows, 6)).int().view(torch.float32)
    proto.batch["routed_experts"] = torch.stack([torch.randperm(8)[:2] for _ in range(rows * 12)]).view(rows, 6, 2, 2)
    values = data.draw(st.lists(_VALUES, min_size=rows, max_size=rows))
    column = np.empty(rows, dtype=object)
    column[:] = values
    proto.non_tensor_batch["more"] = column
    proto.meta_info["more"] = data.draw(st.dictionaries(st.text(max_size=3), _VALUES, max_size=3))
    assert len(check(proto)) == rows


def test_a_batch_of_rlvr_has_its_own_layout() -> None:
    proto = DataProto(
        batch={
            "prompts": torch.tensor([[0, 5, 6], [7, 8, 9]]),
            "responses": torch.tensor([[1, 2], [3, 0]]),
            "input_ids": torch.tensor([[5, 6, 1, 2, 0], [7, 8, 9, 3, 0]]),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 0]]),
            "response_mask": torch.tensor([[0, 0, 1, 1, 0], [0, 0, 0, 1, 0]]),
            "prompt_id": torch.tensor([0, 0]),
            "scores": torch.tensor([1.0, 0.5]),
            "infer_logprobs": torch.tensor([[9.0, -0.5, -0.25, 9.0], [9.0, 9.0, -1.0, 9.0]]),
        },
        non_tensor_batch={"domain": np.array(["math", "math"], dtype=object)},
    )
    batch = check(proto)
    assert (batch.num_groups, batch.tags, batch.rewards.tolist()) == (1, ("math", "math"), [1.0, 0.5])
    assert batch.rollout_logprobs.tolist() == [-0.5, -0.25, -1.0]


def test_what_is_no_batch_here_is_refused() -> None:
    remote = DataProto.to_remote(agentic_batch(0))
    with pytest.raises(BatchError, match="the DataProto has data in ROLL's transfer backend"):
        CODEC.encode(remote, REQUEST)
    other: Any = SimpleNamespace(batch={})
    with pytest.raises(BatchError, match="the rollout is a SimpleNamespace; expected ROLL's DataProto"):
        CODEC.encode(other, REQUEST)
