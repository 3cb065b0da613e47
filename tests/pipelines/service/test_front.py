"""The HTTP side of a training service: wrong, silent and vanished clients harm nobody else; and how long it waits."""

from __future__ import annotations

import http.client
import queue
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from mock_scheduler.errors import ConfigError, ServiceError
from pipelines.config.schema import PipelineConfig
from pipelines.service import http_front
from pipelines.service import run as serving
from pipelines.service.http_front import Answer, Call, Front, listening
from pipelines.service.service import TrainingService
from pipelines.tracking import MetricsWriter


@pytest.fixture
def front() -> Iterator[Front]:
    """A front whose calls are answered with the size of their body."""
    with listening("127.0.0.1", 0) as front:
        answering = threading.Thread(target=_answer_sizes, args=(front,))
        answering.start()
        yield front
        front.calls.put(Call(operation="stop"))
        answering.join()


def _answer_sizes(front: Front) -> None:
    while (call := front.calls.get()).operation != "stop":
        call.answer(Answer.json({"bytes": len(call.body)}))


def address(front: Front) -> tuple[str, int]:
    host, _, port = front.url.removeprefix("http://").partition(":")
    return host, int(port)


def send(front: Front, head: str, body: bytes = b"") -> tuple[int, bytes]:
    """Status and body of the answer to a request."""
    with socket.create_connection(address(front), timeout=30.0) as connection:
        connection.sendall(f"{head}\r\nHost: x\r\n\r\n".encode() + body)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer.status, answer.read()


TRAIN = "POST /v1/steps/0/train HTTP/1.1"
NO_LENGTH = b'{"error": "Content-Length is missing; chunked bodies are not read"}'


@pytest.mark.parametrize(
    ("head", "status", "text"),
    [
        (f"{TRAIN}\r\nContent-Length: 5", 200, b'{"bytes": 5}'),
        (TRAIN, 411, NO_LENGTH),
        (f"{TRAIN}\r\nTransfer-Encoding: chunked", 411, NO_LENGTH),
        (f"{TRAIN}\r\nContent-Length: -1", 400, b"Invalid HTTP request received."),
        (f"{TRAIN}\r\nContent-Length: x", 400, b"Invalid HTTP request received."),
        (f"{TRAIN}\r\nContent-Length: 9999999999", 413, b'{"error": "9999999999 bytes are more than 4294967296"}'),
        ("GET /v1/finish HTTP/1.1", 404, b'{"error": "there is no GET /v1/finish"}'),
    ],
)
def test_a_body_is_of_the_length_that_is_announced_or_refused(
    front: Front, head: str, status: int, text: bytes
) -> None:
    """A negative length was read until the client hung up, a missing one as an empty body, others ended the
    connection with a traceback."""
    assert send(front, head, b"hello") == (status, text)


