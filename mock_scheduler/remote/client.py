"""Has the client of a training service.

Contract: one request at a time. A request whose connection fails is repeated, since the service answers the same
request alike and trains a step once. Every wrong answer is a ``ServiceError``.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import ServiceError
from mock_scheduler.remote.exchange import Request, error_text, exchange
from mock_scheduler.remote.protocol import (
    DIGEST_HEADER,
    MEDIA_TYPE,
    PROTOCOL_VERSION,
    RUN_HEADER,
    FinishedRun,
    ServiceInfo,
    TrainedStep,
    contract_problems,
    decode_scores,
    encode_datums,
    parse_metrics,
)
from mock_scheduler.remote.service_file import ServiceAccess
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.documents import Document
from mock_scheduler.support.text import bullet_list, shorten

_MAX_JSON_BYTES = 2**20
_SCORES_HEAD_BYTES = 64 * 2**10

_INFO = Document[ServiceInfo](ServiceInfo)
_TRAINED = Document[TrainedStep](TrainedStep)
_FINISHED = Document[FinishedRun](FinishedRun)
T = TypeVar("T")


class TrainingClient:
    """The client of one run in one service.

    Args:
        access: the service's URL and token.
        timeout_s: for one answer, hence for a whole step.
    """

    def __init__(self, access: ServiceAccess, *, timeout_s: float) -> None:
        self._access = access
        self._timeout_s = timeout_s
        self._run_id = uuid.uuid4().hex

    def service(self) -> ServiceInfo:
        """Ask for the service's description. Raises ``ServiceError`` for no answer, or another protocol."""
        path = "/v1/service"
        content = self._ask_json("GET", path)
        if content.get("protocol") != PROTOCOL_VERSION:
            found = shorten(ascii(content.get("protocol")), 80)
            raise ServiceError(
                f"{self._access.url} speaks protocol {found}, this client {PROTOCOL_VERSION}: run both with one release"
            )
        return self._read(_INFO, content, path)

    def check(self, contract: Mapping[str, JSON], *, first_step: int) -> ServiceInfo:
        """Refuse a service that would train another model, by another algorithm, or stands at another step."""
        info = self.service()
        problems = contract_problems(contract, info.contract)
        if info.next_step != first_step:
            problems.append(f"step: this run begins with {first_step}, the service goes on with {info.next_step}")
        if problems:
            raise ServiceError(f"the service at {self._access.url} is not this run's:{bullet_list(problems)}")
        return info

    def score(self, datums: RolloutBatch, *, step: int, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Let the service's models score the response tokens: float64 ``[M]`` for each name."""
        num_tokens = len(datums.rollout_logprobs)
        max_bytes = _SCORES_HEAD_BYTES + len(names) * num_tokens * torch.float64.itemsize
        body = encode_datums(datums, step=step, run_id=self._run_id)
        answer = self._ask("POST", f"/v1/steps/{step}/score", body, max_answer_bytes=max_bytes)
        return decode_scores(answer or b"", names=names, num_tokens=num_tokens)

    def train(self, datums: RolloutBatch, *, step: int) -> dict[str, float]:
        """Make all updates of one step on these datums; returns the service's metrics."""
        path = f"/v1/steps/{step}/train"
        content = self._ask_json("POST", path, encode_datums(datums, step=step, run_id=self._run_id))
        trained = self._read(_TRAINED, content, path)
        if trained.step != step:
            raise ServiceError(f"{self._access.url}{path}: the answer is that of step {trained.step}")
        return parse_metrics(trained.metrics)

    def finish(self) -> int | None:
        """Tell the service that the run has ended.

        Returns the number of its trained steps; ``None`` where the service ended and its answer was lost.
        """
        path = "/v1/finish"
        answer = self._ask("POST", path, max_answer_bytes=_MAX_JSON_BYTES, ends_service=True)
        return None if answer is None else self._read(_FINISHED, self._parse(answer, path), path).steps

    def _ask_json(self, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        answer = self._ask(method, path, body, max_answer_bytes=_MAX_JSON_BYTES)
        return self._parse(answer or b"", path)

    def _parse(self, content: bytes, path: str) -> dict[str, Any]:
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError) as error:
            found = shorten(repr(content), 80)
            raise ServiceError(f"{self._access.url}{path}: the answer is no JSON: {found}") from error
        if not isinstance(answer, dict):
            raise ServiceError(f"{self._access.url}{path}: the answer is no object: {shorten(repr(content), 80)}")
        return answer

    def _read(self, document: Document[T], content: dict[str, Any], path: str) -> T:
        try:
            return document.load(content)
        except (ValueError, RecursionError) as error:
            raise ServiceError(f"{self._access.url}{path}: the answer cannot be read: {error}") from error

    def _ask(
        self, method: str, path: str, body: bytes = b"", *, max_answer_bytes: int, ends_service: bool = False
    ) -> bytes | None:
        headers = {RUN_HEADER: self._run_id}
        if method == "POST":
            headers |= {"Content-Type": MEDIA_TYPE, DIGEST_HEADER: hashlib.sha256(body).hexdigest()}
        request = Request(
            method=method,
            path=path,
            headers=headers,
            body=body,
            max_answer_bytes=max_answer_bytes,
            ends_service=ends_service,
        )
        answer = exchange(self._access, request, timeout_s=self._timeout_s)
        if answer is None:
            return None
        if answer.status == 401:
            raise ServiceError(
                f"{self._access.url}{path}: the service refuses the token of {self._access.source} (status 401): it is "
                "that of another service, or of one that has ended"
            )
        if answer.status != 200:
            raise ServiceError(f"{self._access.url}{path}: {error_text(answer.body)} (status {answer.status})")
        return answer.body
