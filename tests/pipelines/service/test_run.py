"""The loop of a training service: how long it waits, its files, and its end."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from mock_scheduler.errors import ConfigError, ServiceError
from mock_scheduler.support.run_output import MetricsWriter
from pipelines.config.schema import PipelineConfig
from pipelines.service import run as serving
from pipelines.service.http_app import Answer, Call
from pipelines.service.http_front import Front
from pipelines.service.order import Operation, StepOrder, StepRequest
from pipelines.service.service import TrainingService
from tests.pipelines.service.clients import RUN


@pytest.mark.parametrize("name", ["service_metrics.jsonl", "service.json"])
def test_a_folder_of_another_service_is_refused(tmp_path: Path, name: str) -> None:
    """Its metrics were overwritten."""
    (tmp_path / name).touch()
    config = PipelineConfig(exp_name="x", output_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="holds the metrics of another service"), serving._open_front(config):
        pass
    assert (tmp_path / name).exists()


def _config(folder: Path, **service: object) -> PipelineConfig:
    return PipelineConfig.model_validate({"exp_name": "x", "output_dir": str(folder), "training_service": service})


def test_an_address_that_others_reach_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), serving._open_front(_config(tmp_path / "own")) as front:
        assert front.address == "127.0.0.1"
    assert caplog.messages == []
    other = "127.0.0.2"  # for the test, of others too
    with (
        caplog.at_level(logging.WARNING),
        pytest.MonkeyPatch.context() as patch,
        serving._open_front(_config(tmp_path / "one", host=other)),
    ):
        pass
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING), pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "is_loopback", lambda address: address != other)
        with serving._open_front(_config(tmp_path / "two", host=other)) as front:
            assert front.url.startswith("http://127.0.0.2:")
    (message,) = caplog.messages
    assert "which other machines reach: nothing that it receives or answers is encrypted" in message
    assert front.token not in message


def test_the_limit_of_a_body_follows_from_the_configuration() -> None:
    config = PipelineConfig(exp_name="x", rollout_batch_size=128, sequence_length=256)
    assert config.max_request_bytes == 16 * 2**20 + 128 * (4096 + 64 * 256)
    by_turn = PipelineConfig(exp_name="x", rollout_batch_size=128, sequence_length=256, rollout_form="step")
    turns = max(env.max_steps for env in by_turn.custom_envs.values())
    assert by_turn.max_request_bytes == 16 * 2**20 + turns * 128 * (4096 + 64 * 256)
    own = config.training_service.model_copy(update={"max_request_bytes": 7})
    assert config.model_copy(update={"training_service": own}).max_request_bytes == 7


class _Clock:
    """Stands for ``time`` in the loop: it goes on where the loop waits, or where a call says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.sent: list[tuple[str, float]] = []
        monkeypatch.setattr(serving.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(serving, "send", lambda command, device: self.sent.append((command.operation, self.now_s)))

    def calls(self, next_call: Callable[[], tuple[float, Call | None]]) -> queue.Queue[Call]:
        """A queue whose next call comes after some seconds, or not."""

        def get(timeout: float) -> Call:
            after_s, call = next_call()
            if call is None or after_s > timeout:
                self.now_s += timeout
                raise queue.Empty
            self.now_s += after_s
            return call

        return cast("queue.Queue[Call]", SimpleNamespace(get=get))


def _call(operation: Operation, step: int) -> Call:
    request = StepRequest(operation=operation, step=step, run_id=RUN, digest="0" * 64)
    return Call(operation=operation, request=request, body=b"datums")


def _answer_all(
    tmp_path: Path, calls: queue.Queue[Call], *, train: Callable[[int, bytes], dict[str, float]], **more: object
) -> None:
    config = _config(tmp_path, timeout_s=50.0)
    service = SimpleNamespace(
        config=config,
        runtime=SimpleNamespace(device=torch.device("cpu")),
        next_step=1,
        check=lambda request, body: None,
        describe=dict,
        train=train,
    )
    for name, value in more.items():
        setattr(service, name, value)
    order: StepOrder[Answer] = StepOrder(max_steps=3)
    front = Front(url="", token="", address="", calls=calls, order=order)
    with MetricsWriter(tmp_path, enabled=True, tensorboard=False) as writer:
        serving._answer_all(cast(TrainingService, service), front, writer)


def test_the_time_that_a_step_takes_does_not_count_as_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step of more than ``timeout_s``, the service ended at its next heartbeat, while its client rolled out."""
    clock = _Clock(monkeypatch)
    coming = [_call("train", 0)]

    def train(step: int, body: bytes) -> dict[str, float]:
        clock.now_s += 1000.0
        return {"loss": 0.5}

    calls = clock.calls(lambda: (0.0, coming.pop() if coming else None))
    with pytest.raises(
        ServiceError, match=r"no request came for 50 s \(training_service\.timeout_s\); 1 steps were trained"
    ):
        _answer_all(tmp_path, calls, train=train)
    # Two heartbeats, at 20 and 40 s, and the end at 60 s.
    assert clock.sent == [("train", 0.0), ("idle", 1020.0), ("idle", 1040.0), ("stop", 1060.0)]


@pytest.mark.parametrize("step", [0, 2])
def test_refused_requests_keep_no_service_alive_and_no_rank_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """One every second kept ``timeout_s`` from ever being looked at, and heartbeats from being sent."""
    clock = _Clock(monkeypatch)
    refused: list[Call] = []

    def check(request: StepRequest, body: bytes) -> None:
        raise ServiceError("the datums cannot be trained on")

    def next_call() -> tuple[float, Call]:
        refused.append(_call("train", step))
        return 1.0, refused[-1]

    with pytest.raises(ServiceError, match="no request came for 50 s"):
        _answer_all(tmp_path, clock.calls(next_call), train=lambda step, body: {}, check=check)
    assert clock.sent == [("idle", 20.0), ("idle", 40.0), ("stop", 51.0)]
    assert {call.answered.result().status for call in refused} == {400 if step == 0 else 409}


def test_requests_that_concern_no_rank_keep_the_ranks_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    coming = [Call(operation="service") for _ in range(45)]
    calls = clock.calls(lambda: (1.0, coming.pop() if coming else Call(operation="finish")))
    _answer_all(tmp_path, calls, train=lambda step, body: {})
    assert clock.sent == [("idle", 20.0), ("idle", 40.0), ("stop", 46.0)]


def test_a_step_that_was_trained_meanwhile_is_answered_and_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _Clock(monkeypatch)
    trained: list[int] = []
    coming = [Call(operation="finish"), _call("train", 0), _call("train", 0)]
    twice = coming[1:]

    def train(step: int, body: bytes) -> dict[str, float]:
        trained.append(step)
        return {"loss": float("nan")}

    _answer_all(tmp_path, clock.calls(lambda: (0.0, coming.pop())), train=train)
    assert trained == [0]
    assert [call.answered.result().body for call in twice] == [b'{"step": 0, "metrics": {"loss": "nan"}}'] * 2


def test_a_step_that_spoilt_the_model_is_answered_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _Clock(monkeypatch)
    call = _call("train", 0)

    def train(step: int, body: bytes) -> dict[str, float]:
        raise ServiceError("step 0 was trained, and its model cannot be used: grad_norm is nan")

    with pytest.raises(ServiceError, match="its model cannot be used"):
        _answer_all(tmp_path, clock.calls(lambda: (0.0, call)), train=train)
    answer = call.answered.result()
    assert answer.status == 500
    assert b"the service ends: step 0 was trained, and its model cannot be used: grad_norm is nan" in answer.body
    assert not (tmp_path / "metrics.jsonl").exists()  # no step was logged
