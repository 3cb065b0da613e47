"""TRL's own values come back from a recorded batch with every type and bit, and what cannot be recorded is named."""

import math
import struct
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mock_scheduler.adapters.trl.codec import TrlCodec
from mock_scheduler.adapters.trl.samples import SampleCodec
from mock_scheduler.batch import RolloutBatch, SamplingParams, Termination
from mock_scheduler.errors import BatchError
from mock_scheduler.recording.step.step_file import decode_step, encode_step
from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.scheduler import RolloutRequest, RowShard

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")
INFO = StepInfo(step=0, mode="train", scheduler_id="default", run_id="r", policy_version=3)


def request(num_rows: int, **changes: Any) -> RolloutRequest:
    return RolloutRequest(
        **{"global_step": 0, "batch_size": num_rows, "group_size": num_rows, "policy_version": 3, **changes}
    )


def through_a_file(batch: RolloutBatch) -> RolloutBatch:
    return decode_step(encode_step(batch, INFO).to_bytes())[0]


def bits(value: Any) -> Any:
    """A value with its types, and floats and arrays by their bits: NaN is NaN, and -0.0 is not 0.0."""
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return [(key, bits(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [bits(item) for item in value]
    return type(value).__name__, value


numbers = st.one_of(
    st.floats(max_value=0.0, allow_nan=False, allow_infinity=False, width=32),
    st.floats(max_value=0.0, allow_nan=False, allow_infinity=False),
    st.sampled_from([None, math.nan, -math.inf, -0.0, 0, -3]),
)
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@st.composite
def natives(draw: st.DrawFn) -> dict[str, Any]:
    tokens = st.lists(st.integers(0, 2**31 - 1), max_size=5)
    num_rows = draw(st.integers(1, 4))
    native: dict[str, Any] = {
        "prompt_ids": [draw(st.lists(st.integers(0, 99), min_size=1, max_size=3)) for _ in range(num_rows)],
        "completion_ids": [draw(tokens) for _ in range(num_rows)],
    }
    lengths = [len(row) for row in native["completion_ids"]]
    entries = {
        "logprobs": st.none() | st.tuples(*(st.lists(numbers, min_size=n, max_size=n) for n in lengths)).map(list)
    }
    masks = st.sampled_from([0, 1, True, False, 2])
    if draw(st.booleans()):
        entries["env_mask"] = st.tuples(*(st.lists(masks, min_size=n, max_size=n) for n in lengths)).map(list)
    if draw(st.booleans()):
        entries["answer"] = st.lists(plain, min_size=num_rows, max_size=num_rows)
    if draw(st.booleans()):
        entries["whole"] = plain
    native |= {name: draw(strategy) for name, strategy in entries.items()}
    return {name: native[name] for name in draw(st.permutations(list(native)))}


@given(natives())
def test_an_answer_of_rollout_func_comes_back_with_every_type_and_bit(native: dict[str, Any]) -> None:
    codec = TrlCodec(sampling=SAMPLING)
    before = bits(native)
    batch = codec.encode(native, request(len(native["prompt_ids"])))
    assert bits(codec.decode(through_a_file(batch))) == before
    assert bits(native) == before


def answer(**changes: Any) -> dict[str, Any]:
    native = {
        "prompt_ids": [[1, 2], [1, 2], [3], [3]],
        "completion_ids": [[4, 9], [5], [6, 7, 8], [9]],
        "logprobs": [[-0.5, -0.25], [-1.0], [-0.5, -0.5, -2.0], [-0.125]],
    }
    return {**native, **changes}


def test_the_core_fields_say_what_was_sampled_by_whom() -> None:
    native = answer(env_mask=[[1, 0], [1], [1, 1, 1], [1]])
    batch = TrlCodec(sampling=SAMPLING, eos_token_ids={9}).encode(native, request(4, group_size=2))
    assert batch.tokens.tolist() == [1, 2, 4, 9, 1, 2, 5, 3, 6, 7, 8, 3, 9]
    assert batch.response_lengths.tolist() == [1, 1, 3, 1]
    assert batch.rollout_logprobs.tolist() == [-0.5, -1.0, -0.5, -0.5, -2.0, -0.125]
    assert [Termination(value) for value in batch.terminations.tolist()] == [
        *(Termination.TERMINATED, Termination.TRUNCATED, Termination.TRUNCATED, Termination.TERMINATED)
    ]
    assert [(identity.group_id, identity.env_id) for identity in batch.identities] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert batch.policy_versions.tolist() == [3] * 4


def test_processes_with_rows_of_their_own_count_rows_and_groups_on() -> None:
    parts = [
        TrlCodec(sampling=SAMPLING, shard=RowShard(index=index, count=2)).encode(answer(), request(8, group_size=8))
        for index in range(2)
    ]
    whole = RolloutBatch.concat(parts)
    assert [identity.env_id for identity in whole.identities] == list(range(8))
    assert whole.num_groups == 1


@pytest.mark.parametrize(
    ("native", "problem"),
    [
        ([], "it is of type list; expected a dict"),
        ({"prompt_ids": []}, "it has no completion_ids, logprobs; expected"),
        (answer(completion_ids=[[1], [2]]), "completion_ids has 2 rows, prompt_ids 4"),
        (answer(completion_ids=np.zeros((4, 1))), "completion_ids has ndarray; expected a list of lists"),
        (answer(completion_ids=[[1.5], [1], [1], [1]], logprobs=None), "completion_ids holds 1.5; expected token ids"),
        (answer(prompt_ids=[[-1]] * 4), "prompt_ids holds -1; expected token ids, ints of 0 to"),
        (answer(logprobs=[[-0.5], [-1.0], [-0.5], [-0.1]]), "logprobs has 1 entries in row 0, whose completion has 2"),
        (answer(answer=[object()] * 4), "field 'answer', row 0, holds a value of type builtins.object"),
    ],
)
def test_what_cannot_be_recorded_is_named(native: Any, problem: str) -> None:
    with pytest.raises(BatchError, match=problem):
        TrlCodec(sampling=SAMPLING).encode(native, request(4))


def test_other_prompts_are_named_and_what_is_no_plain_data_is_not_compared() -> None:
    codec = TrlCodec(sampling=SAMPLING)
    chat = [{"role": "user", "content": "2 + 2"}]
    batch = through_a_file(codec.encode(answer(), request(4, prompts=["a", "b", chat, object()])))
    assert codec.prompt_problems(batch, request(4, prompts=["a", "b", chat, "anything"])) == []
    (problem,) = codec.prompt_problems(batch, request(4, prompts=["a", "x", "y", "z"]))
    assert problem.startswith("2 of 4 prompts are not the recorded ones: row 1 is now 'x'; row 2 is now 'y'. Use the")
    assert codec.prompt_problems(batch, request(4, prompts=["a"])) == [
        "the batch has 4 rows; the trainer drew 1 prompts"
    ]


@dataclass(slots=True)
class Sample:
    """The fields of ``trl.experimental.async_grpo``'s ``RolloutSample`` of TRL 1.16.0."""

    prompt: list[dict[str, str]]
    completion: list[dict[str, str]]
    input_ids: np.ndarray
    completion_mask: np.ndarray
    old_log_probs: np.ndarray
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float] = field(default_factory=dict)
    enqueued_at: float | None = None


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    length = draw(st.integers(1, 5))
    dtype = draw(st.sampled_from([np.int64, np.int32]))
    logprobs = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False, width=32) | st.sampled_from(
        [math.nan, -math.inf, -0.0]
    )
    return Sample(
        prompt=[{"role": "user", "content": draw(st.text(max_size=3))}],
        completion=[],
        input_ids=np.array(draw(st.lists(st.integers(0, 99), min_size=length, max_size=length)), dtype=dtype),
        completion_mask=np.array(draw(st.lists(st.integers(0, 2), min_size=length, max_size=length)), dtype=dtype),
        old_log_probs=np.array(draw(st.lists(logprobs, min_size=length, max_size=length)), dtype=np.float32),
        advantage=draw(st.floats()),
        model_version=draw(st.integers(0, 3)),
        group_id=draw(st.integers(0, 2)),
        metrics={"reward": draw(st.floats()), "tools/failure_frequency": 0.0},
        enqueued_at=draw(st.none() | st.floats(0, 1e9)),
    )


@given(st.lists(samples(), min_size=1, max_size=5))
def test_samples_of_the_asynchronous_trainer_come_back_in_their_order_with_every_bit(taken: list[Sample]) -> None:
    codec = SampleCodec(sampling=SAMPLING, make_sample=Sample)
    batch = through_a_file(codec.encode(taken, request(len(taken), group_size=None)))
    names = [item.name for item in fields(Sample)]
    again = codec.decode(batch)
    assert [[bits(getattr(one, name)) for name in names] for one in again] == [
        [bits(getattr(one, name)) for name in names] for one in taken
    ]


def test_a_sample_of_another_form_is_named() -> None:
    wrong = Sample(
        prompt=[],
        completion=[],
        input_ids=np.zeros(3, dtype=np.int64),
        completion_mask=np.zeros(2, dtype=np.int64),
        old_log_probs=np.zeros(3, dtype=np.float32),
        advantage=0.0,
        model_version=0,
        group_id=0,
    )
    with pytest.raises(BatchError, match=r"sample 0: \{.*\(2,\).*\}; expected three NumPy arrays of one length"):
        SampleCodec(sampling=SAMPLING).encode([wrong], request(1))


def test_rewards_whose_sum_is_beyond_a_float_are_none_for_those_who_look() -> None:
    """Finite rewards with large weights ended a recording: their sum raised."""
    codec = TrlCodec(sampling=SAMPLING, reward_weights={"a": 1e270, "b": 1e270})
    assert codec.late_rewards({"a": [{"value": 3e38}, {"value": 0.0}], "b": [{"value": 3e38}, {"value": 0.0}]}) == [
        0,
        0,
    ]
