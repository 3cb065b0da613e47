"""verl's batches come back bit for bit from a batch, and say what was drawn for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.adapters.verl.codec import Drawn, restore_prompts
from mock_scheduler.errors import BatchError
from mock_scheduler.scheduler import RolloutRequest
from tests.adapters.verl.protos import Proto, assert_equal, codec, drawn, objects, played

NAN = float("nan")


class Image:
    """What is no plain data."""


def request(asked: Proto, **fields: Any) -> RolloutRequest:
    return RolloutRequest(
        **{"global_step": 1, "batch_size": len(asked), "group_size": 2, **fields}, prompts=Drawn.of(asked)
    )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**30), filler=st.integers(0, 500), num_prompts=st.integers(1, 4), odd=st.floats(width=32))
def test_a_batch_comes_back_bit_for_bit(seed: int, filler: int, num_prompts: int, odd: float) -> None:
    """With any padding, empty responses, a value in the padding that may be NaN, images' tensors, experts."""
    asked = drawn([f"p{number}" for number in range(num_prompts)], n=2)
    native = played(asked, seed, filler=filler)
    padding = native.batch["response_mask"] == 0
    native.batch["rollout_log_probs"][padding] = odd
    native.batch["teacher_logprobs"] = torch.full((len(native), 9, 2), odd)
    native.batch["routed_experts"] = torch.rand(len(native), 9, 2, 9).argsort(-1)[..., :2].short()
    native.batch["position_ids"] = native.batch["position_ids"][:, None].repeat(1, 4, 1)  # of images and videos
    assert_equal(codec().decode(codec().encode(native, request(asked))), native)


def test_core_fields_are_those_of_the_seam() -> None:
    """Rewards are ``rm_scores``; without a uid, n rows in a row are a group."""
    asked = drawn(["a", "b"], n=2)
    native = played(asked, 3)
    batch = codec().encode(native, request(asked, policy_version=4))
    assert [(row.group_id, row.env_id) for row in batch.identities] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    mask = native.batch["response_mask"].bool()
    expected = (native.batch["rm_scores"] * mask).sum(1)
    assert batch.rewards.tolist() == expected.tolist()
    assert batch.rollout_logprobs.tolist() == native.batch["rollout_log_probs"][mask].tolist()
    assert set(batch.policy_versions.tolist()) == {4}
    assert batch.group_size == 2


def test_rows_of_a_greedy_baseline_belong_to_their_groups() -> None:
    """REMAX: two rollouts of each of two prompts, then one greedy one of each."""
    asked = drawn(["a", "a", "b", "b", "a", "b"], __do_sample__=[True] * 4 + [False] * 2)
    batch = codec().encode(played(asked, 1), request(asked, group_size=3))
    assert [(row.group_id, row.env_id) for row in batch.identities] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert batch.extras["identity/row"].values.tolist() == [0, 1, 4, 2, 3, 5]  # type: ignore[union-attr]
    assert codec().prompt_problems(batch, request(asked)) == []


def test_other_prompts_are_named_with_their_rows_and_fields() -> None:
    batch = codec().encode(played(asked := drawn(["a", "b"], n=2), 1), request(asked))
    assert codec().prompt_problems(batch, request(drawn(["a", "b"], n=2))) == []
    (problem,) = codec().prompt_problems(batch, request(drawn(["a", "x"], n=2)))
    assert problem == (
        "2 of 4 prompts are not the recorded ones: row 2: raw_prompt is now [{'role': 'user', 'content': 'x'}]; row "
        "3: raw_prompt is now [{'role': 'user', 'content': 'x'}]. Use the data files, data.seed and data.shuffle of "
        "the recording, or record again"
    )
    (problem,) = codec().prompt_problems(batch, request(drawn(["a", "b"], n=2, tools_kwargs=[{}] * 4)))
    assert "row 0: tools_kwargs is now {}" in problem
    (problem,) = codec().prompt_problems(batch, request(drawn(["a"], n=2)))
    assert problem == "the batch has 4 rows; the trainer drew 2 prompts"


def test_prompts_with_images_are_given_back_as_they_were_drawn() -> None:
    asked = drawn(["a"], n=2)
    asked.non_tensor_batch["raw_prompt"] = objects([[{"content": Image()}] for _ in range(2)])
    native = played(asked, 1)
    batch = codec().encode(native, request(asked))
    again = codec().decode(batch)
    restore_prompts(again, Drawn.of(asked))
    assert_equal(again, native)
    assert codec().prompt_problems(batch, request(asked)) == []


def test_a_name_of_two_fields_is_refused() -> None:
    asked = drawn(["a"], n=2)
    native = played(asked, 1)
    native.non_tensor_batch["prompts"] = objects([1, 2])
    with pytest.raises(BatchError, match="prompts: a tensor and an array have one name"):
        codec().encode(native, request(asked))


def test_scores_that_are_no_numbers_are_refused() -> None:
    asked = drawn(["a"], n=2)
    native = played(asked, 1)
    native.batch["rm_scores"][:] = NAN
    with pytest.raises(BatchError, match="'rm_scores' is not finite in row 1"):
        codec().encode(native, request(asked))
