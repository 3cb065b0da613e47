"""A training service refuses datums before any rank acts on them, and a step that spoilt its model after it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import MockSchedulerError, ServiceError
from mock_scheduler.remote.protocol import encode_datums, with_values
from pipelines.config.schema import PipelineConfig
from pipelines.service.order import Operation, OutOfOrderError, StepRequest
from pipelines.service.service import TrainingService, unsound_metrics
from tests.batches import make_batch
from tests.pipelines.service.clients import RUN
from tests.remote.forged_datums import change_tensor, seal, unseal, with_dtype

BATCH = make_batch(2, 2)
VALUES = BATCH.rollout_logprobs.double()
DATUMS = with_values(BATCH, VALUES, VALUES, weights=torch.ones_like(VALUES))


def service(*, precision: str = "float32") -> TrainingService:
    """A service without a model, for what it checks."""
    config = PipelineConfig.model_construct(rollout_batch_size=4, sequence_length=8, precision=precision)
    made = TrainingService.__new__(TrainingService)
    made.config = config
    made._vocab_size = 1000
    made._scored = None
    made._dtype = torch.float64 if precision == "float64" else torch.float32
    return made


def check(body: bytes, *, operation: Operation = "train", precision: str = "float32") -> None:
    request = StepRequest(operation=operation, step=0, run_id=RUN, digest="")
    service(precision=precision).check(request, body)


def encoded(datums: RolloutBatch, *, run_id: str = RUN) -> bytes:
    return encode_datums(datums, step=0, run_id=run_id)


def test_honest_datums_are_accepted() -> None:
    check(encoded(DATUMS))
    check(encoded(BATCH), operation="score")


@pytest.mark.parametrize("operation", ["score", "train"])
@pytest.mark.parametrize("dtype", ["qint8", "quint8", "qint32"])
def test_a_quantised_column_does_not_end_the_service(operation: Operation, dtype: str) -> None:
    """One request ended it by SIGSEGV, and left its file."""
    with pytest.raises(ServiceError, match=f"'extras/own' is of dtype '{dtype}', which torch"):
        check(with_dtype(DATUMS, dtype, run_id=RUN), operation=operation)


@pytest.mark.parametrize("column", ["advantages", "returns", "weights"])
@pytest.mark.parametrize("value", [1e308, 3e38, float("nan"), float("inf"), -1e20])
def test_a_number_that_spoils_the_model_is_refused_by_column_and_row(column: str, value: float) -> None:
    values: dict[str, torch.Tensor] = {name: torch.ones_like(VALUES) for name in ("advantages", "returns", "weights")}
    values[column][-1] = value
    datums = with_values(BATCH, values["advantages"], values["returns"], weights=values["weights"])
    with pytest.raises(ServiceError, match=rf"{column}: row 3 \(default/group 1/.*\) has .*; expected numbers with a"):
        check(encoded(datums))


@pytest.mark.parametrize("operation", ["score", "train"])
@pytest.mark.parametrize(
    ("tensor", "value", "problem"),
    [
        ("rollout_logprobs", float("nan"), r"group 1/.*: rollout_logprobs is not finite: \[nan\]"),
        ("rollout_logprobs", float("-inf"), r"group 1/.*: rollout_logprobs is not finite: \[-inf\]"),
        ("rollout_logprobs", -3e38, r"rollout_logprobs: row 3 \(default/group 1/.*\) has -[23]\.\d+e\+38; expected"),
        ("turn_rewards", float("nan"), r"group 1/.*: turn_rewards is not finite: \[nan\]"),
        ("rewards", float("inf"), r"group 1/.*: reward is not finite: inf"),
    ],
)
def test_what_was_recorded_must_be_numbers_too(operation: Operation, tensor: str, value: float, problem: str) -> None:
    changed = with_values(make_batch(2, 2), VALUES, VALUES)
    getattr(changed, tensor)[-1] = value
    with pytest.raises(ServiceError, match=problem):
        check(encoded(changed), operation=operation)


def test_numbers_are_judged_by_the_precision_that_they_are_trained_in() -> None:
    datums = with_values(BATCH, torch.full_like(VALUES, 1e100), VALUES)
    check(encoded(datums), precision="float64")
    with pytest.raises(ServiceError, match="finite square in float32"):
        check(encoded(datums), precision="bf16")


def test_datums_are_of_the_run_that_the_request_names() -> None:
    with pytest.raises(OutOfOrderError, match="of another run than the request"):
        check(encoded(DATUMS, run_id="b" * 32))


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"total_loss": 0.5, "grad_norm": 1.0, "ratio": float("nan")}, []),
        ({"total_loss": float("nan"), "grad_norm": float("inf")}, ["grad_norm is inf", "total_loss is nan"]),
        ({"critic/grad_norm": float("nan"), "critic/loss": 0.5}, ["critic/grad_norm is nan"]),
    ],
)
def test_losses_and_norms_must_be_finite(metrics: dict[str, float], expected: list[str]) -> None:
    assert unsound_metrics(metrics) == expected


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
def test_a_model_with_a_weight_that_is_not_finite_is_not_gone_on_with(
    monkeypatch: pytest.MonkeyPatch, spoilt: float
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    parts = [SimpleNamespace(parameter=torch.nn.Parameter(torch.ones(2))) for _ in range(2)]
    made: Any = service()
    made.runtime = SimpleNamespace(device=torch.device("cpu"))
    made._learner = SimpleNamespace(models={"policy": SimpleNamespace(parameters=lambda: iter(parts))})
    made._check_result(0, {"total_loss": 0.5})
    with pytest.raises(ServiceError, match="step 0 was trained, and its model cannot be used: grad_norm is nan"):
        made._check_result(0, {"grad_norm": float("nan")})
    parts[1].parameter.data[0] = spoilt
    with pytest.raises(ServiceError, match="its model cannot be used: a weight is not finite"):
        made._check_result(0, {"total_loss": 0.5})


@pytest.mark.parametrize("count", [150, pytest.param(3000, marks=pytest.mark.all)])
def test_a_changed_body_is_refused_and_harms_nothing(count: int) -> None:
    """Content, table and tensors are changed, and the digests made right again."""
    body = encoded(DATUMS)
    outcomes = {"accepted": 0, "refused": 0}
    for seed in range(count):
        changed = _change(body, random.Random(seed))
        try:
            check(changed, operation="train" if seed % 2 else "score")
            outcomes["accepted"] += 1
        except MockSchedulerError:
            outcomes["refused"] += 1
    assert outcomes["accepted"] + outcomes["refused"] == count
    assert outcomes["refused"] > count // 2


_ODD: tuple[Any, ...] = (None, -1, 0, 2**31, 2**63, 2**70, 1.5, "", "x", "\x1b[2J", [], [[]], {}, {"a": 1}, True)
_DTYPES = ("qint8", "quint8", "qint32", "bool", "int64", "float64", "complex128", "bits8", "uint8", "nothing")


def _change(body: bytes, chance: random.Random) -> bytes:
    content, table, tensors = unseal(body)
    kind = chance.randrange(7)
    if kind == 0:  # bytes of the file, digests left
        position = chance.randrange(len(body))
        return body[:position] + bytes([chance.randrange(256)]) + body[position + 1 :] + b"x" * chance.randrange(2)
    if kind == 1:
        return body[: chance.randrange(len(body))]
    if kind == 2:
        _change_value(content, chance)
    elif kind > 4:
        tensors = change_tensor(table, tensors, chance.choice(sorted(table)), chance)
    else:
        entry = table[chance.choice(sorted(table))]
        key = chance.choice(["dtype", "shape", "blocks"])
        entry[key] = chance.choice(_DTYPES if key == "dtype" else _ODD)
    try:
        return seal(content, table, tensors)
    except Exception:  # noqa: BLE001  # a change that no sealed file can have
        return body[:-1]


def _change_value(content: Any, chance: random.Random) -> None:
    while True:
        key = chance.choice(list(content) if isinstance(content, dict) else range(len(content)))
        inner = content[key]
        if not isinstance(inner, dict | list) or not inner or chance.random() < 0.3:
            content[key] = chance.choice(_ODD)
            return
        content = inner
