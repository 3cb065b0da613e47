"""The client of a training service: every wrong answer is an error that says what came, and none takes it along."""

from __future__ import annotations

import gzip
import json
import logging
import os
import subprocess
import sys
import time
from io import BufferedIOBase

import pytest
import torch

from mock_scheduler.errors import ServiceError
from mock_scheduler.remote import exchange
from mock_scheduler.remote.client import TrainingClient
from mock_scheduler.remote.protocol import encode_scores, with_values
from mock_scheduler.remote.service_file import ServiceAccess
from tests.batches import make_batch
from tests.remote.servers import Seen, answering, whole

TOKEN = "t" * 43
BATCH = make_batch(2, 2)
VALUES = BATCH.rollout_logprobs.double()
DATUMS = with_values(BATCH, VALUES, VALUES)
INFO = {"protocol": 2, "next_step": 0, "layout": "tp1", "contract": {"seed": 1}}


def client_of(seen: Seen, *, timeout_s: float = 10.0, process_id: int | None = None) -> TrainingClient:
    access = ServiceAccess(url=seen.url, token=TOKEN, source="service.json", process_id=process_id)
    return TrainingClient(access, timeout_s=timeout_s)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_PATIENCE_S", 0.1)


def info(**changed: object) -> bytes:
    return whole(json.dumps({**INFO, **changed}).encode())


GZIPPED = gzip.compress(b"{}", mtime=0)  # without the time, which would stand in the name of the test
DEEP = b'{"protocol": 2, "next_step": 0, "layout": "", "contract": ' + b'{"a":' * 100_000


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (whole(b'{"protocol": 2}'), "next_step is missing"),
        (info(next_step="x"), "next_step is 'x': expected a whole number"),
        (info(next_step=True), "next_step is True: expected a whole number"),
        (info(next_step=-1), "next_step is -1: expected at least 0"),
        (info(layout=1), "layout is 1: expected a text"),
        (info(layout="\x1b[2J"), r"layout is '\x1b[2J'"),
        (info(contract=["a"]), "contract is ['a']"),
        (whole(b'{"protocol": 2, "next_step": NaN, "layout": "", "contract": {}}'), "the answer cannot be read"),
        (whole(b'{"protocol": 2, "next_step": ' + b"9" * 5000 + b"}"), "the answer is no JSON"),
        (whole(DEEP), "the answer is no JSON"),
        (whole(b"<html>"), "the answer is no JSON: b'<html>'"),
        (whole(b"\xff\xfe"), "the answer is no JSON"),
        (whole(b""), "the answer is no JSON"),
        (whole(b"[]"), "the answer is no object: b'[]'"),
        (info(protocol=9), "speaks protocol 9, this client 2: run both with one release"),
        (info(protocol="\x1b]0;x"), r"speaks protocol '\x1b]0;x', this client 2"),
        (whole(b"<html>", status="502 Bad Gateway"), "b'<html>' (status 502)"),
        (whole(b'{"error": "step 3 comes next"}', status="409 Conflict"), "step 3 comes next (status 409)"),
        (whole(b'{"error": "\\u001b[2J\\u202ex"}', status="400 Bad"), "\ufffd[2J\ufffdx (status 400)"),
        (whole(b"[" * 60_000, status="400 Bad"), "(status 400)"),
        (whole(b"", status="302 Found", headers="Location: file:///etc/passwd\r\n"), "(status 302)"),
        (whole(b"no", status="401 Unauthorized"), "refuses the token of service.json (status 401)"),
        (
            whole(GZIPPED, headers="Content-Encoding: gzip\r\n"),
            "the answer is compressed ('gzip')",
        ),
        (whole(b"{}", headers="Content-Encoding: br, gzip\r\n"), "the answer is compressed ('br, gzip')"),
        (whole(b" " * 2**20 + b"{}"), "the answer is longer than 1,048,576 bytes"),
        (whole(b" " * 70_000, status="400 Bad"), "the answer is longer than 65,536 bytes"),
    ],
)
def test_a_wrong_answer_is_an_error_with_what_came(answer: bytes, problem: str) -> None:
    """Six kinds of wrong answers were tracebacks."""
    with answering(answer) as seen, pytest.raises(ServiceError) as caught:
        client_of(seen).service()
    assert str(caught.value).startswith(seen.url)
    assert problem in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert len(seen.lines) == 1


