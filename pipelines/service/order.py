"""The order of a client's requests: a step is scored and trained once, one after another, for one run.

Contract: headers decide, before any body is read. A request that was answered is answered the same again, since a
client may have lost the answer. Any thread may call.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from mock_scheduler.errors import ServiceError

Operation = Literal["score", "train"]
T = TypeVar("T")


class OutOfOrderError(ServiceError):
    """A request out of order: another step, another client, or scoring left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRequest:
    """What makes a request itself: equal ones are one request, sent twice. ``digest``: SHA-256 of its body, as hex."""

    operation: Operation
    step: int
    run_id: str
    digest: str


class StepOrder(Generic[T]):
    """Knows a run's place among its steps, and the last answers, of type ``T``.

    Args:
        max_steps: the number of the run's steps.
        score_names: the scores that a step must have before it is trained; empty where it needs none.
    """

    def __init__(self, *, max_steps: int, score_names: tuple[str, ...] = ()) -> None:
        self._max_steps = max_steps
        self._score_names = score_names
        self._lock = threading.Lock()
        self._next_step = 0
        self._run_id: str | None = None
        self._answers: dict[Operation, tuple[StepRequest, T]] = {}

    def admit(self, request: StepRequest) -> T | None:
        """Return the answer that a request has had already, or ``None`` where it may be carried out now.

        Raises ``OutOfOrderError`` for any other.
        """
        with self._lock:
            self._check_run(request.run_id)
            answered, answer = self._answers.get(request.operation, (None, None))
            if answered == request:
                return answer
            self._check_step(request)
            return None

    def record(self, request: StepRequest, answer: T) -> None:
        """Keep the answer of a request that was carried out; the run goes on from there."""
        with self._lock:
            self._run_id = request.run_id
            if request.operation == "train":
                self._next_step = request.step + 1
                self._answers.clear()
            self._answers[request.operation] = (request, answer)

    def check_run(self, run_id: str) -> None:
        """Raise ``OutOfOrderError`` where another run is trained here."""
        with self._lock:
            self._check_run(run_id)

    def _check_run(self, run_id: str) -> None:
        if self._run_id not in (None, run_id):
            raise OutOfOrderError("another client's run is being trained here; start a service of your own")

    def _check_step(self, request: StepRequest) -> None:
        step = request.step
        if step >= self._max_steps:
            raise OutOfOrderError(f"step {step} was sent, and max_steps is {self._max_steps}")
        if step != self._next_step:
            raise OutOfOrderError(f"step {step} was sent, and step {self._next_step} comes next")
        is_scored = "score" in self._answers
        if request.operation == "score" and is_scored:
            raise OutOfOrderError(f"step {step} was scored already, with other datums")
        if request.operation == "train" and self._score_names and not is_scored:
            raise OutOfOrderError(f"step {step} must be scored first, for {', '.join(self._score_names)}")
