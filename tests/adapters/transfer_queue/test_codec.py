"""Rows of a TransferQueue come back from a recording bit for bit, and say in it what they say themselves."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.adapters.imports.verl_v1 import VERL_NAMES
from mock_scheduler.adapters.transfer_queue.codec import QueueCodec, QueueRows
from mock_scheduler.adapters.transfer_queue.columns import QueueColumn, build_tensor, select_rows
from mock_scheduler.adapters.transfer_queue.row_fields import split_key
from mock_scheduler.batch import RolloutBatch, SamplingParams
from mock_scheduler.batch.columns import JsonColumn
from mock_scheduler.errors import BatchError
from mock_scheduler.recording.step.step_file import decode_step, encode_step
from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.scheduler import RolloutRequest
from tests.adapters.bits import bits
from tests.adapters.transfer_queue.queue_rows import TAG, field, queue_rows

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")
CODEC = QueueCodec(VERL_NAMES, sampling=SAMPLING)


def all_bits(rows: QueueRows) -> object:
    columns = {name: [one.kind, one.ragged_dim, list(one.rows)] for name, one in rows.columns.items()}
    return bits([rows.partition, list(rows.keys), [dict(tag) for tag in rows.tags], columns, dict(rows.notes)])


def check(rows: QueueRows, prompts: Any = None) -> RolloutBatch:
    """Encodes, decodes and compares; gives the batch."""
    before = all_bits(rows)
    batch = CODEC.encode(rows, RolloutRequest(global_step=1, batch_size=8, policy_version=7, prompts=prompts))
    assert all_bits(rows) == before
    info = StepInfo(step=1, mode="train", scheduler_id="default", run_id="r", policy_version=7)
    stored, _ = decode_step(encode_step(batch, info).to_bytes())
    assert all_bits(CODEC.decode(stored)) == before
    return batch


_PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=4)
_FLOAT = st.floats(width=32) | st.just(-0.0) | st.just(math.nan)


def _ids(draw: st.DrawFn, size: int) -> list[int]:
    return draw(st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size))


def _floats(draw: st.DrawFn, size: int) -> torch.Tensor:
    return torch.tensor(draw(st.lists(_FLOAT, min_size=size, max_size=size)), dtype=torch.float32)


@st.composite
def row_fields(draw: st.DrawFn, names: frozenset[str]) -> dict[str, object]:
    """One row; fields that core fields could say are often others."""
    num_prompt, size = draw(st.integers(0, 3)), draw(st.integers(0, 5))
    row = field(_ids(draw, num_prompt), _ids(draw, size))
    if "logprobs" in names:
        row["rollout_log_probs"] = _floats(draw, size)
    if "scores" in names:
        row["rm_scores"] = _floats(draw, size)
    if "mask" in names:
        flags = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
        row["response_mask"] = torch.tensor(flags, dtype=draw(st.sampled_from([torch.int64, torch.int8])))
    if "positions" in names:  # of a vision model
        row["position_ids"] = torch.arange(3 * (num_prompt + size)).reshape(3, -1)
    if "experts" in names:
        shape = (num_prompt + size, 2, 2)
        kind = draw(st.sampled_from([np.int16, np.int16, np.uint8]))
        some = np.arange(math.prod(shape)).reshape(shape) if draw(st.booleans()) else np.zeros(shape)
        row["routed_experts"] = torch.from_numpy(some.astype(kind))
    if "images" in names:
        pixels = torch.frombuffer(bytearray(draw(st.binary(min_size=4, max_size=4))), dtype=torch.bfloat16)
        row["multi_modal_inputs"] = draw(st.sampled_from([{}, {"pixel_values": pixels, "grid": [(1, 2)]}]))
    row["extra_fields"] = draw(st.dictionaries(st.text(max_size=3), _PLAIN, max_size=2))
    row["teacher_logprobs"] = draw(st.none() | st.just(torch.ones(2, dtype=torch.bfloat16)))
    return row


@st.composite
def queues(draw: st.DrawFn) -> QueueRows:
    names = frozenset(
        draw(st.sets(st.sampled_from(["logprobs", "scores", "mask", "positions", "experts", "images"]), max_size=6))
    )
    # Several rows of a session, sessions of a group, and a name with the sign that joins them.
    keys = draw(st.lists(st.sampled_from([*"ab", "a_b"]), min_size=1, max_size=4))
    places = [f"{key}_{draw(st.integers(0, 1))}_{number}" for number, key in enumerate(keys)]
    rows = {key: draw(row_fields(names)) for key in places}
    tags: list[dict[str, Any]] = [
        {**TAG, "min_global_steps": draw(st.none() | st.integers(0, 7)), "other": draw(_PLAIN)} for _ in rows
    ]
    if draw(st.booleans()):
        pad = {**next(iter(rows.values())), **field([2], [2], rm_scores=torch.zeros(1))}
        rows["pad0_0_0"] = {**pad, "response_mask": torch.zeros(1, dtype=torch.int64)}
        if "positions" in names:
            rows["pad0_0_0"]["position_ids"] = torch.zeros(3, 2, dtype=torch.int64)
        if "experts" in names:
            dtype = next(iter(rows.values()))["routed_experts"].dtype  # type: ignore[attr-defined]
            rows["pad0_0_0"]["routed_experts"] = torch.zeros(2, 2, 2, dtype=dtype)
        tags.append({**TAG, "is_padding": True})
    made = queue_rows(rows, tags, metrics={"x": draw(_PLAIN)})
    columns = dict(made.columns)
    if "positions" in names:
        columns["position_ids"] = replace(columns["position_ids"], kind="strided", ragged_dim=1)
    columns["dense"] = QueueColumn(kind="dense", rows=list(torch.rand(len(rows), 2)))
    columns["shared"] = QueueColumn(kind="shared", rows=[draw(_PLAIN)] * len(rows))
    return replace(made, columns=columns)


@settings(max_examples=120, deadline=None)
@given(queues())
def test_any_rows_come_back(rows: QueueRows) -> None:
    check(rows)


def test_a_row_says_what_a_rollout_is() -> None:
    rows = {
        "u_0_0": field([1, 2], [3, 4, 5], response_mask=torch.tensor([1, 0, 1])),
        "u_0_1": field([1, 2], [6]),
        "u_1_0": field([1, 2], [7, 8]),
        "w_0_0": field([9], []),
    }
    tags = [{**TAG, "min_global_steps": version} for version in (3, 4, 4, 4)]
    batch = check(queue_rows(rows, tags))
    assert [identity.numbers for identity in batch.identities] == [
        (0, 0, 0, 0),
        (0, 0, 0, 1),
        (0, 0, 1, 0),
        (1, 0, 0, 0),
    ]
    assert batch.rows()[0].tokens.tolist() == [1, 2, 3, 4, 5]
    assert batch.response_mask.int().tolist() == [*(0, 0, 1, 0, 1), *(0, 0, 1), *(0, 0, 1, 1), 0]
    assert batch.rewards.tolist() == [0.5, 0.5, 0.5, 0.0]
    assert batch.policy_versions.tolist() == [3, 3, 4, 4]
    assert batch.prompt_lengths.tolist() == [2, 2, 2, 1]
    assert batch.tags == ("toy",) * 4


def test_what_core_fields_say_is_kept_once() -> None:
    experts = torch.arange(40, dtype=torch.int16).reshape(5, 4, 2)
    batch = check(queue_rows({"u_0_0": field([1, 2], [3, 4, 5], routed_experts=experts)}))
    once = {
        name.removeprefix("native/")
        for name, column in batch.extras.items()
        if isinstance(column, JsonColumn) and column.items == ({"$core": True},)
    }
    assert once == {
        *("prompts", "responses", "input_ids", "position_ids", "response_mask", "loss_mask", "rollout_log_probs"),
        *("rm_scores", "routed_experts"),
    }
    assert batch.extras["routed_experts"].row(0).values.tolist() == experts.tolist()
    # One bit more, and the field is kept itself.
    changed = torch.tensor([-1.0, -0.0, -1.0])
    mask = torch.tensor([1, 0, 1])
    other = check(queue_rows({"u_0_0": field([1, 2], [3, 4, 5], rollout_log_probs=changed, response_mask=mask)}))
    assert other.rollout_logprobs.tolist() == [-1.0, -1.0]
    assert "$tensor" in str(other.extras["native/rollout_log_probs"].row(0))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"input_ids": torch.tensor([-1, 2, 3])}, "input_ids lies from -1 to 3; expected 0 to 2147483647"),
        ({"input_ids": torch.rand(3)}, r"input_ids is torch.float32 \[3\]; expected token ids"),
        ({"input_ids": torch.tensor([1])}, "has 1 tokens, 2 of the response, and a mask of 2"),
        ({"response_mask": torch.tensor([1])}, "has 3 tokens, 2 of the response, and a mask of 1"),
        ({"responses": None}, "responses is NoneType; expected token ids"),
        ({"rollout_log_probs": torch.rand(1)}, r"rollout_log_probs is \[1\]; expected a number for each of 2"),
        ({"image": object()}, "row 0: image holds a value of type builtins.object, which cannot be recorded"),
        ({":key": 1}, "has a field ':key'; names that begin with ':' are taken"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(BatchError, match=problem):
        check(queue_rows({"u_0_0": field([1], [2, 3], **changes)}))


def test_keys_that_are_none_are_refused_all_at_once() -> None:
    rows = queue_rows({"u_0_0": field([1], [2]), "u": field([1], [2]), "u_x_0": field([1], [2])})
    with pytest.raises(BatchError) as caught:
        check(rows)
    assert "row 1 (u): key 'u' is none of a group, a trajectory and a row, joined by '_'" in str(caught.value)
    assert "row 2 (u_x_0)" in str(caught.value)
    assert split_key("a_b_12_3") == ("a_b", 12, 3)
    with pytest.raises(BatchError, match=r"1 keys of partition 'train', and other numbers of rows in tags \(0\)"):
        check(replace(queue_rows({"u_0_0": field([1], [2])}), tags=[]))


def test_other_prompts_are_named() -> None:
    drawn = [[{"role": "user", "content": text}] for text in ("one", "two")]
    batch = check(queue_rows({"u_0_0": field([1], [2]), "w_0_0": field([3], [4])}), drawn)

    def problems(prompts: Any, of: RolloutBatch = batch) -> list[str]:
        return CODEC.prompt_problems(of, RolloutRequest(global_step=1, batch_size=2, prompts=prompts))

    assert problems(drawn) == problems(None) == []
    assert problems(drawn[:1]) == ["the batch has 2 prompts; the trainer drew 1 prompts"]
    assert problems([drawn[1], drawn[1]]) == [
        "1 of 2 prompts are not the recorded ones: prompt 0 is now [{'role': 'user', 'content': 'two'}]. Use the data "
        "set, seed and order of the recording, or record again"
    ]
    # Where the trainer's prompts were not known, the rows' own must be among those drawn.
    untold = check(queue_rows({"u_0_0": field([1], [2]), "w_0_0": field([3], [4])}))
    own = [[{"role": "user", "content": text}] for text in ("[3]", "[1]", "other")]
    assert problems(own, untold) == []
    assert problems(own[1:], untold)[0].startswith("1 of 2 prompts of the batch are none of the 2 that")


def test_a_part_of_a_batch_is_decoded() -> None:
    rows = {f"u_{number}_0": field([1], [number + 2]) for number in range(3)}
    batch = check(queue_rows(rows))
    part = CODEC.decode(batch.select([0, 2]))
    assert sorted(part.keys) == ["u_0_0", "u_2_0"]
    assert [row.tolist() for row in part.columns["responses"].rows] == [  # type: ignore[attr-defined]
        [int(key[2]) + 2] for key in part.keys
    ]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_are_built_as_they_were_held() -> None:
    rows = [torch.arange(6).reshape(2, 3), torch.arange(2).reshape(2, 1)]
    jagged = build_tensor(QueueColumn(kind="jagged", rows=rows, ragged_dim=2))
    assert jagged._ragged_idx == 2  # type: ignore[attr-defined]
    assert [row.tolist() for row in jagged.unbind()] == [row.tolist() for row in rows]
    empty = build_tensor(QueueColumn(kind="jagged", rows=[torch.empty(0, 2), torch.empty(0, 2)]))
    assert [list(row.shape) for row in empty.unbind()] == [[0, 2], [0, 2]]
    strided = build_tensor(QueueColumn(kind="strided", rows=rows))
    assert [row.tolist() for row in strided.unbind()] == [row.tolist() for row in rows]
    picked = select_rows({"x": QueueColumn(kind="jagged", rows=rows, ragged_dim=2)}, [1])["x"]
    assert (picked.ragged_dim, [row.tolist() for row in picked.rows]) == (2, [[[0], [1]]])  # type: ignore[attr-defined]
