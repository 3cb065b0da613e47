"""A training service behind HTTP: its protocol, version 1 (datums in, metrics out), and its client.

::

    GET  /v1/service         -> {"protocol": 1, "next_step": int, "layout": text, "contract": {field: value}}
    POST /v1/steps/N/score   datums -> scores of their response tokens
    POST /v1/steps/N/train   datums -> {"metrics": {name: number}}
    POST /v1/finish          -> {"steps": int}; the service ends

A *datum* is one row: tokens, response mask, recorded log-probabilities, identity and, to train on, an advantage and a
return for each response token, and where rollouts were corrected a weight and whether the token is kept. The datums of
a step are one document: the step file of a recording (``recording.step``), with the ragged extras ``advantages``,
``returns`` and ``weights``, float64 ``[R]`` of each row, and ``kept``, bool. So nothing is unpickled, every tensor has
its digest, and the service trains on the client's very bits.

Scores are a safetensors document of float64 ``[M]`` tensors in the datums' order. ``score`` comes before ``train`` of
the same step, where advantages are made of more than rewards. The ``run_id`` of the first documents names the client;
others are refused from then on.

An error is ``{"error": text}`` with status 400, 404, 411 or 413 (the request cannot be carried out, and nothing
changed), 409 (the request is out of order), 500 (the service ends) or 503 (it has ended). A header that is no HTTP, as
a length without a number, gets status 400 and a plain text. Numbers are JSON in full precision; NaN and
infinities are texts.

Contract of the client: no proxy, no redirect, one request at a time and none repeated, since training is not
idempotent: a request with a lost answer ends the run, and the service names the step that comes next.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import httpx
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.columns import TensorColumn
from mock_scheduler.errors import MockSchedulerError, ServiceError
from mock_scheduler.recording.step.step_file import decode_step, encode_step
from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.tensor_bytes import shape_text
from mock_scheduler.support.text import bullet_list, shorten

PROTOCOL_VERSION = 1

VALUE_NAMES = ("advantages", "returns")

OPTIONAL_VALUE_DTYPES = {"weights": torch.float64, "kept": torch.bool}

#: The largest body of a request.
MAX_REQUEST_BYTES = 1 << 32


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


def take_values(datums: RolloutBatch) -> DatumValues:
    """Take the values out of datums; raises ``ServiceError`` naming every absent or misshapen one."""
    problems = []
    found: dict[str, torch.Tensor] = {}
    for name in (*VALUE_NAMES, *OPTIONAL_VALUE_DTYPES):
        dtype = OPTIONAL_VALUE_DTYPES.get(name, torch.float64)
        column = datums.extras.get(name)
        if column is None and name in OPTIONAL_VALUE_DTYPES:
            continue
        words = str(dtype).removeprefix("torch.")
        if not isinstance(column, TensorColumn) or column.offsets is None:
            problems.append(f"{name} is absent; expected a ragged {words} column with one value per response token")
        elif column.values.dtype is not dtype or not torch.equal(column.offsets, datums.response_offsets):
            problems.append(f"{name} is {shape_text(column.values)}; expected {words}, one value per response token")
        elif not bool(column.values.isfinite().all()):
            problems.append(f"{name} has NaN or infinity")
        else:
            found[name] = column.values
    if problems:
        raise ServiceError(f"these datums cannot be trained on:{bullet_list(problems)}")
    return DatumValues(**found)


def encode_datums(datums: RolloutBatch, *, step: int, run_id: str) -> bytes:
    """Encode the datums of a step as a document."""
    info = StepInfo(step=step, mode="train", scheduler_id="default", run_id=run_id, policy_version=step)
    return encode_step(datums, info).to_bytes()


def decode_datums(body: bytes, *, step: int) -> tuple[RolloutBatch, str]:
    """Decode a document to its datums and ``run_id``; raises ``ServiceError`` for another step, or no document."""
    try:
        datums, info = decode_step(body, source=f"the datums of step {step}")
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
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number and value not in ("nan", "inf", "-inf"):
            raise ServiceError(f"the service's metric {name} is {value!r}, expected a number")
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
    """A service's description of itself."""

    next_step: int
    layout: str
    contract: Mapping[str, JSON]


class TrainingClient:
    """The client of one service. ``url``: as ``http://127.0.0.1:8300``; ``timeout_s``: for one answer."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._run_id = uuid.uuid4().hex
        # trust_env=False: a proxy of the environment is not for a service of this machine. One connection per request:
        # a kept one may be closed by the service just as the next request goes out, and none can be repeated.
        self._http = httpx.Client(timeout=timeout_s, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))

    def service(self) -> ServiceInfo:
        """Ask for the service's description. Raises ``ServiceError`` for no answer, or another protocol."""
        answer = self._json("GET", "/v1/service")
        if answer.get("protocol") != PROTOCOL_VERSION:
            raise ServiceError(
                f"{self._url} speaks protocol {answer.get('protocol')!r}, this client {PROTOCOL_VERSION}: run both "
                "with one release"
            )
        return ServiceInfo(
            next_step=int(answer["next_step"]),
            layout=str(answer["layout"]),
            contract=answer["contract"],
        )

    def check(self, contract: Mapping[str, JSON], *, first_step: int) -> ServiceInfo:
        """Refuse a service that would train another model, by another algorithm, or stands at another step."""
        info = self.service()
        problems = contract_problems(contract, info.contract)
        if info.next_step != first_step:
            problems.append(f"step: this run begins with {first_step}, the service goes on with {info.next_step}")
        if problems:
            raise ServiceError(f"the service at {self._url} is not this run's:{bullet_list(problems)}")
        return info

    def score(self, datums: RolloutBatch, *, step: int, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Let the service's models score the response tokens: float64 ``[M]`` for each name."""
        body = self._request("POST", f"/v1/steps/{step}/score", encode_datums(datums, step=step, run_id=self._run_id))
        return decode_scores(body, names=names, num_tokens=len(datums.rollout_logprobs))

    def train(self, datums: RolloutBatch, *, step: int) -> dict[str, float]:
        """Make all updates of one step on these datums; returns the service's metrics."""
        answer = self._json("POST", f"/v1/steps/{step}/train", encode_datums(datums, step=step, run_id=self._run_id))
        return parse_metrics(answer["metrics"])

    def finish(self) -> int:
        """Tell the service that the run has ended; returns the number of its trained steps."""
        return int(self._json("POST", "/v1/finish")["steps"])

    def _json(self, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        content = self._request(method, path, body)
        try:
            answer = json.loads(content)
        except ValueError as error:
            raise ServiceError(f"{self._url}{path}: the answer is no JSON: {shorten(repr(content), 80)}") from error
        if not isinstance(answer, dict):
            raise ServiceError(f"{self._url}{path}: the answer is no object: {shorten(repr(content), 80)}")
        return answer

    def _request(self, method: str, path: str, body: bytes) -> bytes:
        try:
            answer = self._http.request(method, f"{self._url}{path}", content=body)
        except httpx.RequestError as error:
            is_timeout = isinstance(error, httpx.TimeoutException)
            waited = f" within {self._timeout_s:g} s (training_service.timeout_s)" if is_timeout else ""
            raise ServiceError(
                f"{self._url}{path}: no answer{waited}: {str(error) or type(error).__name__}; is the service still "
                "running? Its run.log or terminal says why it ended"
            ) from error
        if answer.status_code != 200:
            raise ServiceError(f"{self._url}{path}: {_error_text(answer.content)} (status {answer.status_code})")
        return answer.content


def _error_text(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return shorten(repr(content), 200)