def test_a_body_of_which_no_more_comes_is_refused(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes memory as it arrives: 4 GB are announced, and 5 bytes come."""
    monkeypatch.setattr(http_front, "_SILENCE_S", 0.2)
    assert send(front, f"{TRAIN}\r\nContent-Length: 4000000000", b"hello") == (
        400,
        b'{"error": "the body ends after 5 of 4000000000 bytes: no more came for 0.2 s"}',
    )


def test_a_client_that_hangs_up_in_the_middle_of_its_body_makes_no_call() -> None:
    with listening("127.0.0.1", 0) as front:
        with socket.create_connection(address(front)) as connection:
            connection.sendall(f"{TRAIN}\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf".encode())
        asking = threading.Thread(target=send, args=(front, "GET /v1/service HTTP/1.1"))
        asking.start()
        call = front.calls.get(timeout=30.0)
        assert call.operation == "service"
        call.answer(Answer.json({}))
        asking.join()
        assert front.calls.empty()


def test_a_call_without_an_answer_is_told_that_the_service_has_ended() -> None:
    answers: list[tuple[int, bytes]] = []
    with listening("127.0.0.1", 0) as front:
        asking = threading.Thread(target=lambda: answers.append(send(front, "GET /v1/service HTTP/1.1")))
        asking.start()
        front.calls.get(timeout=30.0)
    asking.join()
    assert answers == [(503, b'{"error": "the service has ended"}')]


def test_a_silent_client_keeps_nobody_waiting_and_the_service_ends() -> None:
    """The service waited for ever, at its end, for a connection on which nothing came."""
    with listening("127.0.0.1", 0) as front:
        answering = threading.Thread(target=_answer_sizes, args=(front,))
        answering.start()
        silent = socket.create_connection(address(front))
        half = socket.create_connection(address(front))
        half.sendall(f"{TRAIN}\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf".encode())
        assert send(front, f"{TRAIN}\r\nContent-Length: 2", b"ab") == (200, b'{"bytes": 2}')
        front.calls.put(Call(operation="stop"))
        answering.join()
        ends_s = time.monotonic()
    assert time.monotonic() - ends_s < 60.0  # its end is the fact, not its speed
    silent.close()
    half.close()


def test_the_last_answer_is_sent_before_the_end() -> None:
    """Between the last answer and the end, a client was told that the service had ended without."""
    for _ in range(5):
        with listening("127.0.0.1", 0) as front:
            answers: list[tuple[int, bytes]] = []
            asking = threading.Thread(target=lambda: answers.append(send(front, "GET /v1/service HTTP/1.1")))  # noqa: B023
            asking.start()
            front.calls.get().answer(Answer.json({"steps": 2}))
        asking.join()
        assert answers == [(200, b'{"steps": 2}')]


def test_an_address_in_use_is_an_error_that_says_so(front: Front) -> None:
    host, port = address(front)
    with pytest.raises(ConfigError) as caught, listening(host, port):
        pass
    assert str(caught.value) == (
        f"training_service.host 127.0.0.1 and port {port} cannot be listened at: Address already in use; port=0 takes "
        "a free one"
    )


def test_a_folder_of_another_service_is_refused(tmp_path: Path) -> None:
    """Its metrics were overwritten."""
    (tmp_path / "service_metrics.jsonl").touch()
    config = PipelineConfig(exp_name="x", output_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="holds the metrics of another service"), serving._open_front(config):
        pass


def test_the_time_that_a_step_takes_does_not_count_as_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step of more than ``timeout_s``, the service ended at its next heartbeat, while its client rolled out."""
    now_s = [0.0]
    sent: list[str] = []
    calls = [Call(operation="train", step=0), None, None, None]

    def train(step: int, body: bytes) -> dict[str, float]:
        now_s[0] += 1000.0
        return {"loss": 0.5}

    def next_call(timeout: float) -> Call:
        call = calls.pop(0)
        if call is None:
            now_s[0] += timeout
            raise queue.Empty
        return call

    config = PipelineConfig.model_validate({"exp_name": "x", "training_service": {"timeout_s": 50.0}})
    service = SimpleNamespace(
        config=config,
        runtime=SimpleNamespace(device=torch.device("cpu")),
        next_step=1,
        check=lambda operation, step, body: None,
        train=train,
    )
    monkeypatch.setattr(serving, "send", lambda command, device: sent.append(command.operation))
    monkeypatch.setattr(serving.time, "monotonic", lambda: now_s[0])
    front = Front(url="", calls=cast("queue.Queue[Call]", SimpleNamespace(get=next_call)))
    with (
        MetricsWriter(tmp_path, enabled=True, tensorboard=False) as writer,
        pytest.raises(ServiceError, match=r"no request came for 50 s \(training_service\.timeout_s\); 1 steps were"),
    ):
        serving._answer_all(cast(TrainingService, service), front, writer)
    assert sent == ["train", "idle", "idle", "stop"]  # two heartbeats, at 20 and 40 s, and the end at 60 s
    assert now_s == [1060.0]
