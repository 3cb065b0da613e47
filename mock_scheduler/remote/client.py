"""The client of a training service; the protocol is in ``protocol``.

Contract: standard library HTTP, no proxy, one request at a time and none repeated, since training is not idempotent: a
request whose answer is lost ends the run, and the service says which step comes next.
"""

from __future__ import annotations

import http.client
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

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
    """What a service says of itself."""

    next_step: int
    layout: str
    contract: Mapping[str, JSON]


class TrainingClient:
    """One service. ``url``: as ``http://127.0.0.1:8300``; ``timeout_s``: of one answer."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._run_id = uuid.uuid4().hex

    def service(self) -> ServiceInfo:
        """Ask the service what it is. Raises ``ServiceError`` where it does not answer, or speaks otherwise."""
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
        """What the service's models say of the response tokens, float64 ``[M]`` for each name."""
        body = self._request("POST", f"/v1/steps/{step}/score", encode_datums(datums, step=step, run_id=self._run_id))
        return decode_scores(body, names=names, num_tokens=len(datums.rollout_logprobs))

    def train(self, datums: RolloutBatch, *, step: int) -> dict[str, float]:
        """All updates of one step on these datums; the metrics of the service."""
        answer = self._json("POST", f"/v1/steps/{step}/train", encode_datums(datums, step=step, run_id=self._run_id))
        return parse_metrics(answer["metrics"])

    def finish(self) -> int:
        """Tell the service that the run has ended; the steps that it trained."""
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
        address = urlsplit(self._url)
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        connection = kind(address.netloc, timeout=self._timeout_s)
        try:
            connection.request(method, f"{address.path}{path}", body=body)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            waited = f" within {self._timeout_s:g} s (training_service.timeout_s)" if _is_timeout(error) else ""
            raise ServiceError(
                f"{self._url}{path}: no answer{waited}: {error or type(error).__name__}; is the service still running? "
                "Its run.log or terminal says why it ended"
            ) from error
        finally:
            connection.close()
        if answer.status != 200:
            raise ServiceError(f"{self._url}{path}: {_error_text(content)} (status {answer.status})")
        return content


def _is_timeout(error: Exception) -> bool:
    return isinstance(error, TimeoutError)


def _error_text(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return shorten(repr(content), 200)
