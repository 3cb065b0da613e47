"""The output of SkyRL's generator comes back from a recording bit for bit, and says in it what it says itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.adapters.skyrl import codec
from mock_scheduler.adapters.skyrl.codec import SkyrlCodec
from mock_scheduler.batch import RolloutBatch, SamplingParams, Termination
from mock_scheduler.batch.engine_columns import ROUTED_EXPERTS_COLUMN, SUPPORT_COLUMN, SUPPORT_OFFSETS_COLUMN
from mock_scheduler.errors import BatchError
from mock_scheduler.scheduler import RolloutRequest
from tests.adapters.bits import bits, stored
from tests.adapters.skyrl.signatures import TrajectoryID

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")
CODEC = SkyrlCodec(sampling={"train": SAMPLING, "val": SAMPLING})


@pytest.fixture(autouse=True, scope="module")
def _ids() -> Any:
    """SkyRL is not installed here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "make_trajectory_id", TrajectoryID)
        yield


def check(output: dict[str, Any], **request: Any) -> RolloutBatch:
    """Encodes, stores, reads, decodes and compares; gives the batch."""
    before = bits(output)
    batch = CODEC.encode(output, RolloutRequest(global_step=0, batch_size=8, policy_version=7, **request))
    assert bits(output) == before
    assert bits(CODEC.decode(stored(batch))) == before
    return batch


