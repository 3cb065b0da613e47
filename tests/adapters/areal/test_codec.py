"""AReaL's trajectories come back from a recording bit for bit, each at its own width."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.adapters.areal.codec import ArealCodec
from mock_scheduler.batch import RolloutBatch, SamplingParams
from mock_scheduler.batch.engine_columns import VERSIONS_COLUMN
from mock_scheduler.errors import BatchError
from mock_scheduler.scheduler import RolloutRequest
from tests.adapters.bits import bits, stored

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")
CODEC = ArealCodec(sampling=SAMPLING)
REQUEST = RolloutRequest(global_step=0, batch_size=8, policy_version=7)


def check(trajectories: list[dict[str, Any]]) -> RolloutBatch:
    """Encodes, stores, reads, decodes and compares; gives the batch."""
    before = bits(trajectories)
    batch = CODEC.encode(trajectories, REQUEST)
    assert bits(trajectories) == before
    assert bits(CODEC.decode(stored(batch))) == before
    return batch


def _garbage(draw: st.DrawFn, *shape: int) -> torch.Tensor:
    """Any bits as float32: NaN payloads, -0.0, infinities."""
    words = st.sampled_from([0x7FC00001, 0x80000000, 0x7F800000, 0x00000001]) | st.integers(0, 2**32 - 1)
    count = int(torch.Size(shape).numel())
    raw = b"".join(struct.pack("<I", draw(words)) for _ in range(count))
    return torch.frombuffer(bytearray(raw or b"    "), dtype=torch.float32)[:count].reshape(shape)


@st.composite
def rollouts(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Trajectories of several widths and sizes, with anything in the padding, and rows without a response."""
    has_experts, has_images, has_values = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    return [_trajectory(draw, has_experts, has_images, has_values) for _ in range(draw(st.integers(1, 4)))]


def _trajectory(draw: st.DrawFn, has_experts: bool, has_images: bool, has_values: bool) -> dict[str, Any]:
    size, width = draw(st.integers(1, 3)), draw(st.integers(2, 6))
    lengths = torch.tensor([draw(st.integers(1, width)) for _ in range(size)])
    prompts = torch.tensor([draw(st.integers(1, int(length))) for length in lengths])
    column = torch.arange(width)
    attention = column < lengths[:, None]
    response = attention & (column >= prompts[:, None])
    token = torch.tensor([[draw(st.integers(0, 2**31 - 1)) for _ in range(width)] for _ in range(size)])
    logprobs = -torch.rand(size, width)
    trajectory: dict[str, Any] = {
        "input_ids": token.int(),
        "loss_mask": response.int(),
        "logprobs": torch.where(response, logprobs, _garbage(draw, size, width)),
        "versions": torch.where(response, torch.randint(0, 8, (size, width)), -1).int(),
        "attention_mask": attention,
        "rewards": torch.tensor([draw(st.floats(-3, 3, width=32)) for _ in range(size)]),
    }
    if has_experts:
        trajectory["routed_experts"] = torch.stack([torch.randperm(9)[:2] for _ in range(size * width * 3)]).reshape(
            size, width, 3, 2
        )
    if has_images:
        trajectory["multi_modal_input"] = [{"pixel_values": torch.rand(row, 2)} for row in range(size)]
    if has_values:
        trajectory["weights"] = _garbage(draw, size)
    return trajectory


@settings(max_examples=60, deadline=None)
@given(rollouts())
def test_any_rollout_comes_back(trajectories: list[dict[str, Any]]) -> None:
    batch = check(trajectories)
    assert len(batch) == sum(len(one["input_ids"]) for one in trajectories)
    assert batch.num_groups == len(trajectories)


def example() -> list[dict[str, Any]]:
    def trajectory(rows: list[list[int]], versions: list[list[int]]) -> dict[str, Any]:
        tokens, version = torch.tensor(rows).int(), torch.tensor(versions).int()
        return {
            "input_ids": tokens,
            "loss_mask": (version >= 0).int(),
            "logprobs": -0.5 * (version >= 0),
            "versions": version,
            "attention_mask": tokens > 0,
            "rewards": torch.arange(len(rows)).float(),
        }

    return [trajectory([[5, 6, 7], [5, 8, 0]], [[-1, 3, 4], [-1, 2, -1]]), trajectory([[9, 1]], [[-1, 4]])]


def test_the_core_fields_say_what_the_trajectories_say() -> None:
    batch = check(example())
    assert [(row.identity.group_id, row.identity.env_id) for row in batch.rows()] == [(0, 0), (0, 1), (1, 0)]
    assert [row.tokens.tolist() for row in batch.rows()] == [[5, 6, 7], [5, 8], [9, 1]]
    assert batch.rewards.tolist() == [0.0, 1.0, 0.0]
    versions: Any = batch.extras[VERSIONS_COLUMN]
    assert versions.values.tolist() == [3, 4, 2, 4]
    assert batch.policy_versions.tolist() == [3, 2, 4]


def test_rows_of_a_part_of_a_batch_come_back() -> None:
    found = CODEC.decode(check(example()).select([1, 2]))
    whole = example()
    assert bits(found) == bits([{name: value[1:2] for name, value in whole[0].items()}, whole[1]])


def test_what_cannot_be_kept_is_refused() -> None:
    first, second = example()
    with pytest.raises(BatchError, match="the rollout: trajectories have other fields than the first one"):
        CODEC.encode([first, {**second, "more": torch.zeros(1)}], REQUEST)
    with pytest.raises(BatchError, match="the rollout holds no trajectory"):
        CODEC.encode([], REQUEST)
    with pytest.raises(BatchError, match="the rollout: rewards cannot be joined"):
        CODEC.encode([first, {**second, "rewards": torch.zeros(1, 2, 2)}], REQUEST)
    rows = list(check(example()).rows())
    other = RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=None)
    with pytest.raises(BatchError, match="batch was not recorded from AReaL's trajectories: meta 'areal' is None"):
        CODEC.decode(other)
