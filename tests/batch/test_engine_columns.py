"""Named fields that engines add: what fits is kept bit for bit, what does not is refused with its place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.columns import Ragged, RowValue
from mock_scheduler.batch.engine_columns import ENGINE_COLUMNS, expert_dtype
from mock_scheduler.errors import BatchError
from mock_scheduler.recording.inspection.description import describe_step
from mock_scheduler.recording.inspection.diff import compare_batches
from mock_scheduler.recording.step.step_file import decode_step, encode_step
from mock_scheduler.recording.step.step_info import StepInfo
from tests.batches import SAMPLING, make_row

INFO = StepInfo(step=0, mode="train", scheduler_id="default", run_id="run", policy_version=0)

#: Fields of the row of ``make_row``: four tokens, of which the last two were sampled, in two turns.
FITTING: Mapping[str, RowValue] = {
    "routed_experts": Ragged(torch.tensor([[[3, 1], [0, 7]], [[2, 0], [5, 4]], [[6, 7], [1, 0]]], dtype=torch.uint8)),
    "sampling_support": Ragged(torch.tensor([9, 3, 4], dtype=torch.int32)),
    "sampling_support_offsets": Ragged(torch.tensor([0, 2, 3], dtype=torch.int32)),
    "raw_logprobs": Ragged(torch.tensor([-0.75, -0.0])),
    "processed_logprobs": Ragged(torch.tensor([-0.5, -0.25], dtype=torch.float64)),
    "policy_versions_by_token": Ragged(torch.tensor([0, 1], dtype=torch.int32)),
    "finish_reasons": ["stop", "length"],
}


def batch_with(meta: Mapping[str, Any] | None = None, **extras: Any) -> RolloutBatch:
    rows = [replace(make_row(), extras=extras)]
    return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=1, meta=meta)


def integers(*values: Any, dtype: torch.dtype = torch.int32) -> Ragged:
    return Ragged(torch.tensor(values, dtype=dtype))


def test_a_step_file_gives_every_field_back_bit_for_bit() -> None:
    batch = batch_with(meta={"num_experts": 8}, **FITTING)
    assert set(batch.extras) == set(ENGINE_COLUMNS)
    loaded, _ = decode_step(encode_step(batch, INFO).to_bytes())
    assert loaded.is_identical(batch)
    for name, value in FITTING.items():
        found = loaded.rows()[0].extras[name]
        if isinstance(value, Ragged):
            assert isinstance(found, Ragged)
            assert (found.values.dtype, found.values.tolist()) == (value.values.dtype, value.values.tolist())
        else:
            assert found == value


@pytest.mark.parametrize("num_tokens", [0, 3, 4])
def test_routing_covers_all_tokens_or_all_but_the_last_or_none(num_tokens: int) -> None:
    experts = torch.arange(2 * num_tokens, dtype=torch.int16).reshape(num_tokens, 1, 2)
    assert len(batch_with(routed_experts=Ragged(experts))) == 1


def test_one_reason_stands_for_a_row_and_an_empty_support_for_the_whole_vocabulary() -> None:
    batch = batch_with(finish_reasons="abort", sampling_support=integers(4), sampling_support_offsets=integers(0, 0, 1))
    assert describe_step("train", batch, INFO, size_bytes=0).finish_reasons == {"abort": 1}


def test_finish_reasons_are_counted_by_turn() -> None:
    step = describe_step("train", batch_with(finish_reasons=["stop", "length"]), INFO, size_bytes=0)
    assert step.finish_reasons == {"length": 1, "stop": 1}


@pytest.mark.parametrize(
    ("extras", "words"),
    [
        (
            {"routed_experts": torch.zeros(4, 1, 2, dtype=torch.uint8)},
            "routed_experts is uint8 [4, 1, 2]; expected ragged",
        ),
        ({"routed_experts": integers([0, 1], [2, 3])}, "expected ragged integers [n, layers, topk]"),
        ({"routed_experts": Ragged(torch.rand(3, 1, 2))}, "routed_experts is ragged float32 [n, 1, 2]"),
        ({"routed_experts": integers([[0, 1]], [[2, 3]])}, "has the experts of 2 tokens; expected 4, or 3"),
        (
            {"routed_experts": integers([[0, 1]], [[2, 8]], [[2, 3]])},
            "token 1, layer 0 of its layers, has experts [2, 8]; expected numbers of 0 to 7 (meta num_experts)",
        ),
        (
            {"routed_experts": integers([[0, 1]], [[2, -1]], [[2, 3]])},
            "token 1, layer 0 of its layers, has experts [2, -1]",
        ),
        (
            {"routed_experts": integers([[0, 1], [1, 0]], [[2, 3], [0, 0]], [[2, 3], [1, 2]])},
            "token 1, layer 1 of its layers, has experts [0, 0]; expected different ones",
        ),
        ({"sampling_support": integers(3, 4)}, "sampling_support_offsets is absent; sampling_support, which is there"),
        ({"sampling_support_offsets": integers(0, 1, 2)}, "sampling_support is absent"),
        (
            {"sampling_support": integers(3, 4), "sampling_support_offsets": integers(0, 2)},
            "has 2 entries; expected 3, one for each response token and one for the end",
        ),
        (
            {"sampling_support": integers(3, 4), "sampling_support_offsets": integers(0, 1, 3)},
            "has [0, 1, 3] and 3 at the end; expected numbers that rise from 0 to 2",
        ),
        (
            {"sampling_support": integers(3, 4), "sampling_support_offsets": integers(0, 3, 2)},
            "has [0, 3, 2] and 2 at the end; expected numbers that rise from 0 to 2",
        ),
        (
            {"sampling_support": integers(4, 3), "sampling_support_offsets": integers(0, 1, 2)},
            "response token 0: the sampled id 3 is not among its 1 ids",
        ),
        (
            {"sampling_support": integers(-3, 4), "sampling_support_offsets": integers(0, 1, 2)},
            "sampling_support: token id -3 is negative",
        ),
        (
            {"raw_logprobs": Ragged(torch.zeros(3))},
            "raw_logprobs: default/group 0/episode 0/env 0/turn 0 has 3 entries",
        ),
        ({"raw_logprobs": integers(0, 0)}, "raw_logprobs is ragged int32 [n]; expected ragged floats [n]"),
        ({"processed_logprobs": Ragged(torch.tensor([0.0, torch.nan]))}, "nan is not finite"),
        (
            {"policy_versions_by_token": integers(1)},
            "policy_versions_by_token: default/group 0/episode 0/env 0/turn 0 has 1",
        ),
        ({"finish_reasons": ["stop"]}, "has ['stop']; expected a text such as 'stop', or a list of 2 texts"),
        ({"finish_reasons": 3}, "has 3; expected a text"),
        ({"finish_reasons": torch.zeros(())}, "finish_reasons is float32 []; expected JSON"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(extras: Mapping[str, Any], words: str) -> None:
    with pytest.raises(BatchError, match=re.escape(words)):
        batch_with(meta={"num_experts": 8}, **extras)


def test_columns_of_older_recordings_with_such_names_open_as_they_were_written() -> None:
    batch = batch_with(older=integers(5), word=3)
    fields = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    fields["extras"] = {"routed_experts": batch.extras["older"], "finish_reasons": batch.extras["word"]}
    written = encode_step(RolloutBatch._unchecked(**fields), INFO).to_bytes()  # no constructor accepts it today
    loaded, _ = decode_step(written)
    assert loaded.rows()[0].extras["finish_reasons"] == 3
    assert encode_step(loaded, INFO).to_bytes() == written


def test_a_difference_names_field_token_layer_and_place() -> None:
    other = torch.tensor([[[3, 1], [0, 7]], [[2, 0], [4, 5]], [[6, 7], [1, 0]]], dtype=torch.uint8)
    found = compare_batches(batch_with(**FITTING), batch_with(**{**FITTING, "routed_experts": Ragged(other)}))
    place = "default/group 0/episode 0/env 0/turn 0: routed_experts[1, 1, 0]"
    assert found.first() == f"{place}: recorded 5, played 4 (2 of 12 positions differ)"


@pytest.mark.parametrize(
    ("num_experts", "dtype"),
    [(8, torch.uint8), (256, torch.uint8), (257, torch.int16), (32768, torch.int16), (32769, torch.int32)],
)
def test_experts_take_the_smallest_dtype(num_experts: int, dtype: torch.dtype) -> None:
    assert expert_dtype(num_experts) is dtype
    assert int(torch.tensor(num_experts - 1).to(dtype)) == num_experts - 1