@st.composite
def outputs(draw: st.DrawFn) -> dict[str, Any]:
    """Any output: step-wise or not, rewards of rows or of tokens, with every field that a row may have."""
    count = draw(st.integers(1, 5))
    sizes = [(draw(st.integers(0, 3)), draw(st.integers(0, 5))) for _ in range(count)]
    token = st.integers(0, 2**31 - 1)
    logprob = st.floats(-20, 0) | st.floats(-20, 0, width=32) | st.just(-0.0)
    reward = st.floats() | st.integers(-3, 3) | st.builds(np.float32, st.floats(width=32))

    def by_token(values: st.SearchStrategy[Any]) -> list[list[Any]]:
        return [draw(st.lists(values, min_size=length, max_size=length)) for _, length in sizes]

    steps = draw(st.integers(1, 2))
    output = {
        "prompt_token_ids": [draw(st.lists(token, min_size=length, max_size=length)) for length, _ in sizes],
        "response_ids": by_token(token),
        "rewards": by_token(st.floats()) if draw(st.booleans()) else [draw(reward) for _ in range(count)],
        "loss_masks": by_token(st.integers(0, 1)),
        "stop_reasons": draw(st.none() | st.just(["stop", "length", "abort", None, "stop"][:count])),
        "rollout_metrics": draw(st.none() | st.just({"a": 1.0, "b": np.float64("nan"), "c": [1, 2]})),
        "rollout_logprobs": by_token(logprob) if draw(st.booleans()) else None,
        "trajectory_ids": draw(
            st.none() | st.just([TrajectoryID(f"p{row // (2 * steps)}", row // steps % 2) for row in range(count)])
        ),
        "trajectory_generation_times": draw(st.none() | st.lists(st.floats(), max_size=5)),
        "trajectory_time_splits": draw(st.none() | st.just({"llm": [0.5], "env": [math.inf]})),
        "is_last_step": draw(st.none() | st.lists(st.booleans(), min_size=count, max_size=count)),
        "env_metrics": draw(st.none() | st.just([{"row": row, "x": math.nan} for row in range(count)])),
        "pixel_values": draw(st.none() | st.just([torch.rand(row, 3).to(torch.bfloat16) for row in range(count)])),
        "image_grid_thw": draw(st.none() | st.just([torch.tensor([[1, 2, row]]) for row in range(count)])),
    }
    if draw(st.booleans()):
        output["rollout_expert_indices"] = [_experts(draw, prompt + length) for prompt, length in sizes]
    if draw(st.booleans()):
        rows = zip(output["response_ids"], output["loss_masks"], strict=True)
        output["rollout_sample_support"] = [_support(draw, *row) for row in rows]
    order = draw(st.permutations(sorted(output)))
    return {name: output[name] for name in order}


def _experts(draw: st.DrawFn, num_tokens: int) -> Any:
    """Experts of a prefix of the tokens; rarely of other tokens, or twice the same."""
    covered = max(num_tokens - draw(st.integers(0, 2)), 0)
    kind = draw(st.sampled_from(["u1", "<i2", "<i4", "<i8"]))
    rows = [[draw(st.sampled_from([[0, 1], [3, 2], [1, 1]])) for _ in range(2)] for _ in range(covered)]
    return np.array(rows, dtype=kind).reshape(covered, 2, 2)


def _support(draw: st.DrawFn, tokens: list[int], mask: list[int]) -> Any:
    """Support of sampled tokens, mostly with the token in it and padded behind; sometimes of others as well."""
    rows = np.full((len(tokens), 3), -1, dtype=draw(st.sampled_from(["<i4", "<i8"])))
    for row, (token, is_own) in enumerate(zip(tokens, mask, strict=True)):
        if is_own or draw(st.integers(0, 9)) == 0:
            ids = draw(st.lists(st.integers(0, 50), max_size=2)) + ([token] if draw(st.integers(0, 9)) else [])
            rows[row, : len(ids)] = ids
    return rows


@settings(max_examples=80, deadline=None)
@given(outputs())
def test_any_output_comes_back(output: dict[str, Any]) -> None:
    assert len(check(output, group_size=2)) == len(output["response_ids"])


def example() -> dict[str, Any]:
    return {
        "prompt_token_ids": [[1, 2], [1, 2, 7, 8, 9], [3]],
        "response_ids": [[7, 8], [4], [5, 6]],
        "rewards": [[0.0, 0.25], [1.0], [0.5, 0.5]],
        "loss_masks": [[1, 0], [1], [1, 1]],
        "stop_reasons": ["stop", "length", "abort"],
        "rollout_logprobs": [[-0.5, 0.0], [-0.25], [-1.0, -2.0]],
        "trajectory_ids": [TrajectoryID("a", 0), TrajectoryID("a", 0), TrajectoryID("b", 1)],
        "is_last_step": [False, True, True],
        "rollout_expert_indices": [
            np.arange(3 * 4, dtype=np.int16).reshape(3, 2, 2),
            np.arange(6 * 4, dtype=np.int16).reshape(6, 2, 2),
            np.arange(2 * 4, dtype=np.int16).reshape(2, 2, 2),
        ],
        "rollout_sample_support": [
            np.array([[7, 9], [-1, -1]], dtype=np.int32),
            np.array([[4, -1]], dtype=np.int32),
            np.array([[2, 5], [6, 1]], dtype=np.int32),
        ],
    }


@pytest.mark.parametrize("rewards", [[math.inf, -math.inf], [1e308, 1e308]], ids=["no sum", "beyond a float"])
def test_rewards_of_tokens_without_a_sum_come_back(rewards: list[float]) -> None:
    output = {**example(), "rewards": [rewards, [1.0], [0.5, 0.5]]}
    assert check(output).rewards.tolist() == [0.0, 1.0, 1.0]


def test_the_core_fields_say_what_the_output_says() -> None:
    batch = check(example())
    assert [(row.identity.group_id, row.identity.env_id, row.identity.turn) for row in batch.rows()] == [
        (0, 0, 0),
        (0, 0, 1),
        (1, 1, 0),
    ]
    assert [row.tokens.tolist() for row in batch.rows()] == [[1, 2, 7, 8], [1, 2, 7, 8, 9, 4], [3, 5, 6]]
    assert [row.response_mask.int().tolist() for row in batch.rows()] == [[0, 0, 1, 0], [0] * 5 + [1], [0, 1, 1]]
    assert batch.rollout_logprobs.tolist() == [-0.5, -0.25, -1.0, -2.0]
    assert batch.rewards.tolist() == [0.25, 1.0, 1.0]
    assert [row.termination for row in batch.rows()] == [
        Termination.TERMINATED,
        Termination.TRUNCATED,
        Termination.ABORTED,
    ]
    experts: Any = batch.extras[ROUTED_EXPERTS_COLUMN]
    assert experts.row(1).values.shape == (6, 2, 2)
    ids: Any = batch.extras[SUPPORT_COLUMN]
    bounds: Any = batch.extras[SUPPORT_OFFSETS_COLUMN]
    assert ids.row(2).values.tolist() == [2, 5, 6, 1]
    assert bounds.row(0).values.tolist() == [0, 2]


def test_rows_of_a_part_of_a_batch_come_back() -> None:
    batch = check(example())
    part = CODEC.decode(batch.select([0, 2]))
    whole = example()
    assert bits(part["response_ids"]) == bits([whole["response_ids"][row] for row in (0, 2)])
    assert bits(part["rollout_sample_support"]) == bits([whole["rollout_sample_support"][row] for row in (0, 2)])


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("response_ids", [[7, 8], [4.0], [5, 6]], "row 1: response_ids has values of float; expected a list of ints"),
        ("trajectory_ids", [None, None, TrajectoryID("a", 0)], "row 0: trajectory_ids has None; expected instance_id"),
        ("trajectory_ids", [TrajectoryID("a", -1)] * 3, "row 0: trajectory_ids has TrajectoryID"),
        (5, [1, 2, 3], "a field is called 5; expected letters"),
        ("response_ids", [[7, 8], [4]], "must be lists with an entry for each row"),
        ("loss_masks", [[1], [1], [1, 1]], "row 0: loss_masks has 1 entries, and the response has 2 tokens"),
        (
            "rollout_logprobs",
            [[-0.5, 0.0], [math.nan], [-1.0, -2.0]],
            "row 1: rollout_logprobs is not finite",
        ),
        ("env_metrics", [object(), None, None], "row 0: env_metrics holds a value of type builtins.object"),
    ],
)
def test_what_cannot_be_kept_is_refused(field: Any, value: object, problem: str) -> None:
    with pytest.raises(BatchError, match=problem):
        CODEC.encode({**example(), field: value}, RolloutRequest(global_step=0, batch_size=2))


def test_a_batch_of_another_codec_is_refused() -> None:
    batch = check(example())
    with pytest.raises(BatchError, match="batch was not recorded from SkyRL's generator: meta 'skyrl' is None"):
        CODEC.decode(type(batch).from_trajectories(list(batch.rows()), sampling=SAMPLING, group_size=None))
