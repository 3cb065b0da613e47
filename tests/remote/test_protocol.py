"""The training service's protocol: documents come back bit for bit, and everything else is refused with its reason."""

from __future__ import annotations

import json

import pytest
import torch

from mock_scheduler.batch.columns import TensorColumn
from mock_scheduler.errors import ServiceError
from mock_scheduler.remote.protocol import (
    contract_problems,
    decode_datums,
    decode_scores,
    encode_datums,
    encode_scores,
    metrics_as_json,
    parse_metrics,
    take_values,
    with_values,
)
from tests.batches import make_batch
from tests.remote.forged_datums import with_dtype

BATCH = make_batch(2, 2)
NUM_TOKENS = len(BATCH.rollout_logprobs)
ADVANTAGES = torch.linspace(-1.0, 1.0, NUM_TOKENS, dtype=torch.float64)
RETURNS = torch.arange(NUM_TOKENS, dtype=torch.float64) / 3.0


def test_datums_come_back_bit_for_bit() -> None:
    body = encode_datums(with_values(BATCH, ADVANTAGES, RETURNS), step=3, run_id="r")
    datums, run_id = decode_datums(body, step=3)
    assert run_id == "r"
    assert torch.equal(take_values(datums).advantages, ADVANTAGES)
    assert torch.equal(take_values(datums).returns, RETURNS)
    assert torch.equal(datums.tokens, BATCH.tokens)
    assert torch.equal(datums.rollout_logprobs, BATCH.rollout_logprobs)
    assert datums.identities == BATCH.identities


def test_datums_without_values_say_what_is_missing() -> None:
    with pytest.raises(ServiceError) as caught:
        take_values(BATCH)
    assert str(caught.value) == (
        "these datums cannot be trained on:\n"
        "  - advantages is absent; expected a ragged float64 column with one value per response token\n"
        "  - returns is absent; expected a ragged float64 column with one value per response token"
    )


@pytest.mark.parametrize(
    ("value", "shown", "dtype"),
    [
        (torch.nan, "nan", torch.float64),
        (-torch.inf, "-inf", torch.float32),
        (1e308, "1e\\+308", torch.float32),  # finite as it is sent, and infinite as it is trained with
        (1e30, "1e\\+30", torch.float32),  # its square, of which a gradient's norm is made, is infinite
        (1e200, "1e\\+200", torch.float64),
    ],
)
@pytest.mark.parametrize("column", ["advantages", "returns", "weights"])
def test_a_value_that_training_cannot_use_is_refused_by_column_and_row(
    column: str, value: float, shown: str, dtype: torch.dtype
) -> None:
    """Advantages of 1e308 were accepted, and made every weight NaN."""
    broken = {"advantages": ADVANTAGES.clone(), "returns": RETURNS.clone(), "weights": torch.ones_like(RETURNS)}
    position = int(BATCH.response_offsets[2])  # the first response token of row 2
    broken[column][position] = value
    with pytest.raises(
        ServiceError, match=f"{column}: row 2 \\(.*\\) has {shown}; expected numbers with a finite square"
    ):
        take_values(with_values(BATCH, broken["advantages"], broken["returns"], weights=broken["weights"]), dtype=dtype)


def test_values_that_training_can_use_are_taken_as_they_are() -> None:
    large = torch.full_like(ADVANTAGES, 1e18)
    assert torch.equal(take_values(with_values(BATCH, large, RETURNS), dtype=torch.float32).advantages, large)
    assert torch.equal(take_values(with_values(BATCH, large**8, RETURNS)).advantages, large**8)


@pytest.mark.parametrize("dtype", ["qint8", "quint8", "qint32", "quint4x2", "quint2x4", "bits8"])
def test_datums_of_a_dtype_without_plain_bytes_are_refused(dtype: str) -> None:
    """torch ended the process by SIGSEGV where it read a matrix of one."""
    body = with_dtype(BATCH, dtype)
    with pytest.raises(ServiceError, match=f"'extras/own' is of dtype '{dtype}', which torch"):
        decode_datums(body, step=0)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "float8_e4m3fn"])
def test_datums_of_plain_bytes_are_read(dtype: str) -> None:
    datums, _ = decode_datums(with_dtype(BATCH, dtype), step=0)
    column = datums.extras["own"]
    assert isinstance(column, TensorColumn)
    assert column.values.dtype is getattr(torch, dtype)


def test_datums_of_another_step_are_refused() -> None:
    with pytest.raises(ServiceError, match="these are the datums of step 3, sent as those of step 4"):
        decode_datums(encode_datums(BATCH, step=3, run_id="r"), step=4)


@pytest.mark.parametrize("position", [10, -5])
def test_a_changed_byte_is_refused(position: int) -> None:
    body = bytearray(encode_datums(BATCH, step=0, run_id="r"))
    body[position] ^= 1
    with pytest.raises(ServiceError, match="the datums of step 0"):
        decode_datums(bytes(body), step=0)


def test_scores_come_back_and_others_are_refused() -> None:
    body = encode_scores({"values": RETURNS})
    assert torch.equal(decode_scores(body, names=("values",), num_tokens=NUM_TOKENS)["values"], RETURNS)
    with pytest.raises(ServiceError, match="the service answered with scores"):
        decode_scores(body, names=("values",), num_tokens=NUM_TOKENS + 1)
    with pytest.raises(ServiceError, match="cannot be read"):
        decode_scores(b"nothing", names=("values",), num_tokens=NUM_TOKENS)


def test_metrics_keep_every_bit_and_what_json_lacks() -> None:
    metrics = {"a": 1 / 3, "b": float("inf"), "c": float("-inf"), "d": -0.0}
    assert parse_metrics(json.loads(json.dumps(metrics_as_json(metrics), allow_nan=False))) == metrics
    assert str(parse_metrics({"n": "nan"})["n"]) == "nan"


@pytest.mark.parametrize("value", ["much", True, None, [1.0], {}, 10**400, 1e999, float("nan"), "NaN"])
def test_a_metric_that_is_no_number_is_refused_by_name(value: object) -> None:
    """A truth value was taken for 1, and an integer of 400 digits was a traceback."""
    with pytest.raises(ServiceError, match=r"the service's metric 'm' is .*, expected a number"):
        parse_metrics({"a": 1, "m": value})


def test_every_differing_field_of_a_contract_is_named_with_both_values() -> None:
    assert contract_problems({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 3, "d": 4}) == [
        "b: 2 here, 3 in the service",
        "c: 3 here, 'absent' in the service",
        "d: 'absent' here, 4 in the service",
    ]