def _endless(file: BufferedIOBase) -> None:
    file.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        file.write(b"x" * 2**20)


def _drips_head(file: BufferedIOBase) -> None:
    for _ in range(1000):
        file.write(b"H")
        file.flush()
        time.sleep(0.02)


def _drips_body(file: BufferedIOBase) -> None:
    file.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(1000):
        file.write(b" ")
        file.flush()
        time.sleep(0.02)


def _informs(file: BufferedIOBase) -> None:
    while True:
        file.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
        file.flush()
        time.sleep(0.02)


def test_an_endless_answer_takes_no_memory() -> None:
    """An answer of 2 GB took 6.2 GB."""
    with answering(_endless) as seen, pytest.raises(ServiceError, match="the answer is longer than 1,048,576 bytes"):
        client_of(seen).service()


@pytest.mark.parametrize("script", [_drips_head, _drips_body, _informs])
def test_a_slow_answer_ends_with_the_time_for_all_of_it(script: object) -> None:
    """Each byte had the whole time, so an answer of a thousand could take a thousand times as long."""
    with (
        answering(script) as seen,  # type: ignore[arg-type]
        pytest.raises(ServiceError, match=r"it did not come within 0\.3 s \(training_service\.timeout_s\)"),
    ):
        client_of(seen, timeout_s=0.3).service()


