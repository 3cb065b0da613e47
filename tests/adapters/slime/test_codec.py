"""Samples of slime's family come back from a recording bit for bit, and say in it what they say themselves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.adapters.slime.codec import SlimeCodec
from mock_scheduler.adapters.trees import pack, unpack
from mock_scheduler.batch import RolloutBatch, SamplingParams, Termination
from mock_scheduler.errors import BatchError
from mock_scheduler.scheduler import RolloutRequest
from tests.adapters.bits import bits, stored
from tests.adapters.slime.samples import sample

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")
REQUEST = RolloutRequest(global_step=0, batch_size=8, policy_version=7)
CODEC = SlimeCodec(sampling=SAMPLING)


def check(samples: list[Any]) -> RolloutBatch:
    """Encodes, decodes and compares; gives the batch."""
    before = bits(samples)
    batch = CODEC.encode(samples, REQUEST)
    assert bits(samples) == before
    assert bits(CODEC.decode(stored(batch))) == before
    return batch


_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=True)
    | st.text(max_size=5)
    | st.binary(max_size=4)
    | st.builds(lambda raw: torch.frombuffer(bytearray(raw), dtype=torch.bfloat16), st.binary(min_size=4, max_size=4))
    | st.builds(lambda raw: np.frombuffer(raw, dtype="<f4"), st.binary(min_size=8, max_size=8))
    | st.builds(np.float32, st.floats(width=32))
    | st.builds(lambda items: np.array([*items, None], dtype=object), st.lists(st.text(max_size=2), max_size=2))
)
_TREES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 3) | st.just("$int"), inner, max_size=3)
        | st.lists(inner, max_size=2).map(tuple)
        | st.lists(st.integers(-(2**63), 2**63 - 1), min_size=16, max_size=20)
        | st.lists(st.floats(), min_size=16, max_size=20)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(_TREES)
def test_any_tree_of_values_comes_back(value: object) -> None:
    packed, content = pack(value, "x")
    assert bits(unpack(packed, bytes(content))) == bits(value)


@st.composite
def samples(draw: st.DrawFn) -> dict[str, Any]:
    prompt, length = draw(st.integers(0, 3)), draw(st.integers(0, 6))
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=prompt + length, max_size=prompt + length))
    mask = draw(st.none() | st.lists(st.integers(0, 1), min_size=length, max_size=length))
    logprob = st.floats(-20, 0) | st.floats(-20, 0, width=32) | st.just(-0.0)
    fields: dict[str, Any] = {
        "tokens": tokens,
        "response_length": length,
        "loss_mask": mask,
        "rollout_log_probs": draw(st.none() | st.lists(logprob, min_size=length, max_size=length)),
        "reward": draw(st.none() | st.floats() | st.integers(0, 1) | st.just({"acc": 1.0, "len": float("nan")})),
        "weight_versions": draw(st.lists(st.sampled_from(["3", "7", "9", "default"]), max_size=2)),
        "status": draw(
            st.sampled_from(list(__import__("tests.adapters.slime.samples", fromlist=["Sample"]).Sample.Status))
        ),
        "metadata": {"x": draw(_TREES)},
        "multimodal_train_inputs": draw(st.none() | st.just({"pixel_values": torch.rand(2, 3), "grid": (1, 2)})),
        "remove_sample": draw(st.booleans()),
        "added": draw(_LEAVES),
    }
    if draw(st.booleans()) and tokens:
        chosen = [torch.randperm(8)[:2] for _ in range(3 * (len(tokens) - 1))]
        experts = torch.stack([*chosen, torch.zeros(2)])[:-1].reshape(len(tokens) - 1, 3, 2).int()
        kind = draw(st.sampled_from(["tensor", "int32", "uint16"]))
        fields["rollout_routed_experts"] = experts if kind == "tensor" else experts.numpy().astype(kind)
    if draw(st.booleans()):
        sizes = [draw(st.integers(0, 2)) for _ in range(length)]
        own = tokens[prompt:]
        ids = [token for token, size in zip(own, sizes, strict=True) for _ in range(size)]
        bounds = [0, *np.cumsum(sizes, dtype=int).tolist()]
        is_tensor = draw(st.booleans())
        fields["rollout_top_p_token_ids"] = torch.tensor(ids, dtype=torch.int32) if is_tensor else ids
        fields["rollout_top_p_token_offsets"] = torch.tensor(bounds, dtype=torch.int32) if is_tensor else bounds
    return sample(**fields)


_GROUP = st.lists(samples() | st.lists(samples(), max_size=3), max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.lists(_GROUP, min_size=1, max_size=3), st.booleans())
def test_groups_of_samples_come_back(groups: list[list[Any]], has_ids: bool) -> None:
    rows = [
        (number, one)
        for number, group in enumerate(groups)
        for item in group
        for one in (item if isinstance(item, list) else [item])
    ]
    for index, (number, one) in enumerate(rows):
        ids = (number, index, 50 + number) if has_ids else (None, None, None)
        one.update(zip(("group_index", "index", "rollout_id"), ids, strict=True))
    if not rows:
        with pytest.raises(BatchError, match="a rollout has no sample"):
            CODEC.encode(groups, REQUEST)
    else:
        assert len(check(groups)) == len(rows)


def test_core_fields_are_the_samples_own() -> None:
    first = sample(loss_mask=[1, 0, 1], rollout_log_probs=[-0.5, 0.0, -0.25], weight_versions=["3", "5"])
    second = sample(
        index=1, tokens=[4, 2], response_length=1, rollout_log_probs=[-0.75], reward=-2.0, weight_versions=["default"]
    )
    batch = check([[first, second]])
    assert batch.response_mask.tolist() == [False, False, True, False, True, False, True]
    assert batch.rollout_logprobs.tolist() == [-0.5, -0.25, -0.75]
    assert batch.turn_rewards.tolist() == [0.0, 1.0, -2.0]
    assert batch.rewards.tolist() == [1.0, -2.0]
    assert batch.policy_versions.tolist() == [7, 7, 7]
    stated = CODEC.build([[first, second]], version=7, reads_versions=True)
    assert stated.policy_versions.tolist() == [3, 3, 7]
    assert batch.prompt_lengths.tolist() == [2, 1]
    assert (batch.group_size, batch.num_groups, batch.num_trajectories) == (2, 1, 2)


def test_rows_of_one_rollout_are_one_trajectory() -> None:
    rows = [[[sample(index=4, rollout_id=2), sample(index=5, rollout_id=2)], sample(index=6, rollout_id=3)]]
    batch = check(rows)
    assert [identity.numbers for identity in batch.identities] == [(0, 0, 2, 0), (0, 0, 2, 1), (0, 0, 3, 0)]
    assert batch.num_trajectories == 2


@pytest.mark.parametrize(
    ("status", "termination"),
    [("completed", Termination.TERMINATED), ("truncated", Termination.TRUNCATED), ("failed", Termination.ABORTED)],
)
def test_a_status_is_how_the_row_ended(status: str, termination: Termination) -> None:
    assert check([{**sample(), "status": status}]).terminations.tolist() == [int(termination)]


def test_a_dict_of_rewards_counts_by_its_key() -> None:
    codec = SlimeCodec(sampling=SAMPLING, reward_key="acc")
    batch = codec.encode([sample(reward={"acc": 0.25, "other": 9.0})], REQUEST)
    assert batch.rewards.tolist() == [0.25]
    assert codec.decode(batch)[0]["reward"] == {"acc": 0.25, "other": 9.0}


def test_experts_and_support_are_the_engine_columns() -> None:
    experts = torch.tensor([[[0, 1]], [[2, 3]], [[0, 3]], [[1, 2]]], dtype=torch.int32)
    row = sample(
        loss_mask=[1, 0, 1],
        rollout_routed_experts=experts,
        rollout_top_p_token_ids=[7, 70, 9],
        rollout_top_p_token_offsets=[0, 2, 2, 3],
    )
    batch = check([row])
    assert batch.extras["routed_experts"].row(0).values.tolist() == experts.tolist()
    assert batch.extras["sampling_support"].row(0).values.tolist() == [7, 70, 9]
    assert batch.extras["sampling_support_offsets"].row(0).values.tolist() == [0, 2, 3]
    assert batch.extras["native/rollout_routed_experts"].row(0) == {"$core": True}


def test_experts_of_a_failed_capture_are_kept_as_they_are() -> None:
    batch = check([sample(rollout_routed_experts=torch.zeros(4, 1, 2, dtype=torch.int32))])
    assert "routed_experts" not in batch.extras


def test_a_part_of_a_batch_gives_its_samples() -> None:
    groups = [[sample(index=0), sample(index=1)], [sample(index=2, group_index=1), sample(index=3, group_index=1)]]
    batch = CODEC.encode(groups, REQUEST)
    assert [[one["index"] for one in group] for group in CODEC.decode(batch.select([2, 3]))] == [[2, 3]]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"response_length": 9}, "response_length is 9, and it has 5 tokens"),
        ({"loss_mask": [1]}, "loss_mask has 1 entries, and the response has 3 tokens"),
        ({"rollout_log_probs": [-0.1]}, "rollout_log_probs has 1 entries, and the response has 3 tokens"),
        ({"rollout_log_probs": [-0.1, math.nan, 0.0]}, r"rollout_log_probs is not finite: \[nan\]"),
        ({"tokens": [1, -1, 2]}, "token ids lie from -1 to 2"),
        ({"tokens": "abc"}, "tokens is a str; expected a list of ints"),
        ({"rollout_top_p_token_ids": [1], "rollout_top_p_token_offsets": [0, 1]}, "offsets has 2 numbers; expected 4"),
    ],
)
def test_a_sample_that_contradicts_itself_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(BatchError, match=rf"sample 0 \(index 0\): .*{problem}"):
        CODEC.encode([[sample(**fields)]], REQUEST)


def test_an_object_in_a_sample_is_refused_by_name() -> None:
    with pytest.raises(
        BatchError, match=r"row 0: multimodal_inputs\.images\[0\] is a pathlib\.PosixPath, which a recording"
    ):
        CODEC.encode([[sample(multimodal_inputs={"images": [Path("x")]})]], REQUEST)


def test_a_batch_of_another_codec_is_refused() -> None:
    batch = CODEC.encode([sample()], REQUEST)
    other = RolloutBatch.from_trajectories(batch.rows(), sampling=SAMPLING, group_size=1)
    with pytest.raises(BatchError, match="was not recorded from slime's samples"):
        CODEC.decode(other)
