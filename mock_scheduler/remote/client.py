"""The client of a training service; the protocol is in ``protocol``.

Contract: no proxy, no redirect, one request at a time and none repeated, since training is not idempotent: a request
with a lost answer ends the run, and the service names the step that comes next.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import ServiceError
from mock_scheduler.remote.protocol import (
    PROTOCOL_VERSION,
    contract_problems,
    decode_scores,
    encode_datums,
    parse_metrics,
)
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.text import bullet_list, shorten


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