@pytest.mark.parametrize(
    "answer",
    [b"", b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", b"HTTP/1.1 2x0 OK\r\n\r\n"],
)
@pytest.mark.usefixtures("impatient")
def test_an_answer_that_breaks_off_is_asked_for_again_and_then_an_error(answer: bytes) -> None:
    with answering(answer) as seen, pytest.raises(ServiceError, match=r"no answer: .*, for 0\.1 s\. Is the service"):
        client_of(seen).service()
    assert len(seen.lines) > 1


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf",
        whole(b"Service Unavailable", status="503 Service Unavailable"),
        whole(b'{"error": "slow"}', status="408 Request Timeout"),
    ],
)
def test_a_request_without_an_answer_is_sent_again_as_it_was(first: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """One refused or lost connection ended an honest run."""
    trained = whole(b'{"step": 3, "metrics": {"loss": 0.5, "ratio": "nan"}}')
    with answering(first, first, trained) as seen, caplog.at_level(logging.WARNING):
        metrics = client_of(seen).train(DATUMS, step=3)
    assert metrics["loss"] == 0.5
    assert str(metrics["ratio"]) == "nan"
    assert seen.lines == ["POST /v1/steps/3/train"] * 3
    assert seen.bodies == [seen.bodies[0]] * 3
    assert seen.headers == [seen.headers[0]] * 3
    assert len(seen.headers[0]["content-sha256"]) == 64
    assert len([text for text in caplog.messages if "trying again" in text]) == 1


def test_a_service_that_ended_after_the_last_request_has_had_it() -> None:
    with answering(b"", whole(b'{"error": "the service has ended"}', status="410 Gone")) as seen:
        assert client_of(seen).finish() is None
    with answering(whole(b'{"steps": 2}')) as seen:
        assert client_of(seen).finish() == 2


@pytest.mark.usefixtures("impatient")
def test_no_service_is_an_error_that_says_where() -> None:
    with answering(info()) as seen:
        pass
    with pytest.raises(ServiceError, match=rf"{seen.url}/v1/service: no answer: .*failed, for 0.1 s. Is the service"):
        client_of(seen, timeout_s=30.0).service()


def test_a_service_whose_process_has_ended_is_not_waited_for() -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    with answering(info()) as seen:
        client_of(seen, process_id=int(ended.stdout)).service()  # another one answers: the number says nothing
    with pytest.raises(ServiceError, match=rf"process {int(ended.stdout)} of service.json, has ended; where it was"):
        client_of(seen, process_id=int(ended.stdout), timeout_s=30.0).service()


def test_a_lost_connection_alone_does_not_mean_that_the_process_has_ended() -> None:
    """In another container the service's process has another number."""
    with answering(b"", info()) as seen:
        assert client_of(seen, process_id=2**31 - 1).service().layout == "tp1"


def test_the_service_of_another_run_is_refused_with_every_difference() -> None:
    with answering(info(next_step=2)) as seen, pytest.raises(ServiceError) as caught:
        client_of(seen).check({"seed": 2}, first_step=0)
    assert str(caught.value) == (
        f"the service at {seen.url} is not this run's:\n"
        "  - seed: 2 here, 1 in the service\n"
        "  - step: this run begins with 0, the service goes on with 2"
    )


def test_metrics_of_another_step_are_refused() -> None:
    with answering(whole(b'{"step": 2, "metrics": {}}')) as seen, pytest.raises(ServiceError, match="that of step 2"):
        client_of(seen).train(DATUMS, step=3)


@pytest.mark.parametrize("metrics", ["[]", '{"a": true}', '{"a": [1]}', '{"a": 1e999}', '{"a": "much"}', "7"])
def test_metrics_that_are_no_numbers_are_refused(metrics: str) -> None:
    answer = whole(f'{{"step": 3, "metrics": {metrics}}}'.encode())
    with answering(answer) as seen, pytest.raises(ServiceError, match=r"metric|cannot be read"):
        client_of(seen).train(DATUMS, step=3)


def test_scores_are_those_that_were_asked_for_and_no_longer() -> None:
    scores = {"values": VALUES}
    with answering(whole(encode_scores(scores))) as seen:
        assert torch.equal(client_of(seen).score(BATCH, step=0, names=("values",))["values"], VALUES)
    for other in ({"other": VALUES}, {"values": VALUES[1:]}):
        with answering(whole(encode_scores(other))) as seen, pytest.raises(ServiceError, match="answered with scores"):
            client_of(seen).score(BATCH, step=0, names=("values",))
    with answering(whole(bytes(70_000))) as seen, pytest.raises(ServiceError, match="longer than 65,616 bytes"):
        client_of(seen).score(BATCH, step=0, names=("values",))


def test_the_token_is_in_every_request_and_nowhere_else(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_PATIENCE_S", 0.0)
    answers = (info(), whole(b'{"step": 3, "metrics": {}}'), whole(b'{"steps": 1}'), b"", whole(b"", status="401 No"))
    with answering(*answers) as seen, caplog.at_level(logging.DEBUG):
        client = client_of(seen)
        client.service()
        client.train(DATUMS, step=3)
        client.finish()
        problems = []
        for _ in range(2):
            with pytest.raises(ServiceError) as caught:
                client.service()
            problems.append(str(caught.value))
    assert {headers["authorization"] for headers in seen.headers} == {f"Bearer {TOKEN}"}
    assert all(headers["accept-encoding"] == "identity" for headers in seen.headers)
    texts = [repr(client), repr(client._access), *problems, caplog.text, *capsys.readouterr()]
    assert [text for text in texts if TOKEN in text] == []


def test_a_proxy_of_the_environment_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert "HTTP_PROXY" in os.environ
    with answering(info()) as seen:
        assert client_of(seen).service().layout == "tp1"


def test_a_redirect_gets_neither_token_nor_datums() -> None:
    with answering(info()) as other:
        location = f"Location: {other.url}/v1/service\r\n"
        redirect = whole(b"", status="307 Temporary", headers=location)
        with answering(redirect) as seen, pytest.raises(ServiceError, match="status 307"):
            client_of(seen).train(DATUMS, step=3)
        assert other.lines == []
