"""Samples of ms-swift come back from a recording with every class, field and bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.adapters.ms_swift.codec import SampleCodec
from mock_scheduler.batch import RolloutBatch, SamplingParams, Termination
from mock_scheduler.errors import BatchError
from mock_scheduler.recording.step.step_file import decode_step, encode_step
from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.scheduler import RolloutRequest, RowShard
from tests.adapters.bits import bits
from tests.adapters.ms_swift import trainer
from tests.adapters.ms_swift.trainer import GKDSample, GRPOSample, OnPolicySample

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")


def find_class(name: str) -> Any:
    return getattr(trainer, name, None)


CODEC = SampleCodec(sampling=SAMPLING, find_class=find_class)


def request(num_rows: int, **changes: Any) -> RolloutRequest:
    return RolloutRequest(**{"global_step": 0, "batch_size": num_rows, "policy_version": 3, **changes})


def taken_apart(samples: list[Any]) -> Any:
    return bits([[type(sample).__name__, dict(vars(sample))] for sample in samples])


def through_a_file(batch: RolloutBatch) -> RolloutBatch:
    info = StepInfo(step=0, mode="train", scheduler_id="default", run_id="r", policy_version=3)
    return decode_step(encode_step(batch, info).to_bytes())[0]


def check(samples: list[Any], **changes: Any) -> RolloutBatch:
    """Encodes, writes, reads, decodes and compares; gives the batch."""
    before = taken_apart(samples)
    batch = through_a_file(CODEC.encode(samples, request(len(samples), **changes)))
    assert taken_apart(CODEC.decode(batch)) == before
    assert taken_apart(samples) == before
    return batch


def sample(kind: type = GRPOSample, **fields: Any) -> Any:
    given = {
        "messages": [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}],
        "response_token_ids": [[5, 6, 7]],
        "rollout_logprobs": [[-0.5, -0.25, -0.125]],
        "finish_reason": "stop",
        **fields,
    }
    return kind(**given)


_LOGPROBS = st.floats(-20, 0, width=32) | st.floats(-20, 0) | st.sampled_from([math.nan, -math.inf, -0.0, 1e300, 0])
_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2) | st.tuples(inner)
    ),
    max_leaves=4,
)


@st.composite
def samples(draw: st.DrawFn) -> Any:
    turns = draw(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=20), max_size=3))
    mask = [draw(st.lists(st.integers(0, 1), min_size=len(turn), max_size=len(turn))) for turn in turns]
    form = draw(st.sampled_from(["none", "all", "sampled"]))
    counts = [sum(part) if form == "sampled" else len(part) for part in mask]
    logprobs: list[Any] = [draw(st.lists(_LOGPROBS, min_size=count, max_size=count)) for count in counts]
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": draw(st.text(max_size=3)), "tool_calls": draw(_PLAIN)}],
        "images": draw(st.sampled_from([[], ["a.png"], [{"bytes": b"\x00\xff", "path": None}]])),
        "extra": {"solution": draw(_PLAIN)},
        "response_token_ids": turns,
        "response_loss_mask": mask if draw(st.booleans()) else [],
        "rollout_logprobs": [] if form == "none" else logprobs,
        "finish_reason": draw(st.sampled_from(["stop", "length", None])),
        "rollout_infos": {"total_reward": draw(st.floats()), "num_turns": 2},
    }
    if not fields["response_loss_mask"] and form == "sampled":
        fields["rollout_logprobs"] = []
    if draw(st.booleans()):
        fields["routed_experts"] = np.arange(8, dtype=np.uint8).reshape(2, 2, 2)
    if len(turns) == 1 and draw(st.booleans()):  # of a single turn ms-swift keeps the engine's list of tokens
        fields["response_token_ids"] = turns[0]
    kind = draw(st.sampled_from([OnPolicySample, GRPOSample, GKDSample]))
    if kind is GRPOSample:
        fields["advantages"] = draw(st.none() | st.floats(width=32).map(torch.tensor))
    made = kind(**fields)
    if draw(st.booleans()):
        made.of_a_later_release = draw(_PLAIN)
    return made


@settings(max_examples=60, deadline=None)
@given(st.lists(samples(), min_size=1, max_size=4))
def test_samples_of_any_form_come_back(taken: list[Any]) -> None:
    check(taken)


def test_core_fields_are_the_responses_own() -> None:
    first = sample(
        response_token_ids=[[5, 6], [7]], response_loss_mask=[[1, 0], [1]], rollout_logprobs=[[-0.5], [-0.25]]
    )
    second = sample(response_token_ids=[8, 9], rollout_logprobs=[[-1.0, -2.0]], finish_reason="length")
    third = sample(response_token_ids=[], rollout_logprobs=[], finish_reason=None)
    batch = check([first, second, third, sample(rollout_infos={"total_reward": 0.5})], group_size=2)
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9, 0, 5, 6, 7]
    assert batch.response_mask.tolist() == [True, False, True, True, True, False, True, True, True]
    assert batch.rollout_logprobs.tolist() == [-0.5, -0.25, -1.0, -2.0, -0.5, -0.25, -0.125]
    assert batch.prompt_lengths.tolist() == [0, 0, 0, 0]
    assert batch.rewards.tolist() == [0.0, 0.0, 0.0, 0.5]
    assert [Termination(value) for value in batch.terminations.tolist()] == [
        *(Termination.TERMINATED, Termination.TRUNCATED, Termination.ABORTED, Termination.TERMINATED)
    ]
    assert (batch.num_groups, batch.group_size) == (2, 2)
    assert batch.policy_versions.tolist() == [3, 3, 3, 3]


def test_log_probabilities_of_all_tokens_are_read_for_the_sampled_ones() -> None:
    batch = check([sample(response_loss_mask=[[1, 0, 1]])])
    assert batch.rollout_logprobs.tolist() == [-0.5, -0.125]


def test_processes_with_samples_of_their_own_count_groups_on() -> None:
    parts = []
    for index in range(2):
        codec = SampleCodec(sampling=SAMPLING, find_class=find_class, shard=RowShard(index=index, count=2))
        parts.append(codec.encode([sample()] * 2, request(4, group_size=4)))
    whole = RolloutBatch.concat(parts)
    assert [identity.numbers for identity in whole.identities] == [(0, 0, number, 0) for number in range(4)]
    assert whole.num_groups == 1


def test_other_prompts_are_named() -> None:
    prompts: list[Any] = [[{"role": "user", "content": text}] for text in ("a", "b")]
    prompts.append([{"role": "user", "content": [{"type": "image", "image": object()}]}])
    batch = check([sample()] * 3, prompts=prompts)
    # What holds an image is not compared.
    assert CODEC.prompt_problems(batch, request(3, prompts=[*prompts[:2], "anything"])) == []
    (problem,) = CODEC.prompt_problems(batch, request(3, prompts=[prompts[0], "x", "y"]))
    assert problem.startswith("1 of 3 prompts are not the recorded ones: row 1 is now 'x'. Use the data set, seed and")
    assert CODEC.prompt_problems(batch, request(1, prompts=["x"])) == [
        "the batch has 3 rows; the trainer drew 1 prompts"
    ]


@pytest.mark.parametrize(
    ("taken", "problem"),
    [
        ([], "there is none"),
        ([sample(response_token_ids=[[1.5]])], "response_token_ids holds \\['float'\\]; expected lists of ints"),
        ([sample(response_token_ids=[[-1]])], "token ids lie from -1 to -1"),
        ([sample(response_loss_mask=[[1]])], r"response_loss_mask is of another form .* turns of \[3\] tokens"),
        (
            [sample(images=[Path("x")])],
            r"row 0: images\[0\] holds a value of type pathlib\.PosixPath, which cannot be recorded",
        ),
        ([Path("x")], "it is a pathlib.PosixPath, which a replay could not make"),
    ],
)
def test_what_cannot_be_recorded_is_named(taken: list[Any], problem: str) -> None:
    with pytest.raises(BatchError, match=problem):
        CODEC.encode(taken, request(max(len(taken), 1)))


def test_a_batch_of_another_codec_or_release_is_refused() -> None:
    batch = CODEC.encode([sample()], request(1))
    with pytest.raises(BatchError, match="this release of ms-swift has no GRPOSample"):
        SampleCodec(sampling=SAMPLING, find_class=lambda name: None).decode(batch)
    with pytest.raises(BatchError, match="was not recorded from samples of ms-swift"):
        CODEC.decode(RolloutBatch.from_trajectories(batch.rows(), sampling=SAMPLING, group_size=1))
