"""Defines the protocol of a training service behind HTTP, version 2: datums in, metrics out.

::

    GET  /v1/service         -> {"protocol": 2, "next_step": int, "layout": text, "contract": {field: value}}
    POST /v1/steps/N/score   datums -> scores of their response tokens
    POST /v1/steps/N/train   datums -> {"step": N, "metrics": {name: number}}
    POST /v1/finish          -> {"steps": int}; the service ends

Every request has ``Authorization: Bearer TOKEN``; every POST also ``Content-Type: application/octet-stream``, a
``Content-Length`` and the header ``Run-Id``, and one with datums the header ``Content-SHA256`` over its body. So a
service knows from the headers alone whether it wants the body.

A *datum* is one row: tokens, response mask, recorded log-probabilities, identity and, to train on, an advantage and a
return for each response token, and where rollouts were corrected a weight and whether the token is kept. The datums of
a step are one document: the step file of a recording (``recording.step``), with the ragged extras ``advantages``,
``returns`` and ``weights``, float64 ``[R]`` of each row, and ``kept``, bool. So nothing is unpickled, every tensor has
its digest, and the service trains on the client's very bits.

Scores are a safetensors document of float64 ``[M]`` tensors in the datums' order. ``score`` comes before ``train`` of
the same step, where advantages are made of more than rewards. The ``run_id`` of the first accepted datums names the
client; others are refused from then on.

A request may be repeated: a step is trained once, and the same request again gets the same answer. An error is
``{"error": text}``; ``docs/remote.md`` lists the statuses. Numbers are JSON in full precision; NaN and infinities are
texts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from pydantic import StringConstraints
from safetensors import SafetensorError
from safetensors.torch import load, save

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.columns import TensorColumn
from mock_scheduler.errors import MockSchedulerError, ServiceError
from mock_scheduler.recording.step.step_file import decode_step, encode_step
from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.documents import Count
from mock_scheduler.support.tensor_bytes import dtype_name, shape_text
from mock_scheduler.support.text import bullet_list, list_some, shorten

PROTOCOL_VERSION = 2

MEDIA_TYPE = "application/octet-stream"
RUN_HEADER = "Run-Id"
DIGEST_HEADER = "Content-SHA256"

VALUE_NAMES = ("advantages", "returns")

OPTIONAL_VALUE_DTYPES = {"weights": torch.float64, "kept": torch.bool}

_MAX_ROWS_NAMED = 3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DatumValues:
    """Values to train datums with, ``[M]``: float64, and ``kept`` bool; ``None`` where rollouts were not corrected."""

    advantages: torch.Tensor
    returns: torch.Tensor
    weights: torch.Tensor | None = None
    kept: torch.Tensor | None = None


def with_values(
    batch: RolloutBatch,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> RolloutBatch:
    """Make the datums of a batch: its rows with values for each response token.

    Args:
        batch: the rows, with ``M`` response tokens.
        advantages, returns: floating ``[M]``.
        weights, kept: floating and bool ``[M]``, of corrected rollouts; ``None`` for others.
    """
    offsets = batch.response_offsets
    values = {"advantages": advantages.double(), "returns": returns.double()}
    values |= {} if weights is None else {"weights": weights.double()}
    values |= {} if kept is None else {"kept": kept.bool()}
    columns = {name: TensorColumn(values=tensor.detach().cpu(), offsets=offsets) for name, tensor in values.items()}
    return replace(batch, extras={**batch.extras, **columns})


def take_values(datums: RolloutBatch, *, dtype: torch.dtype = torch.float64) -> DatumValues:
    """Take the values out of datums; training computes with them in ``dtype``.

    Raises ``ServiceError`` naming every absent, misshapen or unusable column.
    """
    problems = []
    found: dict[str, torch.Tensor] = {}
    for name in (*VALUE_NAMES, *OPTIONAL_VALUE_DTYPES):
        stored = OPTIONAL_VALUE_DTYPES.get(name, torch.float64)
        column = datums.extras.get(name)
        if column is None and name in OPTIONAL_VALUE_DTYPES:
            continue
        words = dtype_name(stored)
        if not isinstance(column, TensorColumn) or column.offsets is None:
            problems.append(f"{name} is absent; expected a ragged {words} column with one value per response token")
        elif column.values.dtype is not stored or not torch.equal(column.offsets, datums.response_offsets):
            problems.append(f"{name} is {shape_text(column.values)}; expected {words}, one value per response token")
        else:
            problems += number_problems(name, column.values, datums, dtype=dtype)
            found[name] = column.values
    if problems:
        raise ServiceError(f"these datums cannot be trained on:{bullet_list(problems)}")
    return DatumValues(**found)


def number_problems(name: str, values: torch.Tensor, datums: RolloutBatch, *, dtype: torch.dtype) -> list[str]:
    """Name the rows with a number that training in ``dtype`` cannot compute with.

    A gradient's norm squares what a loss is multiplied with, so the square must be finite too.

    Args:
        name: the column's.
        values: ``[M]``, one value per response token of the datums.
        datums: the rows.
        dtype: floating; the values are converted to it before they are used.
    """
    is_usable = values.to(dtype).square().isfinite() if values.is_floating_point() else torch.ones_like(values).bool()
    if bool(is_usable.all()):
        return []
    positions = (~is_usable).nonzero().flatten()
    rows = (torch.searchsorted(datums.response_offsets, positions, right=True) - 1).tolist()
    first = dict(zip(reversed(rows), reversed(values[positions].tolist()), strict=True))
    named = [f"row {row} ({datums.identities[row]}) has {first[row]}" for row in sorted(first)]
    return [
        f"{name}: {list_some(named, _MAX_ROWS_NAMED)}; expected numbers with a finite square in {dtype_name(dtype)}"
    ]


def encode_datums(datums: RolloutBatch, *, step: int, run_id: str) -> bytes:
    """Encode the datums of a step as a document."""
    info = StepInfo(step=step, mode="train", scheduler_id="default", run_id=run_id, policy_version=step)
    return encode_step(datums, info).to_bytes()


def decode_datums(body: bytes, *, step: int) -> tuple[RolloutBatch, str]:
    """Decode a document to its datums and ``run_id``; raises ``ServiceError`` for another step, or no document."""
    source = f"the datums of step {step}"
    try:
        datums, info = decode_step(body, source=source)
    except MockSchedulerError as error:
        raise ServiceError(str(error)) from error
    if info.step != step:
        raise ServiceError(f"these are the datums of step {info.step}, sent as those of step {step}")
    return datums, info.run_id


def encode_scores(scores: Mapping[str, torch.Tensor]) -> bytes:
    """Encode scores, ``[M]`` by name, as a document of float64 tensors."""
    return save({name: values.detach().cpu().double().contiguous() for name, values in scores.items()})


def decode_scores(body: bytes, *, names: tuple[str, ...], num_tokens: int) -> dict[str, torch.Tensor]:
    """Decode scores; raises ``ServiceError`` unless they are ``names``, float64 ``[num_tokens]`` each."""
    try:
        scores = load(body)
    except SafetensorError as error:
        raise ServiceError(f"the service's scores cannot be read: {error}") from error
    found = {name: shape_text(values) for name, values in scores.items()}
    expected = {name: shape_text(torch.empty(num_tokens, dtype=torch.float64)) for name in names}
    if found != expected:
        raise ServiceError(f"the service answered with scores {found}; expected {expected}")
    return scores


def metrics_as_json(metrics: Mapping[str, float]) -> dict[str, JSON]:
    """Make metrics JSON: NaN and infinities become texts."""
    return {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}


def parse_metrics(content: Mapping[str, Any]) -> dict[str, float]:
    """Invert ``metrics_as_json``; raises ``ServiceError`` for a value that is no number."""
    metrics = {}
    for name, value in content.items():
        is_number = type(value) in (int, float) and abs(value) <= sys.float_info.max
        if not is_number and value not in ("nan", "inf", "-inf"):
            found = f"{shorten(ascii(name), 80)} is {shorten(ascii(value), 80)}"
            raise ServiceError(f"the service's metric {found}, expected a number")
        metrics[name] = float(value)
    return metrics


def contract_problems(client: Mapping[str, JSON], service: Mapping[str, JSON]) -> list[str]:
    """List every field that differs between the two configurations, with both values."""
    absent = "absent"
    return [
        f"{name}: {client.get(name, absent)!r} here, {service.get(name, absent)!r} in the service"
        for name in sorted(client.keys() | service.keys())
        if client.get(name, absent) != service.get(name, absent)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceInfo:
    """Holds the answer to ``GET /v1/service``: a service's description of itself."""

    next_step: Count
    layout: Annotated[str, StringConstraints(max_length=200, pattern=r"^[ -~]*$")]
    contract: Mapping[str, JSON]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedStep:
    """Holds the answer to ``POST /v1/steps/N/train``."""

    step: Count
    metrics: Mapping[str, JSON]


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRun:
    """Holds the answer to ``POST /v1/finish``. steps: the number of trained ones."""

    steps: Count
