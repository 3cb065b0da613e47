"""The order of a client's requests, decided by their headers alone."""

from __future__ import annotations

import pytest

from pipelines.service.order import Operation, OutOfOrderError, StepOrder, StepRequest


def request(operation: Operation, step: int, *, run_id: str = "a", digest: str = "d") -> StepRequest:
    return StepRequest(operation=operation, step=step, run_id=run_id, digest=digest)


def test_steps_come_one_after_another_and_each_answer_again_until_the_next() -> None:
    order: StepOrder[str] = StepOrder(max_steps=2, score_names=("values",))
    for step in range(2):
        for operation in ("score", "train"):
            assert order.admit(request(operation, step)) is None
            order.record(request(operation, step), f"{operation} {step}")
            assert order.admit(request(operation, step)) == f"{operation} {step}"
    for late in (request("score", 1), request("train", 0), request("score", 0)):
        with pytest.raises(OutOfOrderError):
            order.admit(late)


@pytest.mark.parametrize(
    ("done", "next_request", "problem"),
    [
        ([], request("train", 0), "step 0 must be scored first, for values"),
        ([], request("score", 1), "step 1 was sent, and step 0 comes next"),
        ([], request("score", 9), "step 9 was sent, and max_steps is 2"),
        ([request("score", 0)], request("score", 0, digest="e"), "step 0 was scored already, with other datums"),
        ([request("score", 0)], request("train", 0, run_id="b"), "another client's run is being trained here"),
        ([request("score", 0), request("train", 0)], request("train", 0, digest="e"), "and step 1 comes next"),
        ([request("score", 0), request("train", 0)], request("train", 1), "step 1 must be scored first, for values"),
    ],
)
def test_any_other_request_is_out_of_order(done: list[StepRequest], next_request: StepRequest, problem: str) -> None:
    order: StepOrder[str] = StepOrder(max_steps=2, score_names=("values",))
    for each in done:
        order.record(each, "answer")
    with pytest.raises(OutOfOrderError, match=problem):
        order.admit(next_request)


def test_without_scores_a_step_is_trained_at_once_or_scored_before() -> None:
    order: StepOrder[str] = StepOrder(max_steps=2)
    assert order.admit(request("train", 0)) is None
    order.record(request("score", 0), "scores")
    assert order.admit(request("train", 0)) is None


def test_a_refused_request_names_no_run() -> None:
    order: StepOrder[str] = StepOrder(max_steps=2)
    assert order.admit(request("train", 0, run_id="b")) is None  # admitted, and then refused for its datums
    order.check_run("a")
    order.record(request("train", 0, run_id="a"), "answer")
    with pytest.raises(OutOfOrderError, match="another client's run"):
        order.check_run("b")
